"""Random numbers of code that is not captured, drawn by sample: the same whatever the shares.

In: random ops of the user's code on a rank's share. Out: the numbers of plait's own ops, a hash of (seed, step,
micro-batch, draw, sample, position). Which draw it is comes from torch's generator, which all ranks seed alike: what
saves and restores its state, as checkpointing does, draws the same again.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops import random as random_ops
from plait.graph.ops.random_hash import mix64
from plait.job.generators import seed_torch
from plait.torch_private.intercept import Takers, drawing_ops
from plait.torch_private.ops import OpOverload, schema_of


class SampleDraws:
    """Takes random ops, and draws numbers that belong to samples."""

    def __init__(self, key: Tensor, num_samples: int, known: Sequence[tuple[int, ...]] | None = None) -> None:
        """`known`: shapes of a trial, -1 where samples are; what they do not tell is read off the shape drawn."""
        self._key, self._num_samples, self._known = key, num_samples, known or ()
        self._next = 0
        """Of the known shapes, that of the next draw, if there is none that the trial had not."""
        self._dims: dict[int, int] = {}
        """Where samples are, by number of a draw."""
        self.shapes: list[tuple[int, ...]] = []
        """Of all draws so far."""
        self.others: dict[str, None] = {}
        """Ops whose numbers are torch's, and depend on the share."""

    def takers(self) -> Takers:
        """For `intercepted`."""
        return ((drawing_ops(), self._take),)

    def _take(self, op: OpOverload, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        if (
            _draws_nothing(given) or given.get("generator") is not None
        ):  # the user's own generator is the user's
            return call()
        number = int(torch.randint(1 << 62, ()))
        name, outs = schema_of(op).name, [entry.name for entry in schema_of(op).arguments if entry.is_out]
        rule = _RULES.get(name.removesuffix("_"))
        if rule is not None and outs in ([], ["out"]):
            made = rule(_Draw(self, number), given, name.endswith("_"))
            if made is not None:
                return given["out"].resize_(made.shape).copy_(made) if outs else made
        self.others[name.removeprefix("aten::")] = None
        state = torch.get_rng_state()
        seed_torch(mix64(number + int(self._key[2])) % (1 << 63))
        try:
            return call()
        finally:
            torch.set_rng_state(state)

    def placement(self, number: int, shape: tuple[int, ...]) -> dict[str, int]:
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

    def key_on(self, device: torch.device) -> Tensor:
        """Where numbers are made."""
        return self._key.to(device)


def _draws_nothing(given: Mapping[str, Any]) -> bool:
    off = any(given.get(name) is False for name in ("train", "training"))
    return off or any(given.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))


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


def _dim_of(known: tuple[int, ...]) -> int:
    return known.index(-1) if -1 in known else -1


def _is_like(shape: tuple[int, ...], known: tuple[int, ...]) -> bool:
    return len(shape) == len(known) and all(b in (-1, a) for a, b in zip(shape, known, strict=True))


class _Draw:
    """One random op."""

    def __init__(self, draws: SampleDraws, number: int) -> None:
        self._draws, self._number = draws, number

    def __call__(
        self, function: Callable[..., Tensor], like: Tensor, *parameters: Any, **other: Any
    ) -> Tensor:
        dtype = other.get("dtype", like.dtype)
        place = self._draws.placement(self._number, tuple(like.shape))
        key = self._draws.key_on(like.device)
        return function(key, self._number, list(like.shape), dtype, *parameters, **place)

    def uniform(self, like: Tensor) -> Tensor:
        """In (0, 1), in a dtype that has enough of it."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self(random_ops.uniform, like, 0.0, 1.0, dtype=wide).clamp_(min=random_ops.SMALLEST)


DrawRule = Callable[[_Draw, Mapping[str, Any], bool], Any]


def _like(given: Mapping[str, Any]) -> Tensor:
    """A tensor of the shape and dtype of the result."""
    if isinstance(given.get("self"), Tensor):
        like: Tensor = given["self"]
        return torch.empty_like(like, dtype=given["dtype"]) if given.get("dtype") is not None else like
    return torch.empty(
        given["size"], dtype=given.get("dtype") or given["default"], device=given.get("device") or "cpu"
    )


def _finished(given: Mapping[str, Any], made: Tensor, in_place: bool) -> Tensor:
    return given["self"].copy_(made) if in_place else made


def _bernoulli(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    like, p = given["self"], given.get("p", given["self"])
    if isinstance(p, Tensor):
        return _finished(given, (draw.uniform(like) < p).to(like.dtype), in_place)
    return _finished(given, draw(random_ops.bernoulli, like, float(p)), in_place)


def _uniform(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    like = _like({"default": torch.get_default_dtype(), **given})
    if not like.is_floating_point():
        return None
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    return _finished(given, draw(random_ops.uniform, like, low, high), in_place)


def _normal(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [entry for entry in (mean, std) if isinstance(entry, Tensor)]
    like = tensors[0] + tensors[-1] if tensors else _like({"default": torch.get_default_dtype(), **given})
    if not like.is_floating_point():
        return None
    return _finished(given, draw(random_ops.normal, like, 0.0, 1.0) * std + mean, in_place)


def _randint(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    if not (isinstance(low, int) and isinstance(high, int) and high - low <= random_ops.RANGE_LIMIT):
        return None
    like = _like({"default": torch.int64, **given})
    return _finished(given, draw(random_ops.randint, like, low, high), in_place)


def _native_dropout(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    keep = 1.0 - float(given["p"])
    mask = draw(random_ops.bernoulli, given["input"], keep, dtype=torch.bool)
    return given["input"] * mask * (1.0 / keep if keep > 0.0 else 0.0), mask


def _exponential(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    like = given["self"]
    made = random_ops.clocks(draw.uniform(like)).div_(float(given.get("lambd", 1.0)))
    return _finished(given, made.to(like.dtype), in_place)


def _multinomial(draw: _Draw, given: Mapping[str, Any], in_place: bool) -> Any:
    """Without replacement: the first of exponential clocks that run at these rates."""
    count = given["num_samples"]
    if given.get("replacement") and count > 1:
        return None
    return (given["self"] / random_ops.clocks(draw.uniform(given["self"]))).topk(count, dim=-1).indices


_RULES: Mapping[str, DrawRule] = MappingProxyType(
    {
        "aten::bernoulli": _bernoulli,
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::uniform": _uniform,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::normal": _normal,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::random": _randint,
        "aten::native_dropout": _native_dropout,
        "aten::exponential": _exponential,
        "aten::multinomial": _multinomial,
    }
)
"""How each op is made of numbers by sample, by the name in its schema; None: not this form of it."""
