"""Times of single ops: what makes an op slower, and what no op exceeds."""

from dataclasses import replace

import pytest
import torch
from torch import fx

from plait.cluster.presets import preset
from plait.graph.ops.attention import attention as attention_op
from plait.program.cost.op_time import OpWork, matmul_efficiency, node_work, op_seconds

A100 = preset("A100").device


def product(rows: int, columns: int, depth: int, count: int = 1) -> OpWork:
    traffic = 2.0 * count * (rows * columns + rows * depth + columns * depth)
    return OpWork(
        kind="matmul", flops=2.0 * rows * columns * depth * count, num_bytes=traffic, dtype="bfloat16",
        rows=rows, columns=columns, depth=depth, count=count,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(64, 64, 64), (1000, 777, 64), (4096, 4096, 4096), (16384, 50304, 8192)])
def test_a_product_stays_below_the_peak_and_no_larger_one_is_quicker(shape: tuple[int, int, int]) -> None:
    work = product(*shape)
    assert work.flops / op_seconds(work, A100) < A100.peak_flops["bfloat16"]
    for dim in range(3):
        larger = [2 * extent if index == dim else extent for index, extent in enumerate(shape)]
        assert op_seconds(product(*larger), A100) >= op_seconds(work, A100)
    eight = product(*shape, count=8)
    assert op_seconds(work, A100) < op_seconds(eight, A100) <= 8 * op_seconds(work, A100)


def test_small_and_badly_tiled_products_reach_less() -> None:
    large = matmul_efficiency(product(4096, 4096, 4096), A100)
    assert matmul_efficiency(product(256, 256, 4096), A100) < large
    assert matmul_efficiency(product(4096, 4096, 64), A100) < large
    assert matmul_efficiency(product(4096, 4097, 4096), A100) < large
    assert 0 < matmul_efficiency(product(1, 1, 1), A100) < 0.01


def test_an_op_without_arithmetic_is_bound_by_memory_and_its_kernel() -> None:
    work = OpWork(kind="memory", flops=0.0, num_bytes=1e9, dtype="float32")
    constants = A100.calibration
    expected = 1e9 / (A100.memory_bandwidth * constants.memory_share) + constants.kernel_s
    assert op_seconds(work, A100) == pytest.approx(expected)
    assert op_seconds(replace(work, num_bytes=0.0), A100) == constants.kernel_s


def node_of(target: object, *shapes: tuple[int, ...], rest: tuple[object, ...] = ()) -> fx.Node:
    graph = fx.Graph()
    inputs = []
    for index, shape in enumerate(shapes):
        inputs.append(graph.placeholder(f"x{index}"))
        inputs[-1].meta["val"] = torch.empty(shape, device="meta")
    node = graph.call_function(target, (*inputs, *rest))  # type: ignore[arg-type]
    node.meta["val"] = target(*(x.meta["val"] for x in inputs), *rest)  # type: ignore[operator]
    return node


def test_products_are_read_off_nodes() -> None:
    work = node_work(node_of(torch.ops.aten.addmm.default, (256,), (512, 1024), (1024, 256)))
    assert work is not None
    assert (work.rows, work.columns, work.depth, work.count) == (512, 256, 1024, 1)
    assert work.flops == 2 * 512 * 256 * 1024
    assert work.num_bytes == 4 * (256 + 512 * 1024 + 1024 * 256 + 512 * 256)
    batched = node_work(node_of(torch.ops.aten.bmm.default, (8, 128, 64), (8, 64, 32)))
    assert batched is not None
    assert (batched.rows, batched.columns, batched.depth, batched.count) == (128, 32, 64, 8)


def test_a_convolution_is_the_product_that_it_is() -> None:
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    work = node_work(node_of(torch.ops.aten.convolution.default, (4, 16, 10, 10), (32, 16, 3, 3), rest=rest))
    assert work is not None
    assert (work.rows, work.columns, work.depth) == (4 * 10 * 10, 32, 16 * 9)
    assert work.flops == 2 * work.rows * work.columns * work.depth


def test_causal_attention_skips_half_and_views_take_no_time() -> None:
    shapes = ((2, 4, 128, 64),) * 3
    attention = torch.ops.plait.attention.default
    assert attention_op is not None  # the import registers it
    whole = node_work(node_of(attention, *shapes, rest=(None, False, 0.125)))
    causal = node_work(node_of(attention, *shapes, rest=(None, True, 0.125)))
    assert whole is not None and causal is not None
    assert causal.flops == whole.flops / 2
    assert node_work(node_of(torch.ops.aten.t.default, (3, 4))) is None
    table = node_work(node_of(torch.ops.aten.add.Tensor, (8, 4), (8, 4)))
    assert table is not None and table.num_bytes == 3 * 8 * 4 * 4
