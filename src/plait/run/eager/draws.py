"""Random numbers of code that is not captured, drawn by sample: the same whatever the shares.

In: random ops of the user's code on a rank's share. Out: the numbers of plait's own ops, a hash of (seed, step,
micro-batch, draw, sample, position). Which draw it is comes from where it is made, the module and the line, and how
often that has drawn before: ranks that take other branches draw the same at all other places. What saves and restores
the state of torch's generator, as checkpointing does, draws the same again.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from plait.folders import PLAIT, TORCH
from plait.graph.ops.draws import Drawn, drawn, draws_nothing
from plait.graph.ops.random import IMPLEMENTATIONS
from plait.graph.ops.random_hash import mix64
from plait.job.generators import seed_torch
from plait.program.instructions import DrawnAt
from plait.run.eager.company import Company
from plait.torch_private.intercept import Takers, drawing_ops
from plait.torch_private.ops import OpOverload, schema_of


@dataclass(frozen=True, slots=True)
class _Call:
    """One draw of this micro-batch."""

    op: int
    """What its numbers are a hash of, among others."""
    key: Tensor
    placement: Mapping[str, int]


class SampleDraws:
    """Takes random ops, and draws numbers that belong to samples."""

    def __init__(
        self,
        key: Tensor,
        num_samples: int,
        model: nn.Module,
        known: Sequence[DrawnAt] = (),
        company: Company | None = None,
        told: Callable[[Drawn], None] | None = None,
    ) -> None:
        """`known`: of a trial. `company`: ranks that have the other samples of the micro-batch. `told` is called with
        every draw."""
        self._told = told
        self._last: dict[str, Any] = {}
        """What the last numbers were like."""
        self._after, self._since = b"", (b"", 0)
        """torch's generator as the last draw left it, and where that was."""
        self._key, self._num_samples, self._model, self._company = key, num_samples, model, company
        self._known: dict[str, list[DrawnAt]] = {}
        for entry in known:
            self._known.setdefault(entry.place, []).append(entry)
        self._names: dict[int, str] = {}
        self._turns: dict[str, int] = {}
        """Of modules, in their order."""
        self._times: dict[str, int] = {}
        """How often each place has drawn."""
        self._calls: dict[int, _Call] = {}
        """By what torch's generator gives, which is the same where something is computed again."""
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []
        """Places of all draws so far, the how manieth it was there, and their shapes."""
        self.others: dict[str, None] = {}
        """Ops whose numbers are torch's, and depend on the share."""

    def takers(self) -> Takers:
        """For `intercepted`."""
        return ((drawing_ops(), self._take),)

    def _take(self, op: OpOverload, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        if (
            draws_nothing(given) or given.get("generator") is not None
        ):  # the user's own generator is the user's
            return call()
        origin = self._origin() if self._told is not None else None
        event = int(torch.randint(1 << 62, ()))
        made = drawn(op, given, partial(self._numbers, event))
        if made is not None:
            if self._told is not None:
                self._after = _state()
                self._told(Drawn(op=op, given=given, place=origin, **self._last))
            return made
        self.others[schema_of(op).name.removeprefix("aten::")] = None
        state = torch.get_rng_state()
        own = self._calls.get(event) or self._begin(event, None)
        seed_torch(mix64(own.op + int(self._key[2])) % (1 << 63))
        try:
            return call()
        finally:
            torch.set_rng_state(state)

    def _origin(self) -> tuple[bytes, int]:
        """Where torch's generator was last set by somebody else, and the draws since."""
        now = _state()
        origin, since = self._since
        self._since = (origin, since + 1) if now == self._after else (now, 0)
        return self._since

    def _numbers(self, event: int, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> Tensor:
        shape = tuple(like.shape)
        own = self._calls.get(event) or self._begin(event, shape)
        key = own.key.to(like.device)
        self._last = {"number": own.op, "shape": shape, "dtype": dtype, "placement": own.placement}
        return IMPLEMENTATIONS[target](key, own.op, list(shape), dtype, *parameters, **own.placement)

    def _begin(self, event: int, shape: tuple[int, ...] | None) -> _Call:
        """A draw that was not made before; `shape`: None where its numbers are torch's."""
        place = self._place(sys._getframe(2))
        time = self._times[place] = self._times.get(place, -1) + 1
        placement, key = {"batch_dim": -1, "rows_per_sample": 1}, self._key
        if shape is not None:
            self.seen.append((place, time, shape))
            found = self._found(family(place), shape)
            if found is None:
                found = DrawnAt(place="", shape=shape, dim=0)
            dim, rows = found.dim, self._num_samples
            if found.by_value and shape:
                placement, key = (
                    {"batch_dim": dim, "rows_per_sample": 1},
                    self._after_others(place, time, shape[dim]),
                )
            elif 0 <= dim < len(shape) and rows and shape[dim] % rows == 0:
                placement = {"batch_dim": dim, "rows_per_sample": shape[dim] // rows}
            time += found.calls * int(self._key[2])
        digest = hashlib.sha256(f"{place} {time}".encode()).digest()
        call = _Call(int.from_bytes(digest[:7], "big"), key, placement)
        self._calls[event] = call
        return call

    def _found(self, place: str, shape: tuple[int, ...]) -> DrawnAt | None:
        """What is known of draws there; the one that looks like this, if there are several."""
        same = [entry for entry in self._known.get(place, ()) if len(entry.shape) == len(shape)]
        return next((entry for entry in same if _is_like(shape, entry)), same[0] if same else None)

    def _after_others(self, place: str, time: int, rows: int) -> Tensor:
        """The key of rows that follow those of all earlier samples."""
        key, first = self._key.clone(), int(self._key[2])
        key[2] = 0
        if self._company is not None:
            told = self._company.gather_late(
                f"draw {place} {time}",
                torch.tensor([first, rows]),
                self._turns.get(place.partition(" ")[0], 0),
            )
            key[2] = sum(int(count) for start, count in told.tolist() if start < first)
        return key

    def _place(self, frame: FrameType | None) -> str:
        """The innermost module of the model that runs, and the innermost line that is not torch's."""
        if not self._names:
            self._names = {id(module): name for name, module in self._model.named_modules()}
            self._turns = {name: turn for turn, name in enumerate(self._names.values())}
        line = name = None
        while frame is not None and (line is None or name is None):
            code = frame.f_code
            if line is None and not code.co_filename.startswith((TORCH, PLAIT)):
                line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            if name is None and code.co_varnames[:1] == ("self",):
                name = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return f"{name or ''} {line or ''}"


def family(place: str) -> str:
    """A place, but for the numbers of layers: experts that a trial did not reach draw as the others."""
    name, _, line = place.partition(" ")
    return f"{re.sub(r'[0-9]+', '*', name)} {line}"


def _state() -> bytes:
    """Of torch's generator."""
    return bytes(torch.get_rng_state().tolist())


def draws_of(few: SampleDraws, more: SampleDraws, others: SampleDraws, *, alike: bool) -> tuple[DrawnAt, ...]:
    """What is known of draws: of two samples, of three that are the same, and of three others.

    `alike`: batches of three had the same shapes.
    """
    two, same, other = ({(p, t): shape for p, t, shape in draws.seen} for draws in (few, more, others))
    counts = [_counted(draws) for draws in (few, more, others)]
    found: dict[str, dict[DrawnAt, None]] = {}
    missed: dict[str, DrawnAt] = {}
    for (place, time), shape in {**two, **same, **other}.items():
        a, b, c = (given.get((place, time)) for given in (two, same, other))
        own = family(place)
        often = [count.get(place, 0) for count in counts]
        if often[0] and not often[0] % 2 and [often[0] * 3] * 2 == [often[1] * 2, often[2] * 2]:
            made = DrawnAt(place=own, shape=a or shape, dim=-1, calls=often[0] // 2)
        elif a is None or b is None or c is None or not len(a) == len(b) == len(c):
            missed[own] = DrawnAt(place=own, shape=shape, dim=0 if shape else -1, by_value=bool(shape))
            continue
        else:
            made = _of_shapes(own, a, b, c, alike)
        found.setdefault(own, {})[made] = None
    rest = [entry for own, entry in missed.items() if own not in found]
    return (*rest, *(entry for entries in found.values() for entry in _agreed(list(entries))))


def _counted(draws: SampleDraws) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, _, _ in draws.seen:
        found[place] = found.get(place, 0) + 1
    return found


def _of_shapes(
    place: str, a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...], alike: bool
) -> DrawnAt:
    """Of one draw, in two samples, three of the same and three others."""
    dims = range(len(a))
    by_sample = [
        d for d in dims if a[d] and a[d] * 3 == b[d] * 2 and not c[d] % 3 and (c[d] == b[d] or not alike)
    ]
    if by_sample:
        return DrawnAt(place=place, shape=a, dim=by_sample[0])
    changed = [d for d in dims if a[d] != b[d] or (alike and b[d] != c[d])]
    return DrawnAt(place=place, shape=a, dim=changed[0] if changed else -1, by_value=bool(changed))


def _agreed(entries: Sequence[DrawnAt]) -> Sequence[DrawnAt]:
    """Where values decide for one of a family, they do for all of it."""
    by_value = [entry for entry in entries if entry.by_value]
    return by_value[:1] or entries


def _is_like(shape: tuple[int, ...], known: DrawnAt) -> bool:
    rest = (index for index in range(len(shape)) if index != known.dim)
    return all(known.shape[index] == shape[index] for index in rest)
