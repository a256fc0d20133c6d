"""A model that does not fit on the device whole, run as it is: its parameters come as operations use them.

In: the user's module, a way to bring one of its parameters, and how many bytes of them may stay. Out: a mode in which
the module computes what it would with all of them at hand. It changes no value, and does not know where parameters lie.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.errors import RunError
from plait.torch_private import pytree

_ABOUT = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.stride, Tensor.__len__),
}
"""What is asked of a parameter without looking at its values."""
_FOR_PARAMETERS = 0.5
"""Of the memory that a rank has left, beside what it holds; the rest is for activations."""


class OnDemand(TorchFunctionMode):
    """While it is entered, every operation gets whole parameters."""

    def __init__(self, model: nn.Module, bring: Callable[[str], Tensor], room_bytes: int) -> None:
        """What is brought first stays for as long as `room_bytes` allow; a model uses its parameters in turns, so that
        anything else would be let go of just before it is used again."""
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._bring, self._left_bytes = bring, room_bytes
        self._kept: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The same operation with what is needed for it."""
        given: dict[str, Any] = dict(kwargs or {})
        if func not in _ABOUT:
            brought: dict[str, Tensor] = {}
            whole = lambda parameter: self._whole(parameter, brought)  # noqa: E731
            args, given = pytree.tree_map_only(nn.Parameter, whole, (args, given))
        return func(*args, **given)

    def _whole(self, parameter: nn.Parameter, brought: dict[str, Tensor]) -> Tensor:
        name = self._names.get(id(parameter))
        if name is None:
            return parameter
        found = self._kept.get(name, brought.get(name))
        if found is None:
            found = brought[name] = self._bring(name)
            if found.nbytes <= self._left_bytes:
                self._left_bytes -= found.nbytes
                self._kept[name] = found
        return found


@contextmanager
def on_demand(
    model: nn.Module,
    device: torch.device,
    shapes: Mapping[str, torch.Size],
    bring: Callable[[str], Tensor],
    room_bytes: int,
) -> Iterator[None]:
    """Run the model without its parameters, which have device and shape and no values: who reads one past torch's
    functions gets NaN."""
    for name, parameter in model.named_parameters():
        nothing = torch.zeros((), dtype=parameter.dtype, device=device)
        if nothing.is_floating_point() or nothing.is_complex():
            nothing.fill_(torch.nan)
        parameter.data = nothing.expand(shapes[name])
    with torch.compiler.set_stance("force_eager"), OnDemand(model, bring, room_bytes):
        yield


def same_everywhere(told: list[Any]) -> None:
    """Raise where ranks are about to bring different parameters; what they told is in the order of ranks."""
    if len(set(told)) > 1:
        uses = ", ".join(f"rank {rank} {name or 'none'}" for rank, name in enumerate(told))
        raise RunError(
            f"ranks use different parameters at the same time ({uses}): what the model does depends on values in its"
            " batch, and there is no room for the whole of it.",
            fix="let ranks have more memory (--memory), or leave `evaluate` out and measure a checkpoint on its own.",
        )


def room_beside(held: Iterable[Any], device: torch.device, limit_bytes: int) -> int:
    """Bytes of parameters that may be brought to a device beside the tensors that it holds."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
    else:
        storages = [one.untyped_storage() for one in held if isinstance(one, Tensor)]
        used = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return int(_FOR_PARAMETERS * max(0, limit_bytes - used))
