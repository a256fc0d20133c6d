"""What of a rank's program depends on the sizes of its batch: numbers that are looked up in a table, once a step.

In: the sizes of one micro-batch. Out: the numbers, and instructions, shapes and segments that use them. It holds no
tensor, and knows nothing about how the functions were found (`sizes/`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from plait.program.instructions import Instruction
from plait.program.value import Value

V = TypeVar("V")

Numbers = tuple[Any, ...]
"""Everything that differs between sizes, for one micro-batch."""


@dataclass(frozen=True, slots=True)
class At:
    """Stands for a number: its place in the table."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """How one rank's program follows the sizes of its micro-batches, which may differ from each other."""

    variables: tuple[tuple[int, int], ...]
    """(leaf, dim) of the batch's tensors from which each size is read."""
    table: Callable[..., Numbers]
    """Sizes, one per variable, to numbers."""
    source: str
    """The Python source of `table`, for people."""
    sources: Mapping[str, str]
    """Sources of segments, by name, with `n[...]` for numbers; those that use none are absent."""
    runs: Mapping[str, Callable[..., tuple[Any, ...]]]
    """What runs them: takes the numbers as a third argument."""
    fields: Mapping[int, Mapping[str, Any]]
    """Fields of instructions, by position, with `At` for numbers."""
    shapes: Mapping[Value, tuple[tuple[Any, ...], tuple[Any, ...]]]
    """Shapes and strides of values, with `At` for numbers."""

    def sizes(self, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        """What varies of a micro-batch with these tensors."""
        return tuple(leaves[leaf].shape[dim] for leaf, dim in self.variables)

    def numbers(self, leaves: Sequence[Tensor]) -> Numbers:
        """The numbers of a micro-batch with these tensors."""
        return self.table(*self.sizes(leaves))

    def instructions(
        self, instructions: tuple[Instruction, ...], numbers: Sequence[Numbers]
    ) -> tuple[Instruction, ...]:
        """The same, with the numbers of the micro-batch to which each belongs."""
        if not self.fields:
            return instructions
        found = list(instructions)
        for position, fields in self.fields.items():
            own = found[position].micro_batch
            assert own is not None
            new: dict[str, Any] = {name: filled(value, numbers[own]) for name, value in fields.items()}
            found[position] = replace(found[position], **new)
        return tuple(found)

    def described(self, name: Value, value: V, numbers: Numbers) -> V:
        """A value as it is in a micro-batch with these numbers."""
        entry = self.shapes.get(name)
        if entry is None:
            return value
        shape, strides = (filled(part, numbers) for part in entry)
        return replace(value, shape=shape, strides=strides)  # type: ignore[type-var]


def filled(value: Any, numbers: Numbers) -> Any:
    """A value with numbers where `At` stands for them."""
    if isinstance(value, At):
        return numbers[value.index]
    if isinstance(value, tuple):
        return tuple(filled(entry, numbers) for entry in value)
    return value
