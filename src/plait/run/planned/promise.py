"""What a model and a loss will be: tensors without values that remember how they come about.

In: calls of a prepared model, and torch's functions on what it returns. Out: `Promise`s, which know shape and dtype;
`loss.backward()` has the whole recording run as one step. Values are there once that has happened, and a scalar's also
before, where somebody asks for it. Never computes anything itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.job.batch import map_tensors
from plait.torch_private import pytree

_WITHOUT_WRITING: Mapping[str, Callable[..., Any]] = {
    "__iadd__": torch.add, "__isub__": torch.sub, "__imul__": torch.mul, "__itruediv__": torch.div,
    "add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div,
}  # fmt: skip
"""What in-place arithmetic on a loss amounts to: `loss += penalty`."""
_PER_CLASS = {"cross_entropy": "weight", "nll_loss": "weight", "multi_margin_loss": "weight"}
"""Arguments of losses that have as many entries as there are classes, by the name of the function."""


class Runs(Protocol):
    """Who runs what was recorded."""

    device: torch.device

    def backward(self, promise: "Promise") -> None:
        """Compute it and its gradients, and add these to those of the parameters."""

    def value_of(self, promise: "Promise") -> Tensor:
        """Compute a scalar."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One call that was recorded; `function` None: of the model."""

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    """Whether gradients were wanted."""
    autocast: torch.dtype | None
    """What the call computed in, where it was inside `torch.autocast`."""


class Recorded:
    """What every stand-in of a recording has in common: torch's functions on it are recorded."""

    runs: Runs
    like: Tensor
    """Of its shape and dtype, without memory."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return record(func, tuple(args), dict(kwargs or {}))


class Promise(Recorded, Tensor):
    """A tensor that is not there yet; `like` has its shape and dtype."""

    runs: Runs
    call: Call
    position: int
    """Which of the tensors that the call returns."""
    like: Tensor
    value: Tensor | None
    """Once it is known."""
    number: int | None
    """Of the pass that computes it: decides what is drawn at random."""
    passed: bool
    """Whether backward has been called."""

    @staticmethod
    def of(runs: Runs, call: Call, position: int, like: Tensor) -> "Promise":
        """The `position`-th tensor of what a call returns."""
        made = like.detach().as_subclass(Promise)
        made.runs, made.call, made.position, made.like = runs, call, position, like
        made.value, made.number, made.passed = None, None, False
        return made

    def known(self) -> Tensor | None:
        """Its value, where that takes no more than what is known: `loss.detach()` after `loss.backward()`."""
        if self.value is None and self.call.function is not None:
            inside = [leaf for leaf in pytree.tree_leaves((self.call.args, dict(self.call.kwargs)))
                      if isinstance(leaf, Recorded)]  # fmt: skip
            if all(isinstance(leaf, Promise) and leaf.known() is not None for leaf in inside):
                args, kwargs = _with_values((self.call.args, dict(self.call.kwargs)))
                with torch.no_grad():
                    made = pytree.tree_leaves(self.call.function(*args, **kwargs))
                self.value = [leaf for leaf in made if isinstance(leaf, Tensor)][self.position]
        return self.value

    def now(self) -> Tensor:
        """Its value, computed where it is not known yet."""
        found = self.known()
        return found if found is not None else self.runs.value_of(self)

    def backward(
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """Compute the whole step up to its gradients, which are added to those of the parameters."""
        if create_graph or inputs is not None:
            raise UsageError(
                "backward(create_graph=True) and backward(inputs=...) need the inside of a step that runs as one.",
                fix="use plan='ddp', under which autograd is torch's own.",
            )
        if self.passed and not retain_graph:
            raise UsageError(
                "loss.backward() was called twice on the same loss.",
                fix="compute the loss again, or say retain_graph=True where its gradients should count twice.",
            )
        root: Any = self if gradient is None else self * gradient
        self.runs.backward(root)
        self.passed = True
        self.value = self.value if gradient is None else self.known()

    def item(self) -> Any:
        """The number, over the whole batch."""
        return self.now().item()

    def tolist(self) -> Any:
        """The number."""
        return self.now().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The number."""
        return self.now().numpy(force=force)

    def __float__(self) -> float:
        return float(self.now())

    def __int__(self) -> int:
        return int(self.now())

    def __bool__(self) -> bool:
        return bool(self.now())

    def __format__(self, spec: str) -> str:
        return format(self.now() if self.like.dim() == 0 else repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        known = self.known()
        return repr(known) if known is not None else f"<{tuple(self.like.shape)} of a step that has not run>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.now().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self.now().clone()


def record(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch on stand-ins: other stand-ins, or what shapes alone tell."""
    name = getattr(function, "__name__", "")
    first = args[0] if args else None
    if name == "__get__" and isinstance(first, Recorded):
        told = _property(function, first)
        if told is not NotImplemented:
            return told
    stand_ins = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Recorded)]
    if all(isinstance(leaf, Promise) and leaf.known() is not None for leaf in stand_ins):
        return function(*_with_values(args), **_with_values(kwargs))
    runs = stand_ins[0].runs
    if any(leaf.runs is not runs for leaf in stand_ins):
        raise UsageError(
            f"{name} takes what two prepared models made; plans that decide about a whole step see one model.",
            fix="make one module of both, or use plan='ddp'.",
        )
    if name in ("cpu", "cuda", "contiguous") and isinstance(first, Promise):
        return first
    if name == "to":  # where it is computed is the plan's decision
        args = tuple(a for a in args if not isinstance(a, torch.device | str))
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        if len(args) == 1 and not kwargs:
            return first
    if name in _WITHOUT_WRITING:
        function = _WITHOUT_WRITING[name]
    elif name.endswith("_") and not name.endswith("__"):
        raise UsageError(
            f"{name} writes into a tensor of a step that runs as one, and has not run yet.",
            fix=f"use {name.rstrip('_')}, which returns a new one.",
        )
    return _recorded(runs, name, function, args, kwargs)


def _recorded(runs: Runs, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    per_class = _PER_CLASS.get(name, "pos_weight")
    if isinstance(kwargs.get(per_class), Tensor):
        kwargs = {**kwargs, per_class: PerClass(kwargs[per_class])}
    try:
        with torch.no_grad():
            found = function(*_with_shapes(args), **_with_shapes(kwargs))
    except NotImplementedError as error:
        raise UsageError(
            f"what {name} returns depends on values, and the step that computes them has not run.",
            fix="let the model's forward do it, measure it under torch.no_grad() with model.eval(), or use plan='ddp'.",
        ) from error
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found)):
        return found
    half = torch.get_autocast_dtype(runs.device.type) if torch.is_autocast_enabled(runs.device.type) else None
    call = Call(function=function, args=args, kwargs=kwargs, grad=torch.is_grad_enabled(), autocast=half)
    return promised(runs, call, found)


def promised(runs: Runs, call: Call, found: Any) -> Any:
    """What a call returned on shapes, as promises."""
    numbers = iter(range(1 << 20))
    return map_tensors(lambda like: Promise.of(runs, call, next(numbers), like), found)


class PerClass:
    """A tensor that has no samples, whatever its length."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _property(function: Callable[..., Any], owner: Recorded) -> Any:
    """What somebody wants to know about a stand-in that shapes do not tell."""
    known = getattr(getattr(function, "__self__", None), "__name__", "")
    match known:
        case "device":
            return owner.runs.device
        case "requires_grad":
            return True
        case "grad" | "grad_fn" | "_grad_fn":
            return None
        case "is_meta":
            return False
        case "data":
            return record(torch.Tensor.detach, (owner,), {})
    return NotImplemented


def _with_values(tree: Any) -> Any:
    def value(leaf: Any) -> Any:
        if isinstance(leaf, PerClass):
            return leaf.tensor
        return leaf.known() if isinstance(leaf, Promise) else leaf

    return pytree.tree_map(value, tree)


def _with_shapes(tree: Any) -> Any:
    def shape(leaf: Any) -> Any:
        if isinstance(leaf, PerClass):
            leaf = leaf.tensor
        if isinstance(leaf, Recorded):
            return leaf.like
        if isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return leaf

    return pytree.tree_map(shape, tree)
