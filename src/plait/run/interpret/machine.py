"""One rank at work: executes its instructions on real tensors.

In: a program, this rank's share of the batch. Out: changed parameters, the step's loss. It is the same under both
real interpreters: the worker gives it links between processes, the serial interpreter mailboxes. `execute` is a
generator that yields while another rank has to move first; in a process it never yields.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.graph.ops.random import random_key
from plait.job.data.loader import Share
from plait.latest import Latest
from plait.plan.plan import DATA
from plait.program import instructions as ins
from plait.program.cost.places import places_of
from plait.program.program import Bucket, Program, RankProgram, Spec
from plait.program.segment.compiled import CompiledSegments
from plait.program.sized import Numbers
from plait.program.value import SQUARES, TOTAL, WEIGHT, Value
from plait.run.interpret.averaging import Averaging
from plait.run.interpret.center import Center
from plait.run.interpret.compression import Compressor
from plait.run.interpret.eager import run_eagerly
from plait.run.interpret.gradients import GradientStore
from plait.run.interpret.optimized import Optimized
from plait.run.interpret.port import Port
from plait.run.interpret.service import Service
from plait.run.interpret.state import ModelState
from plait.run.link.links import Finished, Handle, Links
from plait.run.link.messages import pack, room, unpack
from plait.run.link.wire import Post
from plait.torch_private import pytree

_PROGRAMS = 16
"""Programs of which a machine remembers what it has worked out: memory is bounded."""


class Observer(Protocol):
    """Told of every instruction: the board that the launcher watches, and the trace."""

    def entering(self, step: int, instruction: ins.Instruction, waiting: bool) -> None: ...

    def done(self, step: int, instruction: ins.Instruction, start_ns: int, end_ns: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What is known after a step; reading the numbers waits for the device."""

    total: Tensor
    weight: Tensor | float
    norm: Tensor | None
    """Global norm of the gradients before clipping, where it was computed."""

    @property
    def loss(self) -> float:
        """The mean over the whole batch."""
        return float(self.total / self.weight)  # one read: on a GPU each one waits for the device


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What a machine works out once for a program, which it keeps, so that no other gets its id."""

    own: RankProgram
    constants: dict[Value, Tensor]
    places: dict[Value, tuple[Bucket, int]]
    """Gradients that may be made in their bucket, and where."""


class Machine:
    """Executes programs for one rank."""

    def __init__(
        self,
        rank: int,
        state: ModelState,
        links: Links,
        observer: Observer,
        compiled: CompiledSegments | None = None,
        post: Post | None = None,
    ) -> None:
        """`post`: messages to and from servers, where there are any."""
        self.rank = rank
        self.compiled = compiled
        """Runs segments, where they are compiled; None: as they are written."""
        self.state = state
        self.links = links
        self.observer = observer
        self.store = GradientStore(state, links)
        self.averaging = Averaging(state, links)
        self.compressor = Compressor(links)
        self.post = post
        self.port: Port | None = None
        """A worker's way to servers, where there are any."""
        self.service: Service | None = None
        """What a server does."""
        self.waits = True
        """Whether an answer of a server may be waited for; else others must move meanwhile."""
        self.outcome: StepOutcome | None = None
        """Of the last step; None where this rank had no samples of its own."""
        self.bytes_sent = 0
        """In all collectives and messages so far; a collective counts what it gathers or sums once."""
        self.slowdown = 1.0
        """How much longer this rank takes to compute than it needs: for trying out a straggler."""
        self._values: dict[Value, Any] = state.values()
        self._pending: dict[int, tuple[Handle, ins.Collective | ins.Recv | ins.Pull | ins.Exchange]] = {}
        self._sent: list[Handle] = []
        self._places: dict[Value, tuple[Bucket, int]] = {}
        self._numbers: Sequence[Numbers] = ()
        """Of each micro-batch, where the program follows their sizes."""
        self._known = Latest[int, _Known](_PROGRAMS)
        self._program: Program | None = None
        self._shares: Sequence[Share] = ()
        self._step = 0
        self._own: RankProgram | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._axes: list[str] = []
        self._coordinates: tuple[int, ...] = ()
        self._norm: Tensor | None = None
        self._run: dict[type, Callable[[Any], None]] = {
            ins.Load: self._load,
            ins.Compute: self._compute,
            ins.Opaque: self._opaque,
            ins.Collective: self._collective,
            ins.Send: self._send,
            ins.Recv: self._recv,
            ins.Join: self._join,
            ins.Tally: self._tally,
            ins.Tangent: self._tangent,
            ins.Accumulate: self._accumulate,
            ins.Compress: self._compress,
            ins.Decompress: self._decompress,
            ins.Keep: self._keep,
            ins.SquareSum: self._square_sum,
            ins.Finish: self._finish,
            ins.Stash: self._stash,
            ins.Update: self._update,
            ins.Commit: self._commit,
            ins.Push: self._push,
            ins.PushBuffers: self._push_buffers,
            ins.Pull: self._pull,
            ins.Outcome: self._outcome,
            ins.Flatten: self._average,
            ins.Lookahead: self._average,
            ins.Momentum: self._average,
            ins.Exchange: self._exchange,
            ins.Mix: self._average,
            ins.Anchor: lambda anchor: self.averaging.anchor(center=anchor.center),
            ins.Leave: lambda leave: self._to_servers().leave(),
        }

    def begin(self, program: Program) -> None:
        """Before the first step, with the weights that it begins with; of a worker, any step's program will do."""
        own = program.of(self.rank)
        if own.serve is not None:
            assert self.post is not None
            service = Service(program.plan, self.rank, self.post, self.state, own, own.serve)
            service.holder = Optimized(service) if "push" in own.serve.handlers else Center(service)
            self.service = service
        elif self.post is not None:
            self.port = Port(program.plan, self.post, self.state, own, waits=self.waits)
        self._once(own.prologue, self.state.steps_done)

    def skip(self, step: int) -> None:
        """A step of which this rank has nothing to do."""
        self.state.steps_done, self.outcome = step + 1, None

    def end(self, program: Program) -> None:
        """After the last step."""
        self._once(program.of(self.rank).epilogue, max(0, self.state.steps_done - 1))

    def _once(self, instructions: Sequence[ins.Instruction], step: int) -> None:
        for instruction in instructions:
            start = time.perf_counter_ns()
            self.observer.entering(step, instruction, False)
            self._run[type(instruction)](instruction)
            self.observer.done(step, instruction, start, time.perf_counter_ns())

    def execute(self, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        """One step, under the caller's `torch.no_grad`: a generator must not change the mode of its caller."""
        own = program.of(self.rank)
        self._program, self._shares, self._step, self._norm = program, shares, step, None
        self._own, self._buckets = own, own.buckets
        self._axes = [name for name, _ in program.plan.mesh.axes]
        self._coordinates = program.plan.mesh.coordinates(self.rank) if own.serve is None else ()
        known = self._known_of(program, own)
        self._values |= known.constants
        self._places = known.places
        instructions = own.instructions
        if own.sized is not None:
            self._numbers = [own.sized.numbers(_leaves(share)) for share in shares]
            instructions = own.sized.instructions(instructions, self._numbers)
        entering, done, clock = self.observer.entering, self.observer.done, time.perf_counter_ns
        for instruction in instructions:
            start = clock()
            if isinstance(instruction, ins.Wait):
                entering(step, instruction, True)
                handle, started = self._pending.pop(instruction.of)
                while not handle.ready():
                    yield
                self._arrive(started, handle.result())
            elif isinstance(instruction, ins.Serve):
                assert self.service is not None
                yield from self.service.execute()
                return
            else:
                entering(step, instruction, False)
                self._run[type(instruction)](instruction)
                if self.slowdown > 1 and isinstance(instruction, ins.Compute | ins.Opaque):
                    time.sleep((self.slowdown - 1) * (clock() - start) / 1e9)
            for name in instruction.frees:
                self._values.pop(name, None)
            done(step, instruction, start, clock())
        for handle in self._sent:
            while not handle.ready():
                yield
            handle.result()
        self._sent.clear()
        self.state.steps_done = step + 1
        self.outcome = None
        if shares:
            self.outcome = StepOutcome(
                total=self._values.pop(TOTAL), weight=self._values.pop(WEIGHT), norm=self._norm
            )

    def _known_of(self, program: Program, own: RankProgram) -> "_Known":
        """What is worked out once for a program."""
        known = self._known.get(id(own))
        if known is None:
            device, dtype = self.state.device, self.state.dtype
            places = places_of(own, program.layout.zero)
            known = _Known(
                own=own,
                constants={
                    name: tensor.to(
                        device, dtype if tensor.is_floating_point() and dtype == torch.float64 else None
                    )
                    for name, tensor in own.constants.items()
                },
                places={name: (own.buckets[index], position) for name, (index, position) in places.items()},
            )
            self._known.put(id(own), known)
        return known

    def _load(self, instruction: ins.Load) -> None:
        number = instruction.micro_batch
        assert number is not None
        share = self._shares[number]
        for index, leaf in enumerate(_leaves(share)):
            self._values[Value.batch(index, number)] = self.state.place(leaf)
        key = Value.key(number)
        if key not in instruction.frees:  # nobody reads it where the model draws no random numbers
            self._values[key] = random_key(
                seed=self.state.job.seed,
                step=self._step,
                micro_batch=number,
                first_sample=share.offset,
                device=self.state.device,
            )
        for axis, coordinate in zip(self._axes, self._coordinates, strict=True):
            self._values[Value.offset(axis, number)] = share.offset if axis == DATA else coordinate

    def _compute(self, instruction: ins.Compute) -> None:
        own, values = self._own, self._values
        assert own is not None
        segment = own.segments[instruction.segment]
        run, numbers = segment.run, tuple[Numbers, ...]()
        if own.sized is not None:
            if instruction.segment in own.sized.runs:
                assert instruction.micro_batch is not None
                run, numbers = own.sized.runs[instruction.segment], (self._numbers[instruction.micro_batch],)
        elif self.compiled is not None:
            run = self.compiled.run_of(segment)
        args = [values[name] for name in instruction.reads]
        for name in instruction.frees:  # the segment drops its inputs one by one; nobody else may hold them
            values.pop(name, None)
        if segment.fillable:
            wanted = [self._places.get(instruction.writes[position]) for position in segment.fillable]
            into = [self.store.place(*place) if place else None for place in wanted]
            results = run(args, into, *numbers)
        else:
            results = run(args, (), *numbers)
        values.update(zip(instruction.writes, results, strict=True))

    def _opaque(self, instruction: ins.Opaque) -> None:
        number = instruction.micro_batch
        assert number is not None
        results = run_eagerly(self.state, self._shares[number], instruction, self._step, number)
        self._values.update(zip(instruction.writes, results, strict=True))

    def _collective(self, instruction: ins.Collective) -> None:
        source = instruction.reads[0]
        out = None
        if source.kind == "bucket":
            tensor = self.store.flat(self._bucket(source.number))
        else:
            tensor = self._values[source]
            if instruction.op == "all_reduce" and instruction.writes != instruction.reads:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        if source.kind == "chunk":
            assert self.state.holding is not None
            out = self.state.holding.room(source.number)
        self.bytes_sent += instruction.num_bytes
        self._pending[instruction.id] = (self.links.start(instruction, tensor, out), instruction)

    def _send(self, instruction: ins.Send) -> None:
        source = instruction.reads[0]
        if source.kind in ("bucket", "shard"):
            flat = self._part(source).reshape(-1).view(torch.uint8)
        else:
            tensors = [self._values[name] for name in instruction.reads]
            flat = pack(tensors, self._described(instruction, instruction.reads))
        self.bytes_sent += instruction.num_bytes
        handle = self.links.send(instruction, flat)
        if not isinstance(
            handle, Finished
        ):  # else it has left: its memory is free long before the end of the step
            self._sent.append(handle)

    def _recv(self, instruction: ins.Recv) -> None:
        made = instruction.writes[0]
        if made.kind == "part":
            like = self._part(made)
            flat = torch.empty_like(like).reshape(-1).view(torch.uint8)
        else:
            flat = room(self._described(instruction, instruction.writes), self.state.device)
        self._pending[instruction.id] = (self.links.receive(instruction, flat), instruction)

    def _described(self, instruction: ins.Instruction, names: Sequence[Value]) -> list[Spec]:
        own = self._own
        assert own is not None
        if own.sized is None:
            return [own.values[name] for name in names]
        assert instruction.micro_batch is not None
        numbers = self._numbers[instruction.micro_batch]
        return [own.sized.described(name, own.values[name], numbers) for name in names]

    def _part(self, value: Value) -> Tensor:
        """What this rank has of a bucket before tied parts are added: the sums of its own shard, or all."""
        return self.store.whole_or_kept(self._bucket(value.number))

    def _join(self, instruction: ins.Join) -> None:
        parts = {instruction.own: self._part(instruction.reads[0])}
        parts |= {
            at: self._values[name] for at, name in zip(instruction.parts, instruction.reads[1:], strict=True)
        }
        first, *rest = (parts[at] for at in sorted(parts))
        total = first.clone()
        for part in rest:
            total.add_(part)
        parts[instruction.own].copy_(total)

    def _arrive(self, started: ins.Collective | ins.Recv | ins.Pull | ins.Exchange, result: Tensor) -> None:
        if isinstance(started, ins.Pull):
            return  # written to the parameters as it came
        if isinstance(started, ins.Recv):
            if started.writes[0].kind == "part":
                like = self._part(started.writes[0])
                self._values[started.writes[0]] = result.view(like.dtype).view(like.shape)
            else:
                views = unpack(result, self._described(started, started.writes))
                self._values.update(zip(started.writes, views, strict=True))
            return
        source = started.reads[0]
        if source.kind == "chunk":
            assert self._program is not None
            group = self._program.layout.groups[source.number]
            self._values.update(zip(started.writes, group.views(result), strict=True))
        else:
            self._values[started.writes[0]] = result

    def _tally(self, instruction: ins.Tally) -> None:
        parts = [self._values[name] for name in instruction.reads]
        if not parts:
            zero = torch.zeros((), dtype=self.state.dtype, device=self.state.device)
            self._values[instruction.writes[0]] = zero
            return
        total = torch.stack(parts).sum() if len(parts) > 1 else parts[0].clone()
        self._values[instruction.writes[0]] = total

    def _tangent(self, instruction: ins.Tangent) -> None:
        name = instruction.writes[0]
        if instruction.weight is None:
            self._values[name] = self._values[instruction.reads[0]].reciprocal()
        else:
            self._values[name] = torch.full(
                (), 1.0 / instruction.weight, dtype=self.state.dtype, device=self.state.device
            )

    def _bucket(self, index: int) -> Bucket:
        return self._buckets[index]

    def _accumulate(self, instruction: ins.Accumulate) -> None:
        bucket = self._bucket(instruction.bucket)
        tensors = [self._values[name] for name in instruction.reads]
        for name in instruction.frees:
            self._values.pop(name, None)
        self.store.add(bucket, tensors, fresh=instruction.fresh)
        self._values[instruction.writes[0]] = None

    def _compress(self, instruction: ins.Compress) -> None:
        assert self._program is not None
        bucket, before = self._bucket(instruction.bucket), [self._values[n] for n in instruction.reads[1:]]
        self._values[instruction.writes[0]] = self.compressor.compress(
            bucket, self.store.flat(bucket), self._program.plan.sync, instruction.part, *before or (None,)
        )

    def _decompress(self, instruction: ins.Decompress) -> None:
        assert self._program is not None
        bucket, sums = self._bucket(instruction.bucket), [self._values[name] for name in instruction.reads]
        self.compressor.decompress(bucket, self.store.flat(bucket), self._program.plan.sync, sums)

    def _keep(self, instruction: ins.Keep) -> None:
        name = instruction.reads[0]
        part, self._values[name] = self._values[name], None
        self.store.keep(self._bucket(instruction.bucket), part, fresh=instruction.fresh)

    def _square_sum(self, instruction: ins.SquareSum) -> None:
        self._values[instruction.writes[0]] = self.store.squares(self._buckets, instruction.axes)

    def _finish(self, instruction: ins.Finish) -> None:
        assert self._program is not None
        program = self._program
        scalars = self.store.scalars(self._buckets)
        self._values[TOTAL] = scalars["total"].clone()
        weight: Any = program.total_weight
        if instruction.late_weight:
            weight = scalars["weight"].clone()
        elif weight is None:
            weight = self._values[WEIGHT]
        self._values[WEIGHT] = weight
        self._norm = self.store.finish(
            self._buckets,
            late_weight=weight if instruction.late_weight else None,
            clip_norm=instruction.clip_norm,
            squares=self._values.get(SQUARES),
        )

    def _to_servers(self) -> Port:
        assert self.port is not None, "a machine begins before its first step"
        return self.port

    def _push(self, instruction: ins.Push) -> None:
        bucket = self._bucket(instruction.bucket)
        self._to_servers().push(instruction.bucket, bucket, self.store.flat(bucket), self._step)

    def _push_buffers(self, instruction: ins.PushBuffers) -> None:
        self._to_servers().push_buffers(
            [self.state.buffers[name] for name in instruction.buffers], self._step
        )

    def _pull(self, instruction: ins.Pull) -> None:
        handle = self._to_servers().pull(instruction.bucket, self._step)
        self._pending[instruction.id] = (handle, instruction)

    def _outcome(self, instruction: ins.Outcome) -> None:
        assert self._program is not None
        scalars = self.store.scalars(self._buckets)
        weight: Any = self._program.total_weight
        if instruction.late_weight:
            weight = scalars["weight"].clone()
        self._values[TOTAL] = scalars["total"].clone()
        self._values[WEIGHT] = self._values[WEIGHT] if weight is None else weight

    def _stash(self, instruction: ins.Stash) -> None:
        for source, name in zip(instruction.reads, instruction.writes, strict=True):
            self._values[name] = self._values[source].clone()

    def _update(self, instruction: ins.Update) -> None:
        self.state.schedule.apply(self.state.optimizer, self._step)
        self.store.hand_over(self._buckets)
        self.state.optimizer.step()
        self.store.take_back(self._buckets)

    def _commit(self, instruction: ins.Commit) -> None:
        for name, source in zip(instruction.buffers, instruction.reads, strict=True):
            new = self.store.buffer(name) if source.kind == "bucket" else self._values[source]
            self.state.buffers[name].copy_(new)

    def _average(self, instruction: ins.Flatten | ins.Lookahead | ins.Momentum | ins.Mix) -> None:
        assert self._program is not None and self._own is not None
        flat = self._own.averages[instruction.flat]
        self.averaging.execute(instruction, flat, self._program.plan, self._values)

    def _exchange(self, instruction: ins.Exchange) -> None:
        assert self._program is not None
        plan, flat = self._program.plan, self._values[instruction.reads[0]]
        self.state.schedule.apply(self.state.optimizer, self._step)
        strength = (
            1 / plan.mesh.size if instruction.rule == "share" else self.averaging.rate * plan.elastic.rho
        )
        handle = self._to_servers().exchange(instruction.flat, flat, strength, self._step)
        self._pending[instruction.id] = (handle, instruction)


def _leaves(share: Share) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(share.batch) if isinstance(leaf, Tensor)]
