"""The parameters of a model that no rank may hold whole, as a loop of the user's own sees them.

In: names, shapes, and what this rank holds of each. Out: parameters that are whole to look at (shape, count, dtype),
whose gradients have the norms of the whole and can be scaled, clamped and cleared in place, as torch's clipping does.
Whoever asks for more than a shard can tell is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import UsageError
from plait.program.layout import Layout
from plait.run.hold.lying import lying_as
from plait.run.planned.promise import Recorded, Runs

_IN_PLACE = ("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "__imul__", "__itruediv__")
"""What can be done to every entry of a gradient by itself."""
_HARMLESS = ("requires_grad_", "detach_", "detach")


class HeldParameter(Recorded, nn.Parameter):
    """A parameter of the model; functions of it are recorded as parts of the loss."""

    runs: Runs
    like: Tensor
    called: str
    gradients: "Gradients"

    @staticmethod
    def of(name: str, parameter: nn.Parameter, runs: Runs, gradients: "Gradients") -> "HeldParameter":
        """What stands for a parameter; it takes no memory."""
        empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: HeldParameter = HeldParameter(empty, requires_grad=parameter.requires_grad)
        made.like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        made.runs, made.called, made.gradients = runs, name, gradients
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__hash__", "size", "numel", "dim", "element_size", "is_floating_point"):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            raise UsageError(
                f"{name} needs the value of a parameter, of which this rank may have a part.",
                fix="use `with model.whole() as whole:` on all ranks, which has all of them.",
            )
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def grad(self) -> "Tensor | None":
        """That of the whole batch; this rank may hold a part of it."""
        return HeldGradient.of(self) if self.gradients.has(self.called) else None

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise UsageError(
                f"the gradient of {self.called} cannot be set: this rank may hold a part of it.",
                fix="scale or clamp it in place, or set it to None.",
            )
        self.gradients.clear(self.called)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<parameter {self.called} of shape {tuple(self.like.shape)}>"

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            f"{self.called} cannot be copied: this rank may hold a part of it.",
            fix="copy the model before it is prepared, or within `with model.whole() as whole:`.",
        )


class HeldGradient(Tensor):
    """The gradient of a parameter, whole to look at."""

    owner: HeldParameter

    @staticmethod
    def of(owner: HeldParameter) -> "HeldGradient":
        """That of a parameter, at the time."""
        empty = torch.zeros((), dtype=owner.dtype, device=owner.device).expand(owner.like.shape)
        made = empty.as_subclass(HeldGradient)
        made.owner = owner
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        mine = args[0] if args else None
        if name in ("__get__", "size", "numel", "dim", "__hash__"):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if not isinstance(mine, HeldGradient):
            raise _refusal(name, next(one for one in args if isinstance(one, HeldGradient)))
        table, owner = mine.owner.gradients, mine.owner.called
        if name in _HARMLESS:
            return mine
        if name == "zero_":
            table.change(owner, Tensor.zero_, (), {})
            return mine
        if name in _IN_PLACE and not any(
            isinstance(a, Tensor) and a.dim() for a in (*args[1:], *given.values())
        ):
            table.change(owner, func, args[1:], given)
            return mine
        if name in ("vector_norm", "linalg_vector_norm", "norm") and set(given) <= {"ord", "p", "dtype"}:
            order = args[1] if len(args) > 1 else given.get("ord", given.get("p", 2.0))
            return table.norm(owner, 2.0 if order in (None, "fro") else float(order))
        raise _refusal(name, mine)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.owner.called}>"


def _refusal(name: str, gradient: HeldGradient) -> UsageError:
    return UsageError(
        f"{name} of the gradient of {gradient.owner.called} cannot be told from the part that this rank may hold.",
        fix="its norm can be taken, and it can be scaled, clamped and cleared in place, as clip_grad_norm_ does.",
    )


class Gradients:
    """Those of this rank's shards, with what is known of the others."""

    def __init__(self) -> None:
        self.shards: Mapping[str, nn.Parameter] = {}
        """What this rank holds of each parameter, once the first step has been prepared."""
        self.names: Sequence[str] = ()
        """Of all trained parameters, in one order on all ranks."""
        self.layout: Layout | None = None
        """Where they are held; None: whole on every rank."""
        self.rank = 0
        self.made: frozenset[str] = frozenset()
        """Parameters of which a step made gradients, on whatever rank."""
        self._norms: dict[float, dict[str, Tensor]] = {}

    def has(self, name: str) -> bool:
        """Whether a parameter has a gradient, wherever it is."""
        if name in self.shards:
            return self.shards[name].grad is not None
        return name in self.made and any(shard.grad is not None for shard in self.shards.values())

    def clear(self, name: str) -> None:
        """As `p.grad = None`."""
        self._norms.clear()
        if name in self.shards:
            self.shards[name].grad = None

    def change(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Apply a function to the part of a gradient that is here."""
        self._norms.clear()
        shard = self.shards.get(name)
        if shard is not None and shard.grad is not None:
            with torch.no_grad():
                func(shard.grad, *args, **kwargs)

    @torch.no_grad()
    def add(self, found: Mapping[str, Tensor]) -> None:
        """Gradients of a pass, in memory that the next one will use again."""
        self._norms.clear()
        for name, gradient in found.items():
            shard = self.shards[name]
            if shard.grad is None:
                shard.grad = lying_as(gradient, shard)
            else:
                shard.grad = shard.grad + gradient

    @torch.no_grad()
    def keep(self) -> None:
        """Have gradients in memory of their own, before a pass uses that of the last one again."""
        for shard in self.shards.values():
            if shard.grad is not None:
                shard.grad = shard.grad.clone()

    @torch.no_grad()
    def norm(self, name: str, order: float) -> Tensor:
        """The norm of a whole gradient; the first that is asked for has all ranks add up those of all parameters."""
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        return self._norms[order][name]

    def _all_norms(self, order: float) -> dict[str, Tensor]:
        first = next(iter(self.shards.values()))
        own = {
            name: torch.linalg.vector_norm(shard.grad.to_dense(), order)
            for name, shard in self.shards.items()
            if shard.grad is not None and shard.grad.numel()
        }
        if self.layout is None:
            return {name: own.get(name, first.new_zeros(())) for name in self.names}
        axes = [axis for axis, _ in self.layout.mesh.axes]
        counted = [
            own[name].double()
            if name in own and self.layout.is_counted(name, self.rank, axes)
            else torch.zeros((), dtype=torch.float64, device=first.device)
            for name in self.names
        ]
        whole = torch.stack(counted)
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, whole)
            whole = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
        return {name: value.to(first.dtype) for name, value in zip(self.names, whole, strict=True)}
