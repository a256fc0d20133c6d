"""Segments: Python functions that run ops, empty their inputs and keep their source for tracebacks."""

import gc
import linecache
import traceback
from typing import Any

import pytest
import torch
from torch import fx

from plait.program.program import Segment
from plait.program.segment.codegen import make_segment

aten = torch.ops.aten


def segment(target: Any, *args: Any, device: str = "cpu", **kwargs: Any) -> Segment:
    """A segment of one op; "x" stands for its input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    node = graph.call_function(target, tuple(x if arg == "x" else arg for arg in args), kwargs)
    node.meta |= {"val": torch.ones(2), "phase": "forward"}
    inputs = ["x"] if "x" in args else []
    return make_segment("0.forward_0", "forward", [node], inputs, [node.name], torch.device(device))


def test_a_segment_computes_and_empties_its_inputs() -> None:
    given = [torch.tensor([1.0, 2.0])]
    (result,) = segment(aten.mul.Tensor, "x", 3.0).run(given)
    assert result.tolist() == [3.0, 6.0]
    assert given == []


def test_tensors_are_dropped_after_their_last_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    nodes = [x]
    for _ in range(3):
        nodes.append(graph.call_function(aten.exp.default, (nodes[-1],)))
        nodes[-1].meta |= {"val": torch.ones(2), "phase": "forward"}
    made = make_segment("s", "forward", nodes[1:], ["x"], [nodes[2].name, nodes[3].name], torch.device("cpu"))
    assert "del x" in made.source
    assert f"del {nodes[1].name}" in made.source
    assert f"del {nodes[2].name}" not in made.source, "what leaves the segment stays"
    assert made.outputs == (nodes[2].name, nodes[3].name)
    assert made.num_ops == 3
    results = made.run([torch.zeros(1)])
    assert [round(float(value), 4) for value in results] == [2.7183, 15.1543]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-300, 0.1, 7, True])
def test_every_number_can_be_written(value: float) -> None:
    (result,) = segment(aten.full.default, [2], value, dtype=torch.float64, device="cpu").run([])
    torch.testing.assert_close(
        result, torch.full([2], value, dtype=torch.float64), equal_nan=True, rtol=0, atol=0
    )


def test_devices_are_those_of_the_run() -> None:
    made = segment(aten.full.default, [2], 1.0)
    graph = fx.Graph()
    node = graph.call_function(
        aten.full.default, ([2], 1.0), {"device": torch.device("cpu"), "dtype": torch.float32}
    )
    node.meta |= {"val": torch.ones(2), "phase": "forward"}
    moved = make_segment("s", "forward", [node], [], [node.name], torch.device("meta"))
    assert moved.run([])[0].device.type == "meta"
    assert made.run([])[0].device.type == "cpu"


def test_a_traceback_shows_the_line_that_failed() -> None:
    made = segment(aten.view.default, "x", [3])
    with pytest.raises(RuntimeError) as raised:
        made.run([torch.ones(2)])
    shown = "".join(traceback.format_exception(raised.value))
    assert "<plait segment 0.forward_0 #" in shown
    assert "aten_view_default(x, [3])" in shown


def test_two_programs_show_their_own_lines_and_keep_none_for_ever() -> None:
    """Segments of two programs have the same names; a traceback of one is no reason to show the other's source."""
    made = [segment(aten.view.default, "x", [extent]) for extent in (3, 5)]
    for extent, own in zip((3, 5), made, strict=True):
        with pytest.raises(RuntimeError) as raised:
            own.run([torch.ones(2)])
        shown = "".join(traceback.format_exception(raised.value))
        assert f"aten_view_default(x, [{extent}])" in shown
        assert f"[{8 - extent}]" not in shown
    names = {own.run.__code__.co_filename for own in made}
    assert len(names) == 2 and names <= set(linecache.cache)
    del made, own, raised
    gc.collect()
    assert not names & set(linecache.cache)
