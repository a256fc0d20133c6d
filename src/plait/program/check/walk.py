"""Step through a program in an order in which all ranks could execute it.

In: a program. Out: its instructions, each after everything that it waits for, and whoever is stuck at the end. Sends
never block; a `Wait` blocks until the message was sent, or until every rank of the group has started the collective.
It knows no clocks and no tensors: the simulator and the checker add what they need. Every instruction is looked at
once, and once more where it had to wait.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from plait.plan.mesh import Mesh
from plait.program.instructions import (
    Collective,
    Instruction,
    Recv,
    Send,
    Wait,
    is_start,
)
from plait.program.program import Program

Key = tuple[object, ...]
"""What identifies a message, or a meeting of ranks, on all of them."""


class Walk:
    """One step of all ranks; iterate once, then look at `blocked`."""

    def __init__(self, program: Program, fold: Sequence[int] | None = None) -> None:
        self.program = program
        self.fold = fold
        """The rank that represents each one; only these are stepped through. None: all are."""
        self.blocked: dict[int, tuple[Wait, Key]] = {}
        """Ranks that cannot go on, and what for."""
        self.under_way: list[dict[int, Key]] = [{} for _ in range(program.plan.mesh.size)]
        """What each rank has started and not yet awaited, by id."""

    def __iter__(self) -> Iterator[tuple[int, Instruction, Key | None]]:
        """(rank, instruction, key); a `Wait` has the key of what it waits for, local work has none."""
        peers = Peers(self.program.plan.mesh, self.fold)
        missing: dict[Key, int] = {}
        counts: dict[tuple[int, Key], int] = {}
        waiting: dict[Key, list[int]] = {}
        lists = [self.program.of(rank).instructions for rank in range(len(self.under_way))]
        position = [0] * len(lists)
        ready = deque(range(len(lists)) if self.fold is None else sorted(set(self.fold)))
        while ready:
            rank = ready.popleft()
            while position[rank] < len(lists[rank]):
                instruction = lists[rank][position[rank]]
                key: Key | None = None
                if isinstance(instruction, Wait):
                    key = self.under_way[rank][instruction.of]
                    if missing.get(key, 1) > 0:
                        waiting.setdefault(key, []).append(rank)
                        self.blocked[rank] = (instruction, key)
                        break
                    del self.under_way[rank][instruction.of]
                elif isinstance(instruction, Collective):
                    group = peers.group(rank, instruction.axis)
                    meeting: Key = (group,) if self.fold is None else (group, instruction.axis)
                    number = counts[rank, meeting] = counts.get((rank, meeting), -1) + 1
                    key = (*meeting, number)
                    missing[key] = missing.get(key, len(group)) - 1
                elif isinstance(instruction, Send | Recv):
                    key = peers.message(rank, instruction)
                    if isinstance(instruction, Send):
                        missing[key] = 0
                elif is_start(instruction):  # servers and hosts wait for nobody
                    key = (rank, instruction.id)
                    missing[key] = 0
                position[rank] += 1
                if is_start(instruction):
                    assert key is not None
                    self.under_way[rank][instruction.id] = key
                if key in waiting and missing.get(key) == 0:
                    assert key is not None
                    for other in waiting.pop(key):
                        del self.blocked[other]
                        ready.append(other)
                yield rank, instruction, key


class Peers:
    """The ranks that a rank communicates with; each group is worked out once."""

    def __init__(self, mesh: Mesh, fold: Sequence[int] | None = None) -> None:
        self.mesh = mesh
        self.fold = fold
        self._groups: dict[tuple[int, str], tuple[int, ...]] = {}
        self._whole: dict[tuple[int, str], tuple[int, ...]] = {}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that meet in a collective; of a folded program, those that represent them."""
        found = self._groups.get((rank, axis))
        if found is None:
            found = self.mesh.group(rank, axis)
            if self.fold is not None:
                found = tuple(sorted({self.fold[member] for member in found}))
            for member in found:
                self._groups[member, axis] = found
        return found

    def message(self, rank: int, instruction: Send | Recv) -> Key:
        """(sender, receiver, axis, message)."""
        key = (rank, instruction.axis)
        group = self._whole.get(key) or self._whole.setdefault(key, self.mesh.group(rank, instruction.axis))
        if isinstance(instruction, Send):
            return rank, group[instruction.to], instruction.axis, instruction.message
        return group[instruction.source], rank, instruction.axis, instruction.message
