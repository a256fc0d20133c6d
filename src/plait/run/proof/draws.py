"""The random numbers of a job against torch's own, by their statistics.

In: what the user's code drew in its first micro-batch, as plait draws it (a hash of seed, step, draw, sample, place).
Out: differences in what torch's ops give of the same arguments (how often, how large), and correlations that no
generator has: between samples, positions, draws, steps, micro-batches and seeds; and a sentence on what would have been
found. All other comparisons have one set of masks on both sides, so none of them sees that masks are wrong.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops.draws import Drawn
from plait.graph.ops.random import random_key
from plait.graph.ops.replay import OtherChanceError
from plait.run.proof.chance import Finding, along, between, distribution, enough, kurtosis
from plait.run.proof.compare import Difference
from plait.torch_private.ops import schema_of

_NUMBERS = 30_000
"""Events of the rarer kind that are wanted of each kind of draw: a rate that is 6 % off is then found."""
_LEAST_NUMBERS, _MOST_NUMBERS = 1 << 18, 1 << 20
"""Numbers of each kind of draw."""
_DRAWS = 8_000
"""How often ops are called again in all, at most: some seconds."""
_SMALLEST, _LARGEST = 1 << 12, 1 << 18
"""Numbers in one call: of as many samples as give them."""
_CALLS = 64
"""Draws of a micro-batch that are looked at; the others are of the same kinds."""
_LEAST_KEYS = 4
"""Of steps, of micro-batches and of seeds, each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Again:
    """One call, with arguments that make its numbers alike in distribution."""

    drawn: Drawn
    name: str
    given: Callable[[], Mapping[str, Any]]
    """Arguments of a call, which it may write to; alike in all places."""

    def numbers(self, key: Tensor) -> Tensor:
        """[samples, positions] under a key."""
        found = _values(self.drawn.again(key, self.given()))
        dim, rows = self.drawn.placement.get("batch_dim", -1), self.drawn.placement.get("rows_per_sample", 1)
        if not 0 <= dim < found.dim() or found.shape[dim] % rows:
            return found.reshape(1, -1)
        return found.movedim(dim, 0).reshape(found.shape[dim] // rows, -1)

    def torchs(self) -> Tensor:
        """As many, of torch's own."""
        return _values(self.drawn.op(**self.given())).reshape(-1)


def check_draws(seen: Sequence[Sequence[Drawn]], seed: int) -> tuple[list[Difference], str | None]:
    """Differences, and what the comparison would have found; of a job that draws nothing none, and None.

    `seen`: of a micro-batch of each objective.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = [entry for of_one in seen for entry in _differences(of_one, seed, _DRAWS // len(seen))]
    if not found:
        return [], None
    rates = [entry.tolerance for entry in found if entry.kind == "draws" and "share of zeros" in entry.name]
    related = [entry.tolerance for entry in found if entry.kind == "independence"]
    return found, _power(sum(map(len, seen)), rates, related)


def other_chance(error: OtherChanceError) -> Difference:
    """Of code whose graph draws with another probability."""
    off = abs(error.own - error.graphs) / max(abs(error.own), abs(error.graphs))
    return Difference(kind="draws", name=str(error), largest=off, tolerance=0.0)


def _differences(seen: Sequence[Drawn], seed: int, most_draws: int) -> Iterator[Difference]:
    calls = [again for drawn in seen[:_CALLS] if (again := _again(drawn, seen)) is not None]
    kinds: dict[Any, list[_Again]] = {}
    for call in calls:
        kinds.setdefault(_kind(call.drawn), []).append(call)
    series: dict[str, tuple[Tensor, float]] = {}
    for members in kinds.values():
        yield from _of_kind(members, seed, most_draws // len(kinds), series)
    yield from _between_calls(calls, series)


def _power(count: int, rates: Sequence[float], related: Sequence[float]) -> str:
    finds = [
        *([f"a share of zeros that is {max(rates):.2g} off"] if rates else []),
        *(
            [f"a correlation of {min(related):.2g} to {max(related):.2g}, by how many numbers there are"]
            if related
            else []
        ),
    ]
    told = f"; it finds {' and '.join(finds)}" if finds else ""
    return f"random numbers: statistics of the {count} draws of a micro-batch were compared with torch's own{told}."


def _of_kind(
    members: Sequence[_Again], seed: int, most_draws: int, series: dict[str, tuple[Tensor, float]]
) -> Iterator[Difference]:
    """Draws with the same arguments, taken together; what each has over the steps is left in `series`."""
    size = members[0].torchs().numel()
    few = torch.cat([members[0].torchs() for _ in range(max(1, min(64, (1 << 14) // max(size, 1))))])
    heavy = kurtosis(few)
    wanted = min(max(_NUMBERS * heavy, _LEAST_NUMBERS), _MOST_NUMBERS) / len(members)
    ours, theirs = list[Tensor](), list[Tensor]()
    most = most_draws / len(members)
    for call in members:
        each, least = wanted / size, enough(heavy) / size
        steps, others = (
            max(_LEAST_KEYS, math.ceil(min(max(each * part, least), most))) for part in (0.5, 0.25)
        )
        keys = {
            "steps": [random_key(seed=seed, step=step) for step in range(steps)],
            "micro-batches": [random_key(seed=seed, step=1, micro_batch=one) for one in range(1, others + 1)],
            "seeds": [random_key(seed=seed + one, step=0) for one in range(1, others + 1)],
        }
        for over, under in keys.items():
            made = torch.stack([call.numbers(key) for key in under])
            ours.append(made.reshape(-1))
            theirs += [call.torchs() for _ in under]
            for finding in along(made, heavy):
                yield _told("independence", f"{finding.what} of {call.name} over {over}", finding)
            if over == "steps":
                series[call.name] = made, heavy
    for finding in distribution(torch.cat(ours), torch.cat(theirs)):
        yield _told("draws", f"{finding.what} of {members[0].name}", finding)


def _between_calls(
    calls: Sequence[_Again], series: Mapping[str, tuple[Tensor, float]]
) -> Iterator[Difference]:
    for at, one in enumerate(calls):
        for other in calls[at + 1 :]:
            if one.drawn.place == other.drawn.place:
                continue  # the code has set the generator back
            (ours, heavy), (theirs, also) = series[one.name], series[other.name]
            finding = between(ours, theirs, heavy * also)
            if finding is not None:
                yield _told("independence", f"{one.name} and {other.name}", finding)


def _told(kind: str, name: str, finding: Finding) -> Difference:
    return Difference(kind=kind, name=name, largest=finding.largest, tolerance=finding.least)


def _kind(drawn: Drawn) -> Any:
    plain = {
        name: str(value)
        for name, value in drawn.given.items()
        if not isinstance(value, Tensor | list | tuple)
    }
    return schema_of(drawn.op).name, tuple(sorted(plain.items()))


def _again(drawn: Drawn, seen: Sequence[Drawn]) -> _Again | None:
    """None: what it draws is no set of numbers alike in distribution, or is nothing."""
    if math.prod(drawn.shape) == 0 or "multinomial" in schema_of(drawn.op).name:
        return None
    name = schema_of(drawn.op).name.removeprefix("aten::")
    number = next(at for at, other in enumerate(seen) if other is drawn)
    for rows in (_rows(drawn), None):
        made = _Again(drawn=drawn, name=f"{name} {number + 1}", given=_alike(drawn, rows))
        try:
            if made.numbers(random_key(seed=0, step=0)).numel() == made.torchs().numel():
                return made
        except (RuntimeError, IndexError):  # arguments that do not go with more samples
            continue
    return None


def _alike(drawn: Drawn, rows: int | None) -> Callable[[], Mapping[str, Any]]:
    """Arguments that are the same in all places, for so many rows of the dim that holds samples."""
    dim = drawn.placement.get("batch_dim", -1)

    def sized(shape: Sequence[int]) -> tuple[int, ...]:
        found = list(shape)
        if rows is not None and len(found) == len(drawn.shape) and found[dim] == drawn.shape[dim]:
            found[dim] = rows
        return tuple(found)

    plain: dict[str, Any] = {}
    full: dict[str, tuple[tuple[int, ...], float, torch.dtype]] = {}
    for name, value in drawn.given.items():
        if isinstance(value, Tensor) and value.dim():
            number = 1.0 if name == "input" else float(value.detach().double().nan_to_num().mean())
            full[name] = sized(value.shape), number, value.dtype
        elif name == "size":
            plain[name] = list(sized(value))
        else:
            plain[name] = value.detach() if isinstance(value, Tensor) else value
    return lambda: (
        plain | {name: torch.full(shape, number, dtype=of) for name, (shape, number, of) in full.items()}
    )


def _rows(drawn: Drawn) -> int | None:
    """Of the dim that holds samples: fewer or more, as numbers belong to samples; None: as many as there are."""
    dim, rows = int(drawn.placement.get("batch_dim", -1)), int(drawn.placement.get("rows_per_sample", 1))
    if not 0 <= dim < len(drawn.shape):
        return None
    of_sample = math.prod(drawn.shape) // drawn.shape[dim] * rows
    samples = min(max(drawn.shape[dim] // rows, -(-_SMALLEST // of_sample)), max(1, _LARGEST // of_sample))
    return samples * rows


def _values(made: Any) -> Tensor:
    """Numbers of a result; of several tensors the first."""
    found = made[0] if isinstance(made, tuple | list) else made
    assert isinstance(found, Tensor)
    return found.detach().double()
