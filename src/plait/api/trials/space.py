"""Which arguments may be tried, and which of them are.

In: `lr=1e-4,3e-4` (these), `width=64:256` (anything between), `lr=1e-5:1e-1:log` (evenly in its logarithm), as text or
as Python's own values. Out: arguments of trials by number. They follow from the seed and the number alone, so that a
try that goes on tries what it would have tried.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.errors import UsageError

_GRID_POINTS = 3
"""A grid has both ends of a range and its middle."""
_DRAWS = 100
"""Before a trial that would be one of those before is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers from one to another, both included."""

    low: float
    high: float
    is_whole: bool
    """Whether only whole numbers count."""
    is_log: bool
    """Whether each order of magnitude counts as much as another."""

    def at(self, share: float) -> float | int:
        """The number so far up, from 0 to 1."""
        low, high = self.low, self.high
        found = low * (high / low) ** share if self.is_log else low + (high - low) * share
        return round(found) if self.is_whole else float(f"{found:.6g}")

    def draw(self, chance: random.Random) -> float | int:
        """Any of them."""
        if self.is_whole and not self.is_log:
            return chance.randint(int(self.low), int(self.high))
        return self.at(chance.random())


Space = dict[str, tuple[Any, ...] | Range]
"""For each argument its values, or a range."""


def read_space(args: Mapping[str, Any]) -> Space:
    """What people write for each argument: text as on the command line, a list of values, or one value."""
    space: Space = {}
    for name, given in args.items():
        values = _read(name, given) if isinstance(given, str) else given
        if isinstance(values, Iterable) and not isinstance(values, str):
            values = tuple(dict.fromkeys(values))
        elif not isinstance(values, Range):
            values = (values,)
        if values == ():
            raise UsageError(f"--arg {name} has no values to try.", fix=f"write it like --arg {name}=1,2,3.")
        space[name] = values
    return space


def _read(name: str, text: str) -> tuple[str, ...] | Range:
    ends, is_log = (text.removesuffix(":log"), text.endswith(":log"))
    low, colon, high = ends.partition(":")
    try:
        numbers = float(low), float(high)
    except ValueError:
        return tuple(text.split(","))
    if not colon or not all(map(math.isfinite, numbers)):
        return tuple(text.split(","))
    if not numbers[0] < numbers[1] or (is_log and numbers[0] <= 0):
        raise UsageError(
            f"--arg {name}={text} is no range.",
            fix="write the smaller number first; with :log both are over 0.",
        )
    is_whole = all(part.lstrip("+-").isdigit() for part in (low, high))
    return Range(low=numbers[0], high=numbers[1], is_whole=is_whole, is_log=is_log)


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination; of a range both ends and the middle."""
    points = {
        name: tuple(dict.fromkeys(values.at(point / (_GRID_POINTS - 1)) for point in range(_GRID_POINTS)))
        if isinstance(values, Range)
        else values
        for name, values in space.items()
    }
    return [dict(zip(points, chosen, strict=True)) for chosen in itertools.product(*points.values())]


def drawn(space: Space, trials: int, seed: int) -> list[dict[str, Any]]:
    """Combinations at random, none twice."""
    if not any(isinstance(values, Range) for values in space.values()):
        everything = grid(space)
        random.Random(seed).shuffle(everything)
        return everything[:trials]
    found: list[dict[str, Any]] = []
    for number in range(trials):
        chance = random.Random(f"{seed} {number}")
        for _ in range(_DRAWS):
            args = {
                name: values.draw(chance) if isinstance(values, Range) else chance.choice(values)
                for name, values in space.items()
            }
            if args not in found:
                found.append(args)
                break
    return found


def as_taken(space: Space, taken: Mapping[str, Any]) -> Space:
    """The space of a function that takes such values: what it takes as a float has more than whole numbers."""
    return {
        name: replace(values, is_whole=False)
        if isinstance(values, Range) and isinstance(taken[name], float)
        else values
        for name, values in space.items()
    }


def one_by_one(space: Space, first: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Some arguments, and with each value of each in turn: what tells whether a function takes them all."""
    ends = {
        name: (values.at(0), values.at(1)) if isinstance(values, Range) else values
        for name, values in space.items()
    }
    return [{**first, name: value} for name, values in ends.items() for value in values]


Propose = Callable[[int, Mapping[int, float], Mapping[int, Mapping[str, Any]]], dict[str, Any] | None]
"""(number of a trial, scores of finished ones, arguments of all) -> its arguments; None: there are no more."""


def proposer(search: str, space: Space, trials: int, seed: int, mode: str) -> Propose:
    """What the trials of a search are."""
    if search == "optuna":
        from plait.api.trials.with_optuna import with_optuna  # optional

        return with_optuna(space, trials, seed, mode)
    planned = grid(space) if search == "grid" else drawn(space, trials, seed)
    return lambda number, scores, args: planned[number] if number < len(planned) else None
