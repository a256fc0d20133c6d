"""The serial interpreter: all ranks of a program in one process, on real tensors, with mailboxes for links.

In: a program and every rank's share. Out: the same tensors that processes would compute. Ranks take turns; a rank that
waits for another gives up its turn, and if nobody can move the deadlock is reported with who waits for what.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.errors import HangError
from plait.job.data.share import Share
from plait.plan.mesh import Mesh
from plait.program.instructions import Collective, Instruction, Recv, Send
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.link.links import Finished, Handle, edges, with_halo, with_halo_added

Reduce = Callable[[Sequence[Tensor]], Tensor]


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


class Mailboxes:
    """Where collectives meet: the n-th of a group is one meeting."""

    def __init__(self, mesh: Mesh, reduce: Reduce = add_up) -> None:
        self.mesh = mesh
        self.reduce = reduce
        self._meetings: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = {}
        self.letters: dict[tuple[int, int, str], deque[Tensor]] = {}
        """Messages by (sender, receiver, name), in the order in which they were sent."""
        self._results: dict[tuple[tuple[int, ...], int], tuple[Sequence[Tensor], int]] = {}
        self.moves = 0
        """Messages that were sent or taken: somebody moves, though it stands at the same instruction."""

    def arrive(self, meeting: tuple[tuple[int, ...], int], rank: int, tensor: Tensor) -> None:
        """Leave a tensor."""
        self._meetings.setdefault(meeting, {})[rank] = tensor

    def complete(self, meeting: tuple[tuple[int, ...], int]) -> bool:
        """Whether everybody has arrived."""
        return meeting in self._results or len(self._meetings.get(meeting, ())) == len(meeting[0])

    def collect(self, meeting: tuple[tuple[int, ...], int], collective: Collective) -> Sequence[Tensor]:
        """What everybody left, or its sum alone where one is made; the last one to ask clears the meeting."""
        if meeting not in self._results:
            tensors = [tensor for _, tensor in sorted(self._meetings.pop(meeting).items())]
            is_sum = collective.op in ("all_reduce", "reduce_scatter", "reduce")
            self._results[meeting] = ([self.reduce(tensors)] if is_sum else tensors, 0)
        result, asked = self._results[meeting]
        self._results[meeting] = (result, asked + 1)
        if asked + 1 == len(meeting[0]):
            del self._results[meeting]
        return result


class _Meeting:
    def __init__(
        self,
        boxes: Mailboxes,
        meeting: tuple[tuple[int, ...], int],
        collective: Collective,
        rank: int,
        tensor: Tensor,
        out: Tensor | None,
    ) -> None:
        self._boxes, self._meeting, self._collective = boxes, meeting, collective
        self._own = meeting[0].index(rank)
        self._tensor, self._out = tensor, out

    def ready(self) -> bool:
        return self._boxes.complete(self._meeting)

    def result(self) -> Tensor:
        collective, own = self._collective, self._own
        found = self._boxes.collect(self._meeting, collective)
        match collective.op:
            case "all_reduce":
                return self._tensor.copy_(found[0])
            case "reduce":
                return self._tensor.copy_(found[0]) if own == 0 else self._tensor
            case "broadcast":
                return found[0]
            case "all_gather":
                return _joined(found, collective, self._out)
            case "reduce_scatter":
                start = sum(collective.extents[:own])
                piece = found[0].narrow(collective.dim, start, collective.extents[own])
                return piece.clone(memory_format=torch.contiguous_format)
        before = edges(found[own - 1], collective)[1] if own > 0 else None
        after = edges(found[own + 1], collective)[0] if own + 1 < len(found) else None
        if collective.op == "halo":
            return with_halo(found[own], before, after, collective)
        return with_halo_added(found[own], before, after, collective)


def _joined(pieces: Sequence[Tensor], collective: Collective, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.cat(list(pieces), collective.dim)
    return out.copy_(torch.cat(list(pieces)).view(out.shape))


class _Letter:
    """A message that may not have been sent yet."""

    def __init__(self, boxes: Mailboxes, key: tuple[int, int, str], flat: Tensor) -> None:
        self._boxes, self._key, self._flat = boxes, key, flat

    def ready(self) -> bool:
        return bool(self._boxes.letters.get(self._key))

    def result(self) -> Tensor:
        self._boxes.moves += 1
        return self._flat.copy_(self._boxes.letters[self._key].popleft())


class SerialLinks:
    """One rank's links to mailboxes."""

    takes_turns = True

    def __init__(self, boxes: Mailboxes, rank: int) -> None:
        self._boxes = boxes
        self._rank = rank
        self._counts: dict[tuple[int, ...], int] = {}

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Leave a copy of the tensor in the mailbox."""
        group = self._boxes.mesh.group(self._rank, collective.axis)
        number = self._counts.get(group, 0)
        self._counts[group] = number + 1
        self._boxes.arrive((group, number), self._rank, tensor.clone())
        return _Meeting(self._boxes, (group, number), collective, self._rank, tensor, out)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """Leave a copy of the bytes."""
        to = self._boxes.mesh.group(self._rank, send.axis)[send.to]
        self._boxes.moves += 1
        self._boxes.letters.setdefault((self._rank, to, send.message), deque()).append(flat.clone())
        return Finished(flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """Look for a message when it is needed."""
        source = self._boxes.mesh.group(self._rank, recv.axis)[recv.source]
        return _Letter(self._boxes, (source, self._rank, recv.message), flat)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """Any memory will do."""
        return torch.zeros(count, dtype=dtype, device=device)


class SerialPost:
    """One rank's messages to and from servers, in the same mailboxes."""

    def __init__(self, boxes: Mailboxes, rank: int) -> None:
        self._letters = boxes.letters
        self._rank = rank

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a copy."""
        self._letters.setdefault((self._rank, to, message), deque()).append(torch.cat(parts))

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Have a message used, where it is there."""
        found = self._letters.get((source, self._rank, message))
        if not found:
            return False
        use(found.popleft())
        return True

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Have a message used that is there."""
        assert self.take(message, source, use), f"{message} from rank {source} is not there"


class Unobserved:
    """An observer that remembers only where a rank is."""

    def __init__(self) -> None:
        self.place: Instruction | None = None

    def entering(self, step: int, instruction: Instruction, waiting: bool) -> None:
        self.place = instruction

    def hopped(self, step: int, hops: object) -> None:
        pass

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        pass


@torch.no_grad()
def run_step(
    machines: Sequence[Machine],
    program: Program | Sequence[Program],
    step: int,
    shares: Sequence[Sequence[Share]],
    others: Callable[[], bool] = lambda: False,
) -> None:
    """One step of all ranks; `shares` by rank, then by micro-batch; programs by rank where each has its own.

    `others` gives a turn to whoever else there is, and tells whether they have moved.
    """
    programs = [program] * len(machines) if isinstance(program, Program) else program
    running = {
        machine.rank: machine.execute(own, step, share)
        for machine, own, share in zip(machines, programs, shares, strict=True)
    }
    by_rank = {machine.rank: machine for machine in machines}

    def places_of() -> dict[int, tuple[Instruction | None, int]]:
        return {rank: _place(by_rank[rank]) for rank in running}

    while running:
        places = places_of()
        finished = []
        for rank, turns in running.items():
            try:
                next(turns)
            except StopIteration:
                finished.append(rank)
        for rank in finished:
            del running[rank]
        moved = others() or bool(finished)
        if not moved and places == places_of():
            told = ", ".join(
                f"rank {rank} in {place.name if place else '?'}" for rank, (place, _) in places.items()
            )
            raise HangError(f"step {step + 1}: all ranks wait: {told}.", waiting=tuple(running), missing=())


def _place(machine: Machine) -> tuple[Instruction | None, int]:
    """Where a rank is: its instruction, and how often the user's code has met others in it."""
    turns = machine.user_code.turns
    met = turns.num_met if turns is not None else 0
    return getattr(machine.observer, "place", None), met
