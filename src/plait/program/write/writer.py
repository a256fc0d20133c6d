"""The instructions of a rank, one after the other.

In: instructions without ids. Out: the list of them, each with its position. What belongs together in every plan is
written here: a sum over ranks, the `Wait` for whatever was started.
"""

from collections.abc import Sequence
from dataclasses import replace

from plait.program.instructions import Collective, Instruction, Wait
from plait.program.value import Value


class Writer:
    """Appends instructions; an id is a position in `instructions`."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def add(self, instruction: Instruction) -> int:
        """The id that it gets."""
        self.instructions.append(replace(instruction, id=len(self.instructions)))
        return len(self.instructions) - 1

    def all_reduce(
        self,
        value: Value,
        axis: str,
        num_bytes: int,
        *,
        what: object = None,
        into: Value | None = None,
        micro_batch: int | None = None,
    ) -> int:
        """Start to sum a value over ranks, in place or `into` another; `what` it is called, else by its own name."""
        return self.add(
            Collective(
                name=f"all_reduce {value if what is None else what}",
                op="all_reduce",
                axis=axis,
                reads=(value,),
                writes=(value if into is None else into,),
                micro_batch=micro_batch,
                num_bytes=num_bytes,
            )
        )

    def wait(self, of: int, what: object, micro_batch: int | None = None, stage: int | None = None) -> None:
        """Have at hand what a started instruction writes."""
        names = self.instructions[of].writes
        self.add(
            Wait(
                name=f"wait for {what}",
                of=of,
                reads=names,
                writes=names,
                micro_batch=micro_batch,
                stage=stage,
            )
        )

    def extend(self, instructions: Sequence[Instruction]) -> None:
        """Append a list that has ids of its own."""
        at = {instruction.id: len(self.instructions) + i for i, instruction in enumerate(instructions)}
        for instruction in instructions:
            self.add(
                replace(instruction, of=at[instruction.of]) if isinstance(instruction, Wait) else instruction
            )


class Rewriter(Writer):
    """Writes instructions again that have ids already, with others between them."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[int, int] = {}
        """By their old ids."""

    def again(self, instruction: Instruction) -> None:
        """The same, in its new place."""
        if isinstance(instruction, Wait):
            instruction = replace(instruction, of=self._at[instruction.of])
        self._at[instruction.id] = self.add(instruction)
