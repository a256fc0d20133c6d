"""Random numbers of code that is not captured, drawn by sample: the same whatever the shares.

In: random ops of the user's code on a rank's share. Out: the numbers of plait's own ops, a hash of (seed, step,
micro-batch, draw, sample, position). Which draw it is comes from torch's generator, which all ranks seed alike: what
saves and restores its state, as checkpointing does, draws the same again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops.draws import Drawn, drawn, draws_nothing
from plait.graph.ops.random import IMPLEMENTATIONS
from plait.graph.ops.random_hash import mix64
from plait.job.generators import seed_torch
from plait.torch_private.intercept import Takers, drawing_ops
from plait.torch_private.ops import OpOverload, schema_of


class SampleDraws:
    """Takes random ops, and draws numbers that belong to samples."""

    def __init__(
        self, key: Tensor, num_samples: int, known: Sequence[tuple[int, ...]] | None = None,
        seen: Callable[[Drawn], None] | None = None,
    ) -> None:  # fmt: skip
        """`known`: shapes of a trial, -1 where samples are; what they do not tell is read off the shape drawn. `seen`
        is told of every draw."""
        self._key, self._num_samples, self._known, self._seen = key, num_samples, known or (), seen
        self._next = 0
        """Of the known shapes, that of the next draw, if there is none that the trial had not."""
        self._dims: dict[int, int] = {}
        """Where samples are, by number of a draw."""
        self.shapes: list[tuple[int, ...]] = []
        """Of all draws so far."""
        self._last: dict[str, Any] | None = None
        """What the last numbers were like."""
        self._after, self._since = b"", (b"", 0)
        """torch's generator as the last draw left it, and where that was."""
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
        place = self._place() if self._seen is not None else None
        number = int(torch.randint(1 << 62, ()))
        made = drawn(op, given, partial(self._numbers, number))
        if made is not None:
            if self._seen is not None and (last := self._last) is not None:
                self._after = _state()
                self._seen(Drawn(op=op, given=given, number=number, place=place, **last))
            return made
        self.others[schema_of(op).name.removeprefix("aten::")] = None
        state = torch.get_rng_state()
        seed_torch(mix64(number + int(self._key[2])) % (1 << 63))
        try:
            return call()
        finally:
            torch.set_rng_state(state)

    def _place(self) -> tuple[bytes, int]:
        """Where torch's generator was last set by somebody else, and the draws since."""
        now = _state()
        origin, since = self._since
        self._since = (origin, since + 1) if now == self._after else (now, 0)
        return self._since

    def _numbers(
        self, number: int, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any
    ) -> Tensor:
        shape = tuple(like.shape)
        placement, key = self._placement(number, shape), self._key.to(like.device)
        self._last = {"shape": shape, "dtype": dtype, "placement": placement}
        return IMPLEMENTATIONS[target](key, number, list(shape), dtype, *parameters, **placement)

    def _placement(self, number: int, shape: tuple[int, ...]) -> dict[str, int]:
        """Which dim of a draw holds samples, and how many rows of it one sample has."""
        if number not in self._dims:
            self._dims[number] = self._samples_in(shape)
            self.shapes.append(shape)
        dim = self._dims[number]
        if not 0 <= dim < len(shape) or not self._num_samples or shape[dim] % self._num_samples:
            return {"batch_dim": -1, "rows_per_sample": 1}
        return {"batch_dim": dim, "rows_per_sample": shape[dim] // self._num_samples}

    def _samples_in(self, shape: tuple[int, ...]) -> int:
        """By the next draw of the trial that looked like this one, or else by the one whose turn it is."""
        later = range(self._next, len(self._known))
        alike = next((index for index in later if _is_like(shape, self._known[index])), None)
        if alike is not None:
            self._next = alike + 1
            return _dim_of(self._known[alike])
        turn = len(self._dims)
        same = turn < len(self._known) and len(self._known[turn]) == len(shape)
        return _dim_of(self._known[turn]) if same else 0


def shapes_of(
    few: Sequence[tuple[int, ...]], more: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...] | None:
    """Shapes with -1 in the dim that follows the number of samples, from draws of two sizes; None: not alike."""
    if [len(shape) for shape in few] != [len(shape) for shape in more]:
        return None
    found = []
    for one, other in zip(few, more, strict=True):
        dim = next((dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), -1)
        found.append(tuple(-1 if index == dim else extent for index, extent in enumerate(one)))
    return tuple(found)


def _state() -> bytes:
    """Of torch's generator."""
    return bytes(torch.get_rng_state().tolist())


def _dim_of(known: tuple[int, ...]) -> int:
    return known.index(-1) if -1 in known else -1


def _is_like(shape: tuple[int, ...], known: tuple[int, ...]) -> bool:
    return len(shape) == len(known) and all(b in (-1, a) for a, b in zip(shape, known, strict=True))
