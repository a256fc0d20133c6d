"""What compiled segments still read and write."""

import pytest
import torch
from tests.zoo import ZOO
from torch import fx

from plait.cluster.presets import preset
from plait.plan.named import resolve
from plait.program.cost.fused import fused_shares
from plait.run.measure.predict import predict_job

aten = torch.ops.aten


def graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x @ w, through gelu and twice itself, to another product; its sum leaves."""
    made, values = fx.Graph(), dict[str, fx.Node]()

    def put(name: str, node: fx.Node, *shape: int) -> fx.Node:
        node.name, node.meta["val"] = name, torch.empty(shape, device="meta")
        values[name] = node
        return node

    x = put("x", made.placeholder("x"), 64, 64)
    first = put("first", made.call_function(aten.mm.default, (x, x)), 64, 64)
    gelu = put("gelu", made.call_function(aten.gelu.default, (first,)), 64, 64)
    flat = put("flat", made.call_function(aten.view.default, (gelu, [64 * 64])), 64 * 64)
    back = put("back", made.call_function(aten.view.default, (flat, [64, 64])), 64, 64)
    twice = put("twice", made.call_function(aten.add.Tensor, (back, back)), 64, 64)
    both = put("both", made.call_function(aten.mul.Tensor, (twice, first)), 64, 64)
    put("last", made.call_function(aten.mm.default, (both, x)), 64, 64)
    put("total", made.call_function(aten.sum.default, (both,)))
    return made, values


def test_only_what_leaves_a_kernel_reaches_memory() -> None:
    made, values = graph()
    nodes = [node for node in made.nodes if node.op == "call_function"]
    shares = fused_shares(nodes, ("last", "total"))
    assert set(shares) == {values[name] for name in ("gelu", "twice", "both", "total")}
    assert shares[values["gelu"]] == 0.5  # reads what a product wrote
    assert shares[values["twice"]] == 0  # between two of its kernel, through views
    assert shares[values["both"]] == pytest.approx(2 / 3)  # the product again, and its result for the next
    assert shares[values["total"]] == pytest.approx(1 / (64 * 64 + 1))


def test_an_op_before_it_in_the_kernel_has_read_it() -> None:
    _, values = graph()
    values["both"].args = (values["gelu"], values["first"])
    shares = fused_shares([values[name] for name in ("first", "gelu", "both", "last")], ("last",))
    assert shares[values["both"]] == pytest.approx(1 / 3)


def test_compiled_steps_are_predicted_to_be_faster() -> None:
    job = ZOO["gpt_tied"].job(batch=4, steps=1, optimizer="adamw")
    cluster = preset("H200").cluster("H200", 1, 1)
    off, on = (
        predict_job(job, resolve("single", 1, {"compile": way}), cluster).prediction for way in ("off", "on")
    )
    assert on.step_s < off.step_s
    assert on.memory.total == off.memory.total
