"""One rank at work: executes its instructions on real tensors.

In: a program, this rank's share of the batch. Out: changed parameters, the step's loss. It is the same under both
real interpreters: the worker gives it links between processes, the serial interpreter mailboxes. `execute` is a
generator that yields while another rank has to move first; in a process it never yields.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plait.errors import PlanError
from plait.job.data.share import Share
from plait.program import instructions as ins
from plait.program.program import Program
from plait.program.segment.compiled import CompiledSegments
from plait.program.value import TOTAL, WEIGHT, Value
from plait.run.hold.averaging import Averaging
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.commits import Commits
from plait.run.interpret.compression import Compressor
from plait.run.interpret.copies import Copies
from plait.run.interpret.outcome import Observer, StepOutcome
from plait.run.interpret.segments import Segments
from plait.run.interpret.serving import Serving
from plait.run.interpret.step import Step, Steps, compare_sizes
from plait.run.interpret.straggler import Straggler
from plait.run.interpret.sums import Sums
from plait.run.interpret.traffic import Traffic
from plait.run.interpret.updates import Updates
from plait.run.interpret.user_code import UserCode
from plait.run.interpret.worker_side import WorkerSide
from plait.run.link.links import Links
from plait.run.link.wire import Post


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
        self.state = state
        self.links = links
        self.observer = observer
        self.store = GradientStore(state, links)
        self.averaging = Averaging(state, links)
        self.serving = Serving(rank, state, post)
        """Its side of servers, where there are any."""
        self.outcome: StepOutcome | None = None
        """Of the last step; None where this rank had no samples of its own."""
        self.straggler = Straggler()
        """How much longer this rank takes to compute than it needs."""
        self._values: dict[Value, Any] = state.values()
        self.commits = Commits(state, self.store, self._values)
        """What a step writes over, and how far it can be undone."""
        self._traffic = Traffic(links, state, self.store, self._values)
        self._sums = Sums(state, self.store, Compressor(links), self._values)
        self._side = WorkerSide(state, self.store, self.averaging, self.serving, self._traffic, self._values)
        copies = Copies(state, self.store, self._values, self._traffic.keep)
        self._updates = Updates(state, self.store, copies, self._traffic.keep)
        self._steps = Steps(rank, state)
        self.segments = Segments(rank, state, self.store, self._values, compiled)
        """Runs what is captured."""
        self.user_code = UserCode(rank, links, state, self.store, self._values)
        """Runs what is not captured."""
        self._run: dict[type, Callable[[Step, Any], None]] = {
            **self.segments.handlers,
            **self.commits.handlers,
            ins.Update: self._update,
            **self._traffic.handlers,
            **copies.handlers,
            **self._sums.handlers,
            **self._side.handlers,
        }

    def begin(self, program: Program) -> None:
        """Before the first step, with the weights that it begins with; of a worker, any step's program will do."""
        self.serving.begin(program)
        self._once(program.of(self.rank).prologue, self.state.steps_done)

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
            self._side.once[type(instruction)](instruction)
            self.observer.done(step, instruction, start, time.perf_counter_ns())

    def execute(self, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        """One step, under the caller's `torch.no_grad`: a generator must not change the mode of its caller."""
        yield from self._begin_step(program, step, shares)
        yield from self._carry_out(self._at.instructions)
        if self._at.own.serve is None:
            yield from self._end_step(step + 1)
            self._take_outcome()

    def gradients(self, program: Program, number: int, shares: Sequence[Share]) -> Iterator[None]:
        """A step up to its update, for somebody who updates when it suits them; `number` decides what is drawn."""
        if program.plan.memory.offload != "none":
            raise PlanError(
                "memory.offload updates weights within a step, part by part; here the loop updates them itself.",
                fix="drop it, or let plait make whole steps (`plait run`, `plait.parallelize(job)`).",
            )
        yield from self._begin_step(program, number, shares)
        yield from self._carry_out(self._parted()[0])
        yield from self._traffic.drain()
        self._take_outcome()

    def after_update(self) -> Iterator[None]:
        """What follows the update of the step whose gradients were made last: where workers average, that."""
        yield from self._carry_out(self._parted()[1])
        yield from self._end_step(self.state.steps_done + 1)

    def _parted(self) -> tuple[Sequence[ins.Instruction], Sequence[ins.Instruction]]:
        """What comes before the one update of a step, and after."""
        instructions = list(self._at.instructions)
        at = next((i for i, entry in enumerate(instructions) if isinstance(entry, ins.Update)), None)
        return (instructions, ()) if at is None else (instructions[:at], instructions[at + 1 :])

    def _begin_step(self, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        now = self._steps.begin(program, step, shares)
        self._traffic.begin(now)
        self.store.frozen, self.store.conditional = self.state.frozen(step), program.conditional
        self._sums.norm, self._sums.loss, self.user_code.used = None, None, frozenset()
        self.commits.begin()
        self._updates.begin()
        self._values |= now.known.constants
        if self.store.on_ready is not None:  # a proof holds copies to what the program promises
            self.state.host_memory.ledger.device_limit = now.known.at_hand
        if now.own.same_sizes and shares:
            yield from compare_sizes(now, self.links)

    def _carry_out(self, instructions: Sequence[ins.Instruction]) -> Iterator[None]:
        now, step = self._at, self._at.number
        entering, done, clock = self.observer.entering, self.observer.done, time.perf_counter_ns
        for instruction in instructions:
            start = clock()
            if isinstance(instruction, ins.Wait):
                entering(step, instruction, True)
                yield from self._traffic.wait(now, instruction)
                if self._traffic.hops:
                    self.observer.hopped(step, self._traffic.hops)
            elif isinstance(instruction, ins.Serve):
                assert self.serving.service is not None
                yield from self.serving.service.execute()
                return
            elif isinstance(instruction, ins.Opaque):
                entering(step, instruction, False)
                yield from self.user_code.execute(now, instruction, self.segments.detect_nan)
                self.straggler.delay(start)
            else:
                entering(step, instruction, self._traffic.may_hold(now))
                self._run[type(instruction)](now, instruction)
                if isinstance(instruction, ins.Compute):
                    self.straggler.delay(start)
            for name in instruction.frees:
                self._values.pop(name, None)
            done(step, instruction, start, clock())

    def _end_step(self, steps_done: int) -> Iterator[None]:
        yield from self._traffic.drain()
        self.store.tell_parts()
        self.state.steps_done = steps_done
        self.commits.end()
        if self.state.averages is not None:
            self.state.host_memory.settle()
        if self.state.averages is not None and self._at.program.plan.agreement.weights == "own":
            self.state.averages.after(steps_done - 1)

    def _take_outcome(self) -> None:
        self.outcome = None
        if self._at.shares and TOTAL in self._values:  # else another rank has the losses
            self.outcome = StepOutcome(
                total=self._values.pop(TOTAL),
                weight=self._values.pop(WEIGHT),
                norm=self._sums.norm,
                early=self._sums.loss,
            )

    @property
    def bytes_sent(self) -> int:
        """In all collectives and messages so far; a collective counts what it gathers or sums once."""
        return self._traffic.bytes_sent

    @property
    def step(self) -> int:
        """The number of the step that is executed, or was last."""
        return self._at.number

    @property
    def _at(self) -> Step:
        return self._steps.now

    def _update(self, now: Step, instruction: ins.Update) -> None:
        self.commits.begin_update()
        counts = self._updates.counts(self._sums.norm)
        if not counts:
            self._sums.norm = None  # of a step that was not made
        self._updates.update(now, instruction, counts=counts)
