"""Why a model cannot be captured, with the user's own file and line.

In: what tracing found or raised. Out: a `CaptureError`. Never changes a graph.
"""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from plait.errors import CaptureError
from plait.torch_private.autograd import function_of_backward

_PACKAGE = str(Path(__file__).resolve().parents[2])
_TORCH = str(Path(torch.__file__).parent)


def refuse_custom_functions(result: Tensor) -> None:
    """A hand-written autograd.Function has a backward that the aten graph of its forward does not show."""
    seen: set[Any] = set()
    stack = [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # torch gives the registered backward of a custom op this name; replaying the op finds it again.
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not type(node).__name__.startswith(
            "GeneratedBackwardFor_"
        ):
            place = _line_of(type(node))
            raise CaptureError(
                f"the model uses the hand-written autograd function {type(node).__name__.removesuffix('Backward')!r}"
                f"{f' ({place})' if place else ''}, whose backward cannot be read from its forward.",
                fix="write it with torch.library.custom_op to have it captured; plans single and ddp run it eagerly.",
                where=place,
            )
        stack.extend(parent for parent, _ in node.next_functions)


def refuse_sparse_gradients(gradients: Mapping[str, fx.Node]) -> None:
    """A gradient that names its rows is no dense tensor that could be cut, flattened or summed in place."""
    sparse = [name for name, node in gradients.items() if node.meta["val"].layout != torch.strided]
    if sparse:
        raise CaptureError(
            f"the gradient of {sparse[0]} is sparse.",
            fix="drop sparse=True from its layer to have it captured; plans that train whole models run it eagerly.",
        )


def _line_of(backward: type) -> str | None:
    """Where the user wrote the function that torch made this backward from."""
    try:
        function: Any = function_of_backward(backward)
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (AttributeError, OSError, TypeError):
        return None


class OtherDeviceError(RuntimeError):
    """A line of the model names a device, which is not its to choose."""

    fix = "leave devices out of the model: plait places its tensors; choose with --device."


def refuse_other_devices(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Stop at a tensor that is made on, or moved to, another device than the one that is captured on.

    Torch would not only fail there: a build without CUDA ends the whole process.
    """
    named = kwargs.get("device")
    if func is Tensor.cuda:
        named = named if named is not None else args[1] if len(args) > 1 else "cuda"
    elif func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device, int)):
        named = args[1]
    if named is None:
        return
    device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    if device.type not in ("cpu", "meta"):
        raise OtherDeviceError(f"it names the device {device}")


def explain(error: Exception) -> CaptureError:
    """Name the user's line that stopped the capture."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not _is_library(f.filename)]
    frame = theirs[-1] if theirs else frames[-1]
    reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return CaptureError(
        f"the model cannot be captured: {frame.filename}:{frame.lineno} in {frame.name}: `{frame.line}` "
        f"({type(error).__name__}: {reason}).",
        where=f"{frame.filename}:{frame.lineno}",
        fix=error.fix
        if isinstance(error, OtherDeviceError)
        else "avoid Python branches on tensor values to have it captured; plans single and ddp run it eagerly.",
    )


def _is_library(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _TORCH, "<")) or "site-packages" in filename
