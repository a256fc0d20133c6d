"""What torch keeps in its modules, and the insides of layers and of checkpointing that a trace replaces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._higher_order_ops.cond import CondOp
from torch._higher_order_ops.scan import ScanOp
from torch._higher_order_ops.while_loop import WhileLoopOp
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils import checkpoint

__all__ = [
    "BatchNorm",
    "NormBase",
    "attributes_of",
    "call_of",
    "check_dims",
    "children_of",
    "hooks_of_module",
    "intercept",
    "is_lazy",
    "replaced",
    "tables_of",
]

_TABLES = ("_parameters", "_buffers", "_modules")


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers by name, to be read and written."""
    return module._parameters, module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own modules by name, to be read and written."""
    return module._modules


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What a call of a module does: its hooks, and its forward."""
    return module._call_impl


def intercept(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Have `call` called with the arguments of calls of this module; returns what ends that."""
    own, before = vars(module), module._compiled_call_impl
    had = "_compiled_call_impl" in own
    own["_compiled_call_impl"] = call

    def end() -> None:
        if had:
            own["_compiled_call_impl"] = before
        else:
            del own["_compiled_call_impl"]

    return end


def is_lazy(module: nn.Module) -> bool:
    """Whether a tensor of its own has no shape yet."""
    return any(nn.parameter.is_lazy(t) for table in tables_of(module) for t in table.values())


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What else a module has, its hooks excepted."""
    return {n: v for n, v in vars(module).items() if n not in _TABLES and not _is_hooks(n)}


def hooks_of_module(module: nn.Module) -> dict[str, list[Callable[..., Any]]]:
    """A module's hooks by kind."""
    return {n: list(v.values()) for n, v in vars(module).items() if _is_hooks(n) and isinstance(v, dict)}


def _is_hooks(name: str) -> bool:
    return name.endswith("_hooks") or "_hooks_" in name


def check_dims(layer: BatchNorm, x: Tensor) -> None:
    """What a batch norm layer asks of its input."""
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]


@contextmanager
def replaced(
    batch_norm: Callable[..., Any],
    reentrant: type,
    plain: Callable[..., Iterator[None]],
    control: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    encoder: Callable[..., Any],
) -> Iterator[None]:
    """While active, batch norm layers run `batch_norm`; checkpointing uses `reentrant`, or `plain` around a call;
    torch's own branches, loops and scans are `control`, its encoders `encoder`; what torch.compile has made runs as it
    was written; modules are converted (`.to(dtype)`) only where that changes something."""
    convert = nn.Module._apply

    def convert_where_needed(
        module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        held = [
            t
            for part in (module.modules() if recurse else (module,))
            for table in tables_of(part)
            for t in table.values()
        ]
        changes = any(t is not None and fn(t) is not t for t in held)
        return convert(module, fn, recurse) if changes else module  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for owner, name, new in (
            (BatchNorm, "forward", batch_norm),
            (nn.Module, "_apply", convert_where_needed),
            (nn.TransformerEncoder, "forward", encoder),
            (checkpoint, "CheckpointFunction", reentrant),
            (checkpoint, "_checkpoint_without_reentrant_generator", plain),
            *((op, "__call__", new) for op, new in zip((CondOp, WhileLoopOp, ScanOp), control, strict=True)),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        yield
