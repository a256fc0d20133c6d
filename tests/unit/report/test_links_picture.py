"""The picture of collectives' times: where lines cross, and what is written."""

import re

import pytest

from plait.report.links_picture import crossovers, links_picture


def test_lines_cross_between_the_sizes_that_were_measured() -> None:
    """A latency of 1 with nothing a byte, and one of 0.01 a byte: equal at 100 bytes."""
    lines = {"flat": [(10, 1.0), (1000, 1.0)], "steep": [(10, 0.1), (1000, 10.0)]}
    ((size, name),) = crossovers(lines)
    assert size == pytest.approx(100) and name == "flat"
    assert crossovers({"flat": lines["flat"]}) == []


def test_every_line_is_drawn_with_what_is_said_of_it() -> None:
    lines = {f"way {at}": [(10, at + 1.0), (1000, at + 2.0)] for at in range(9)}
    drawn = links_picture("times", lines, {"way 8": "3 ms, 2 GB/s"})
    assert drawn.count("<polyline") == 9 and "3 ms, 2 GB/s" in drawn and "from" not in drawn
    near: dict[str, list[tuple[int, float]]] = {
        "a": [(10, 1.0), (20, 2.0), (30, 4.0)],
        "b": [(10, 2.0), (20, 1.0), (30, 3.0)],
        "c": [(10, 3.0), (20, 3.0), (30, 1.0)],
    }
    assert len(crossovers(near)) == 2
    heights = re.findall(r'y="(\d+)" font-size="10" fill="#555"', links_picture("times", near))
    assert len(set(heights)) == 2  # what is said of the one is not over what is said of the other
    crossing = links_picture("times", {"a": [(10, 1.0), (1000, 1.0)], "b": [(10, 2.0), (1000, 0.5)]})
    assert "b from " in crossing
