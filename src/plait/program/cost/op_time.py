"""How long one op takes on one device.

In: a node of a graph with fake values, or its work in numbers; a `Device`. Out: seconds on the device. It never runs
anything. The model is a roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer, and
a little for its kernel. Matrix products reach less of the peak where they are small: they are made of tiles, of which
the last of a row is filled in part, and which keep all processors busy only where there are many of them.
docs/cost-model.md has the equations.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

import torch
from torch import fx

from plait.cluster.cluster import Device
from plait.graph.cost import node_flops, value_bytes
from plait.graph.op_family import family
from plait.program.local.communicate import COLLECTIVES
from plait.torch_private.ops import OpOverload, base_name

WorkKind = Literal["matmul", "attention", "memory"]
TILE = 128
"""Rows and columns of the result that one processor of a device computes at a time."""
_READS_ROWS = ("embedding", "index", "index_select", "gather", "own_rows")
"""Ops that read of their first argument what they return, and not the rest."""
_NO_TIME = (
    "arange",
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "scalar_tensor",
    "detach",
    "alias",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpWork:
    """What one op asks of a device."""

    kind: WorkKind
    """Matrix products (convolutions too), fused attention, or memory traffic alone."""
    flops: float
    """Arithmetic that counts."""
    num_bytes: float
    """Read and written, each tensor once."""
    dtype: str
    """Of the arithmetic: one of the names in which a `Device` states its rates."""
    rows: float = 0.0
    """Of the result of a matrix product, in each of `count`."""
    columns: float = 0.0
    """Of the result."""
    depth: float = 0.0
    """Length of the sums."""
    count: float = 1.0
    """Matrix products at once."""


def op_seconds(work: OpWork, device: Device) -> float:
    """Time of one op on the device, its kernel included."""
    constants = device.calibration
    seconds = work.num_bytes / (device.memory_bandwidth * constants.memory_share)
    if work.kind == "matmul" and work.flops:
        rate = device.rate(work.dtype) * constants.matmul_share * matmul_efficiency(work, device)
        seconds = max(seconds, work.flops / rate)
    elif work.kind == "attention":
        seconds = max(seconds, work.flops / (device.rate(work.dtype) * constants.attention_share))
    return seconds + constants.kernel_s


def matmul_efficiency(work: OpWork, device: Device) -> float:
    """Share of its best rate at which a device computes a matrix product of this shape, from 0 to 1."""
    constants = device.calibration
    down, across = ceil(work.rows / TILE), ceil(work.columns / TILE)
    filled = work.rows * work.columns / (down * across * TILE * TILE)
    tiles = down * across * work.count
    busy = tiles / (tiles + constants.matmul_tiles)
    return filled * busy * work.depth / (work.depth + constants.matmul_depth)


def node_work(node: fx.Node) -> OpWork | None:
    """What a node asks of a device; None where it takes no time there: views, sizes, communication."""
    if node.op != "call_function" or node.target in COLLECTIVES:
        return None
    kind, value = family(node.target), node.meta.get("val")
    name = op_name(node.target)
    if kind == "view" or name in _NO_TIME or not value_bytes(value):
        return None
    dtype = _dtype(value)
    flops = float(node_flops(node))
    if kind == "matmul":
        return _product(node, name, flops, dtype)
    if kind == "convolution":
        return _convolution(node, flops, dtype)
    if kind in ("attention", "recurrent"):
        if kind == "attention" and _is_causal(node, name):
            flops /= 2  # kernels skip the keys that no query of a tile may see
        return OpWork(
            kind="attention" if kind == "attention" else "matmul", flops=flops, num_bytes=_traffic(node, name),
            dtype=dtype, rows=TILE, columns=TILE, depth=flops, count=flops,
        )  # fmt: skip
    return OpWork(kind="memory", flops=0.0, num_bytes=_traffic(node, name), dtype=dtype)


def op_name(target: Any) -> str:
    """`addmm` of `aten.addmm.default`; a function's own name."""
    if isinstance(target, OpOverload):
        return base_name(target)
    return getattr(target, "__name__", str(target))


def _product(node: fx.Node, name: str, flops: float, dtype: str) -> OpWork:
    first = 1 if name in ("addmm", "baddbmm", "addmv") else 0
    left: Any = node.args[first]
    out = node.meta["val"].shape
    dtype = "float8" if name in ("scaled_product", "rounded_product", "scaled_gradient") else dtype
    rows, columns = (out[-2], out[-1]) if len(out) >= 2 else (prod(out), 1)
    return OpWork(
        kind="matmul", flops=flops, num_bytes=_traffic(node, name), dtype=dtype, rows=rows, columns=columns,
        depth=left.meta["val"].shape[-1], count=prod(out[:-2]),
    )  # fmt: skip


def _convolution(node: fx.Node, flops: float, dtype: str) -> OpWork:
    """As the matrix product that it is: positions x (channels of a window) x channels."""
    backward = "backward" in op_name(node.target)
    weight: Any = node.args[2 if backward else 1]
    out: Any = node.args[0] if backward else node
    shape, kernel = out.meta["val"].shape, weight.meta["val"].shape
    groups: Any = node.args[9 if backward else 8]
    return OpWork(
        kind="matmul", flops=flops, num_bytes=_traffic(node, "convolution"), dtype=dtype,
        rows=shape[0] * prod(shape[2:]), columns=kernel[0] / groups, depth=prod(kernel[1:]), count=groups,
    )  # fmt: skip


def _is_causal(node: fx.Node, name: str) -> bool:
    return bool(node.args[7 if name == "attention_backward" else 4])


def _traffic(node: fx.Node, name: str) -> float:
    written = value_bytes(node.meta["val"])
    if name in _READS_ROWS:
        return 2.0 * written
    return float(written + sum(value_bytes(source.meta.get("val")) for source in node.all_input_nodes))


def _dtype(value: Any) -> str:
    tensors = value if isinstance(value, (tuple, list)) else [value]
    floats = [t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    return str(floats[0]).removeprefix("torch.") if floats else "float32"
