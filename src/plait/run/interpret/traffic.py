"""What is under way between this rank and others: collectives, messages, requests to servers.

In: instructions that start something, and the tensors of the rank. Out: handles until somebody waits; then tensors,
where the instructions say. Between processes and in one process it is the same: the links differ.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.step import Step
from plait.run.link.background import HopSpan
from plait.run.link.links import Finished, Handle, Links
from plait.run.link.messages import pack, room, unpack
from plait.run.link.process_links import ProcessLinks

Started = ins.Collective | ins.Recv | ins.Pull | ins.Exchange | ins.Copy | ins.Update
"""Instructions that a `Wait` names."""


class Traffic:
    """Starts, keeps and ends the communication of one rank."""

    def __init__(
        self, links: Links, state: ModelState, store: GradientStore, values: dict[Value, Any]
    ) -> None:
        """`values` are the machine's: what arrives is put there."""
        self._links, self._state, self._store, self._values = links, state, store, values
        self._pending: dict[int, tuple[Handle, Started]] = {}
        self._sent: list[Handle] = []
        self.hops: Sequence[HopSpan] = ()
        """The messages that the collective which was last waited for was made of, where it was made hop by hop."""
        self.bytes_sent = 0
        """In all collectives and messages so far; a collective counts what it gathers or sums once."""
        self.handlers: dict[type, Callable[[Step, Any], None]] = {
            ins.Collective: self.collective,
            ins.Send: self.send,
            ins.Recv: self.recv,
            ins.Join: self.join,
        }

    def begin(self, step: Step) -> None:
        """Before the first instruction of a step."""
        if isinstance(self._links, ProcessLinks):
            self._links.loads_kernels = step.is_new

    def may_hold(self, step: Step) -> bool:
        """Whether the host may be held by a device that waits for others, whatever it does.

        Not where kernels are loaded or compiled, which takes its time without anybody.
        """
        return bool(self._pending) and self._state.device.type == "cuda" and not step.is_new

    def collective(self, step: Step, instruction: ins.Collective) -> None:
        """Start one."""
        source = instruction.source
        out = None
        if source is None:
            tensor = torch.empty(0, device=self._state.device)
        elif source.kind == "bucket":
            tensor = self._store.flat(step.own.buckets[source.number])
        else:
            tensor = self._values[source]
            if instruction.op == "all_reduce" and instruction.writes != instruction.reads:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        if source is not None and source.kind == "chunk":
            assert self._state.holding is not None
            out = self._state.holding.room(source.number)
        self.bytes_sent += instruction.num_bytes
        self.keep(instruction, self._links.start(instruction, tensor, out))

    def send(self, step: Step, instruction: ins.Send) -> None:
        """Send a message; nobody waits for it before the end of the step."""
        source = instruction.reads[0]
        if source.kind in ("bucket", "shard"):
            flat = self._part(step, source).reshape(-1).view(torch.uint8)
        else:
            tensors = [self._values[value] for value in instruction.reads]
            flat = pack(tensors, step.described(instruction, instruction.reads))
        self.bytes_sent += instruction.num_bytes
        handle = self._links.send(instruction, flat)
        if not isinstance(
            handle, Finished
        ):  # else it has left: its memory is free long before the end of the step
            self._sent.append(handle)

    def recv(self, step: Step, instruction: ins.Recv) -> None:
        """Make room for a message."""
        made = instruction.writes[0]
        if made.kind == "part":
            flat = torch.empty_like(self._part(step, made)).reshape(-1).view(torch.uint8)
        else:
            flat = room(step.described(instruction, instruction.writes), self._state.device)
        self.keep(instruction, self._links.receive(instruction, flat))

    def join(self, step: Step, instruction: ins.Join) -> None:
        """Add up the parts that several stages have of a bucket, in the order of stages."""
        parts = {instruction.own: self._part(step, instruction.reads[0])}
        parts |= {
            at: self._values[value]
            for at, value in zip(instruction.parts, instruction.reads[1:], strict=True)
        }
        first, *rest = (parts[at] for at in sorted(parts))
        total = first.clone()
        for part in rest:
            total.add_(part)
        parts[instruction.own].copy_(total)

    def keep(self, instruction: Started, handle: Handle) -> None:
        """Remember what was started until its `Wait`."""
        self._pending[instruction.id] = (handle, instruction)

    def wait(self, step: Step, instruction: ins.Wait) -> Iterator[None]:
        """Have the result of what was started; yields while another rank has to move first."""
        handle, started = self._pending.pop(instruction.of)
        while not handle.ready():
            yield
        self._arrive(step, started, handle.result())
        self.hops = getattr(handle, "hops", ())

    def drain(self) -> Iterator[None]:
        """The end of a step: all that was sent has left."""
        for handle in self._sent:
            while not handle.ready():
                yield
            handle.result()
        self._sent.clear()

    def _part(self, step: Step, value: Value) -> Tensor:
        """What this rank has of a bucket before tied parts are added: the sums of its own shard, or all."""
        return self._store.whole_or_kept(step.own.buckets[value.number])

    def _arrive(self, step: Step, started: Started, result: Tensor) -> None:
        if isinstance(started, ins.Pull | ins.Copy | ins.Update):
            return  # it is where it belongs
        if isinstance(started, ins.Recv):
            if started.writes[0].kind == "part":
                like = self._part(step, started.writes[0])
                self._values[started.writes[0]] = result.view(like.dtype).view(like.shape)
            else:
                views = unpack(result, step.described(started, started.writes))
                self._values.update(zip(started.writes, views, strict=True))
            return
        source = started.reads[0] if started.reads else None
        if source is not None and source.kind == "chunk":
            group = step.program.layout.groups[source.number]
            self._values.update(zip(started.writes, group.views(result), strict=True))
        elif started.writes:
            self._values[started.writes[0]] = result
