"""Where the elements of a tensor are, along one mesh axis.

    Replicate()   every rank holds all of it
    Shard(dim)    each rank holds a shard: consecutive elements of that dim
    Partial()     every rank holds a summand; the value is the sum over ranks

A dim is cut in units: the axis says how many units each rank has (samples of the micro-batch for `data`), and a dim of
extent `G` over `u` units in all gives a rank with `k` units the extent `G * k / u`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds consecutive elements of `dim`, or of each of its `outer` equal parts ([T, B] merged, B cut)."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}/{self.outer})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial
R, P = Replicate(), Partial()


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisShares:
    """How one mesh axis cuts what is sharded on it."""

    name: str
    """The mesh axis."""
    units: tuple[int, ...]
    """Units of each rank along the axis; a rank may have none."""

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.units)

    @property
    def total(self) -> int:
        """Units of all ranks."""
        return sum(self.units)

    def divides(self, extent: int) -> bool:
        """Whether a dim of this extent falls into whole units."""
        return extent % self.total == 0 if self.total else extent == 0

    def local(self, extent: int, coordinate: int) -> int:
        """A rank's part of an extent."""
        return extent * self.units[coordinate] // self.total if self.total else 0

    def offset(self, coordinate: int) -> int:
        """Units before a rank's own."""
        return sum(self.units[:coordinate])


def overlaps(a: Placement, first: AxisShares, b: Placement, second: AxisShares) -> bool:
    """Whether two axes would cut the same digit of a dim's index, which they cannot both do."""
    if not (isinstance(a, Shard) and isinstance(b, Shard)) or a.dim != b.dim:
        return False
    return not (_is_above(a, first, b) or _is_above(b, second, a))


def _is_above(a: Shard, axis: AxisShares, b: Shard) -> bool:
    """Whether `a` cuts a more significant digit than `b`."""
    end = a.outer * axis.total
    return end > 0 and b.outer >= end and b.outer % end == 0


def parse_placement(text: str) -> Placement:
    """`R`, `P`, `S(0)` or `S(0/3)`, as `str` writes it."""
    if text in ("R", "P"):
        return R if text == "R" else P
    dim, _, outer = text.removeprefix("S(").removesuffix(")").partition("/")
    return Shard(int(dim), int(outer or 1))


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on an axis: what its tensors must be, and what comes out."""

    inputs: tuple[Placement, ...]
    """One per tensor argument, in the order of the flattened arguments."""
    outputs: tuple[Placement, ...]
    """One per output tensor."""

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}".strip()


def parse_strategy(text: str) -> Strategy:
    """`R S(1) -> S(1)`, as `str` writes it."""
    inputs, _, outputs = text.partition("->")
    return Strategy(tuple(map(parse_placement, inputs.split())), tuple(map(parse_placement, outputs.split())))
