"""docs/pipelines.md is true: its pictures and its table are those of today's schedules, its plan file can be read."""

import re
from pathlib import Path

import pytest
from docs.pictures.timelines import MICRO_BATCHES, RANKS, TIMELINES, draw_timeline, table

from plait.plan.plan import parse_plan
from plait.program.stage.schedules import SCHEDULES

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "pipelines.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TIMELINES)
def test_a_picture_is_that_of_todays_schedule(name: str) -> None:
    assert f"pictures/{name}.svg" in TEXT
    again = draw_timeline(TIMELINES[name])
    assert again == (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"), (
        "the schedule has changed; if it is right: python -m docs.pictures"
    )


def test_every_schedule_has_its_picture() -> None:
    assert {timeline.schedule for timeline in TIMELINES.values()} == set(SCHEDULES)


def test_the_table_is_what_the_simulator_says() -> None:
    assert table() in TEXT, "python -m docs.pictures prints it"


def test_the_bubble_of_the_page() -> None:
    """3 / 11, as the text says of gpipe."""
    row = re.search(r"\| `gpipe` \| \S+ \| (\S+)% ", table())
    assert row is not None
    assert float(row.group(1)) == pytest.approx(100 * (RANKS - 1) / (MICRO_BATCHES + RANKS - 1), abs=0.05)


def test_the_plan_file_of_the_page_can_be_read() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert parse_plan(text).pipe.cut == ("blocks.3", "blocks.6", "blocks.9")
