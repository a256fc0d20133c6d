"""Charts are well-formed SVG that shows the numbers."""

import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.report.charts import HEIGHT, WIDTH, Line, line_chart, stacked_bar, ticks


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_span_the_interval(low: float, length: float, count: int) -> None:
    marks = ticks(low, low + length, count)
    slack = 1e-6 * max(abs(low), length)
    assert marks[0] <= low + slack
    assert marks[-1] >= low + length - slack
    assert 2 <= len(marks) <= count + 3
    assert marks == sorted(set(marks))


def test_ticks_of_a_constant() -> None:
    assert ticks(3.0, 3.0, 4)[0] < 3.0 < ticks(3.0, 3.0, 4)[-1]
    assert ticks(0.0, 0.0, 4)[0] < 0.0 < ticks(0.0, 0.0, 4)[-1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(-1e9, 1e9)), min_size=1, max_size=40))
def test_every_point_lies_inside_the_chart(points: list[tuple[float, float]]) -> None:
    root = ElementTree.fromstring(line_chart("Loss", [Line(name="loss", points=points, style="first")]))
    hover = json.loads(root.attrib["data-points"])
    assert len(hover) == len(points)
    for x, y, _ in hover:
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_values_that_are_not_finite_are_left_out() -> None:
    points = [(1.0, 2.0), (2.0, math.nan), (3.0, math.inf), (4.0, 1.0)]
    root = ElementTree.fromstring(line_chart("Loss", [Line(name="loss", points=points, style="first")]))
    assert [text for _, _, text in json.loads(root.attrib["data-points"])] == [
        "step 1: loss 2",
        "step 4: loss 1",
    ]


def test_a_long_line_is_averaged_with_a_band() -> None:
    points = [(float(step), float(step % 2)) for step in range(10_000)]
    svg = line_chart("Loss", [Line(name="loss", points=points, style="first")])
    root = ElementTree.fromstring(svg)
    assert len(json.loads(root.attrib["data-points"])) <= 600
    assert root.find("polygon") is not None
    assert len(svg) < 200_000


def test_nothing_logged_is_said() -> None:
    assert "Nothing was logged for loss" in line_chart("Loss", [Line(name="loss", points=[], style="first")])


def test_strings_are_escaped() -> None:
    svg = line_chart("<script>", [Line(name='"><b>', points=[(1, 1), (2, 2)], style="first")])
    assert "<script" not in svg
    assert "<b>" not in svg
    ElementTree.fromstring(svg)
    assert "<i>" not in stacked_bar("<i>", [("kind-data", "<i>", 1.0)], whole=1.0, longest=1.0)


def test_the_parts_of_a_bar_follow_each_other() -> None:
    parts = [("kind-data", "data", 1.0), ("kind-idle", "idle", 0.0), ("kind-forward", "forward", 3.0)]
    root = ElementTree.fromstring(stacked_bar("rank 0", parts, whole=4.0, longest=8.0))
    rects = [(float(rect.attrib["x"]), float(rect.attrib["width"])) for rect in root.iter("rect")]
    assert rects == [pytest.approx((0.0, 125.0)), pytest.approx((125.0, 375.0))]
