"""Why a model cannot be captured, with the user's own file and line.

In: what tracing found or raised. Out: a `CaptureError`. Never changes a graph.
"""

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.errors import CaptureError
from plait.folders import can_be_named
from plait.torch_private.autograd import late_hooks_of


def refuse_late_hooks(model: nn.Module) -> None:
    """A hook on the accumulated gradient acts outside of the step that a graph computes."""
    for name, parameter in model.named_parameters():
        for hook in late_hooks_of(parameter):
            code = getattr(hook, "__code__", None)
            line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
            raise CaptureError(
                f"{name} has a hook that is called when its gradient is complete{f' ({line})' if line else ''}.",
                fix="use register_hook to have it captured; plans single and ddp run it eagerly.",
                where=line,
            )


def refuse_sparse_gradients(gradients: Mapping[str, fx.Node]) -> None:
    """A gradient that names its rows is no dense tensor that could be cut, flattened or summed in place."""
    sparse = [name for name, node in gradients.items() if node.meta["val"].layout != torch.strided]
    if sparse:
        raise CaptureError(
            f"the gradient of {sparse[0]} is sparse.",
            fix="drop sparse=True from its layer to have it captured; plans that train whole models run it eagerly.",
        )


def refuse_other_shape(name: str, before: fx.Node, after: fx.Node) -> None:
    """What the model holds is of one shape from step to step."""
    old, new = before.meta["val"], after.meta["val"]
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"the forward makes {name}, of {list(old.shape)}, one of {list(new.shape)} ({new.dtype}).",
            fix="make it of its last shape in the constructor to have it captured; plan single runs it eagerly.",
        )


_RESIZING = ("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant")
"""Ops that give what they write another shape when they run, which their shapes on fake tensors do not tell."""
_RESIZED = (torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default)
"""Ops whose very purpose that is."""


def refuse_resizing(graph: fx.Graph) -> None:
    """Observers of quantization by channel begin with empty buffers."""
    for node in graph.nodes:
        if not str(node.target).removeprefix("aten.").startswith(_RESIZING):
            continue
        empty = [a for a in node.args if isinstance(a, fx.Node) and a.meta["val"].numel() == 0]
        if empty:
            raise CaptureError(
                f"{node.target} gives a buffer of {node.meta.get('module') or 'the model'} another shape when it first "
                f"runs ({node.meta.get('source') or 'in code of torch'}).",
                fix="run the model once before it is trained to have it captured; plans single and ddp run it eagerly.",
                where=node.meta.get("source") or None,
            )


def refuse_resized(graph: fx.Graph) -> None:
    """Of a graph as it was traced: what the model holds has one shape, or writes to the other one would be lost."""
    for node in graph.nodes:
        if node.target not in _RESIZED or not isinstance(node.args[0], fx.Node):
            continue
        if node.args[0].op == "placeholder":
            source = node.meta.get("source")
            raise CaptureError(
                f"the forward gives a tensor that the model holds another shape ({source or node.target}).",
                fix="give it its shape in the constructor to have it captured; plan single runs it eagerly.",
                where=source or None,
            )


def refuse_other_values(graph: fx.Graph) -> None:
    """A graph is of dense tensors and numbers: what else a step holds or makes can be neither cut nor sent."""
    for node in graph.nodes:
        held = node.meta["constant"] if node.op == "get_attr" else node.meta.get("val")
        if node.op == "get_attr" and not isinstance(held, Tensor):
            what = f"holds a {type(held).__name__}, which is no tensor"
        elif isinstance(held, Tensor) and held.layout != torch.strided:
            what = f"computes with a tensor that is not dense ({str(held.layout).removeprefix('torch.')})"
        else:
            continue
        raise CaptureError(
            f"the step {what}: {node.name}{f' of {where}' if (where := node.meta.get('module')) else ''}.",
            fix="use dense tensors and plain ops to have it captured; plans single and ddp run it eagerly.",
        )


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


def explain(error: BaseException) -> CaptureError:
    """Name the user's line that stopped the capture."""
    calls = list(traceback.walk_tb(error.__traceback__))
    theirs = [call for call in calls if can_be_named(call[0])]
    reason = reason_of(error)
    if not theirs:
        return CaptureError(
            f"the model cannot be captured: torch fails outside of its code, in the backward or in the loss "
            f"({reason}).",
            fix="plans single and ddp run it eagerly.",
        )
    (frame,) = traceback.StackSummary.extract(iter(theirs[-1:]))
    fix = (
        "avoid Python branches on tensor values to have it captured; where it goes through samples one by one, write "
        "it for one sample and wrap that in plait.Batched; plans single and ddp run it eagerly."
    )
    if isinstance(error, OtherDeviceError):
        fix = error.fix
    elif theirs[-1] is calls[-1]:  # their own code has raised, and no op of torch's that has no values here
        fix = f"mend that line; where it raises only for want of values, {fix}"
    return CaptureError(
        f"the model cannot be captured: {frame.filename}:{frame.lineno} in {frame.name}: `{frame.line}` "
        f"({reason}).",
        where=f"{frame.filename}:{frame.lineno}",
        fix=fix,
    )


def reason_of(error: BaseException) -> str:
    """The error on one line."""
    said = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return f"{type(error).__name__}: {said}"
