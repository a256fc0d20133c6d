"""What a model costs, in units: its repeated blocks, and what lies between them, each once.

In: a captured graph with the plan along `tensor`. Out: `ModelCosts`: for one rank, as functions of the samples that it
computes at once, the ops and collectives of every unit's forward and backward, what the unit keeps, its parameters.
Times are not here: `sketch.py` puts them together with a cluster. The local graph is written for two numbers of
samples; all amounts are lines through the two, so one capture serves every micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from plait.errors import PlanError
from plait.program.cost.op_time import OpWork, WorkKind

Phase = Literal["forward", "input", "weight"]
"""`input`: a backward op that others wait for; `weight`: one that only gradients of parameters need."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number that grows with the samples of a micro-batch."""

    fixed: float = 0.0
    """What there is without samples."""
    per_sample: float = 0.0
    """What each adds."""

    def at(self, samples: float) -> float:
        """The number for so many samples."""
        return self.fixed + self.per_sample * samples

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def scaled(self, factor: float) -> "Amount":
        """So many times the amount."""
        return Amount(self.fixed * factor, self.per_sample * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """One kernel of a unit."""

    phase: Phase
    kind: WorkKind
    dtype: str
    flops: Amount
    num_bytes: Amount
    rows: Amount
    columns: Amount
    depth: Amount
    count: Amount
    again: frozenset[str] = frozenset()
    """Settings of recompute under which it runs in the backward too."""

    def work(self, samples: float) -> OpWork:
        """What it asks of a device for so many samples."""
        return OpWork(
            kind=self.kind, dtype=self.dtype, flops=self.flops.at(samples), num_bytes=self.num_bytes.at(samples),
            rows=self.rows.at(samples), columns=self.columns.at(samples), depth=self.depth.at(samples),
            count=self.count.at(samples),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCost:
    """Communication along `tensor` or `domain` inside of a unit."""

    phase: Phase
    kind: str
    axis: str
    num_bytes: Amount
    """Of the whole tensor."""
    again: frozenset[str] = frozenset()
    """As for ops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """A block of a model, or what lies between blocks."""

    name: str
    """Path of its module."""
    repeat: int
    """Equal units in a row."""
    is_block: bool
    """Whether it is a numbered module: what `full` recompute drops the inside of."""
    steps: tuple[OpCost | CollectiveCost, ...]
    """In the order of execution."""
    parameters: float
    """Elements of the parameters that it is the first to read, on this rank."""
    parameter_bytes: float
    """The same in bytes, as the job holds them."""
    shared: float
    """Elements of parameters that units before it read too: a stage of its own holds them again."""
    kept: Mapping[str, Amount]
    """Bytes that the forward leaves for the backward, by setting of recompute."""
    peak: Amount
    """Most bytes that its backward has alive at once of its own, what it keeps included."""
    leaves: Amount
    """Bytes that go on to the next unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """One rank's micro-step, in units from the input to the loss."""

    units: tuple[UnitCosts, ...]
    tensor: int
    """Ranks of `tensor` among which weights are cut."""
    dtype: str
    """Of the matrix products."""
    trainable: float
    """Share of parameters that get a gradient."""

    @property
    def num_units(self) -> int:
        """Units, repeated ones counted one by one."""
        return sum(unit.repeat for unit in self.units)

    @property
    def parameters(self) -> float:
        """Elements that a rank holds without pipelines and ZeRO."""
        return sum(unit.parameters * unit.repeat for unit in self.units)

    @property
    def flops(self) -> Amount:
        """Of a rank's forward and backward, nothing computed twice."""
        total = Amount()
        for unit in self.units:
            for step in unit.steps:
                if isinstance(step, OpCost):
                    total += step.flops.scaled(unit.repeat)
        return total


def with_blocks(costs: ModelCosts, num_blocks: int) -> ModelCosts:
    """The model with so many blocks: the last of its blocks is repeated."""
    at = max((i for i, unit in enumerate(costs.units) if unit.is_block), default=None)
    if at is None:
        raise PlanError("the model has no repeated blocks.", fix="capture it with as many as it has.")
    others = sum(unit.repeat for i, unit in enumerate(costs.units) if unit.is_block and i != at)
    units = list(costs.units)
    if others >= num_blocks:
        units = [unit for i, unit in enumerate(units) if not unit.is_block or i == at]
        at, others = units.index(costs.units[at]), 0
    units[at] = replace(units[at], repeat=num_blocks - others)
    return replace(costs, units=tuple(units))
