"""Write down an update that comes in parts: on the device, or on the host beside it.

In: the instructions of a step with one update, and its parts. Out: the same with one update for each part. An update of
the host is awaited at the end of the step; its gradients are on the host by then, and what the norm of all gradients
needs of them is kept before they leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.program.instructions import Finish, Instruction, SquareSum, Update
from plait.program.value import Value
from plait.program.write.writer import Rewriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one of several updates of a step is about."""

    buckets: tuple[int, ...]
    gradients: tuple[Value, ...]
    """Summed, as the update takes them."""
    updated: tuple[Value, ...]
    """Parameters, or the chunks of them that this rank updates."""
    seen: frozenset[Value]
    """The same, gathered parameters, and what shows them: an update must not come before their last reader."""
    state_bytes: int
    """What the optimizer keeps for it."""
    is_away: bool
    """Whether that lies on the host."""
    on_host: bool
    """Whether the host makes the update."""

    @property
    def state(self) -> tuple[Value, ...]:
        """What is fetched for the update, or is used where it lies."""
        return (Value.state(self.buckets[0]),) if self.is_away or self.on_host else ()

    def update(self, name: str) -> Update:
        """The instruction."""
        reads, writes = (*self.gradients, *self.state, *self.updated), (*self.state, *self.updated)
        if not self.on_host:
            return Update(name=name, parts=self.buckets, reads=reads, writes=writes)
        return Update(
            name=f"{name}, on the host", lane="host", parts=self.buckets, state_bytes=self.state_bytes,
            reads=tuple(map(Value.stored, reads)), writes=tuple(map(Value.stored, writes)),
        )  # fmt: skip


def with_parts(
    instructions: Sequence[Instruction], parts: Sequence[Part], *, early: bool
) -> list[Instruction]:
    """The instructions with one update for each of `parts` in the place of the one for all.

    `early`: an update comes as soon as its gradients are complete and nobody reads its parameters any more; else where
    the one for all was.
    """
    at = next(i for i, entry in enumerate(instructions) if isinstance(entry, Update))
    last = _last_uses(instructions[:at], parts) if early else [-1] * len(parts)
    made = Rewriter()
    on_host: list[int] = []

    def update(index: int) -> None:
        at = made.add(parts[index].update(f"update {index + 1} of {len(parts)}"))
        if parts[index].on_host:
            on_host.append(at)

    for position, instruction in enumerate(instructions):
        if position == at:
            for index in [index for index, place in enumerate(last) if place < 0]:
                update(index)
            continue
        made.again(instruction)
        for index in [index for index, place in enumerate(last) if place == position]:
            update(index)
    for started in on_host:
        made.wait(started, made.instructions[started].name)
    return made.instructions


def with_squares(instructions: Sequence[Instruction], parts: Sequence[Part]) -> list[Instruction]:
    """The instructions, numbered anew, with what norms need of gradients that are on the host by then.

    Their squares are kept when they are summed, before they leave; what is done to all gradients at the end is done to
    them where they are.
    """
    gone = {value: index for index, part in enumerate(parts) if part.on_host for value in part.gradients}
    last: dict[int, int] = {}
    clip = next((i.clip for i in instructions if isinstance(i, Finish)), None)
    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, Finish | SquareSum | Update):
            last |= {gone[v]: position for v in (*instruction.reads, *instruction.writes) if v in gone}
    made = Rewriter()
    squares: list[Value] = []
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Finish | SquareSum):
            kept = tuple(value for value in instruction.reads if value not in gone)
            instruction = replace(instruction, reads=(*kept, *squares))
        made.again(instruction)
        for index in [index for index, place in last.items() if place == position]:
            if clip is not None and clip.norms:
                squares.append(Value.scalar(f"squares of part {index}"))
                made.add(
                    SquareSum(
                        name=f"squares of part {index + 1}", reads=parts[index].gradients, writes=(squares[-1],),
                        axes=(), clip=clip, parts=parts[index].buckets,
                    )
                )  # fmt: skip
    return made.instructions


def _last_uses(instructions: Sequence[Instruction], parts: Sequence[Part]) -> list[int]:
    """By part: the last instruction that makes its gradients or reads its parameters."""
    readers = {value: index for index, part in enumerate(parts) for value in part.seen}
    makers = {value: index for index, part in enumerate(parts) for value in part.gradients}
    last = [-1] * len(parts)
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Finish):  # has nothing to do to them where an update may be early
            continue
        for value in (*instruction.reads, *instruction.writes):
            for of in (readers, makers):
                if value in of:
                    last[of[value]] = position
    return last
