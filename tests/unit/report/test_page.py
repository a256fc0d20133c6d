"""The page: one file, no network, every string escaped, every span of the step in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from plait.report.page import write_page
from plait.report.page_timeline import embedded_steps
from plait.trace import Span, Trace

VOID = {"meta", "br", "hr", "input", "img", "link"}


class Reader(HTMLParser):
    """Checks that elements close in order, and notes what would be loaded or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.loads += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> tuple[str, Reader]:
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return text, reader


def test_the_page_is_whole_and_asks_for_nothing(run_dir: Path) -> None:
    path = write_page(run_dir)
    assert path == run_dir / "report.html"
    text, reader = read(path)
    assert reader.loads == []
    assert "@import" not in text
    assert "url(" not in text
    assert not set(re.findall(r"https?://[^\s\"'<]+", text)) - {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert [name.name for name in run_dir.iterdir() if "partial" in name.name] == []


def test_the_page_shows_the_run(run_dir: Path) -> None:
    text, reader = read(write_page(run_dir))
    for words in (
        "Final loss",
        "0.1667",
        "1,007",
        "plan ddp on 2 ranks",
        "Where a step goes",
        "rank 1",
        "As a table",
    ):
        assert words in reader.text
    assert text.count('<svg class="chart"') == 2
    assert text.count('<svg class="bar"') == 2
    assert "prefers-color-scheme: dark" in text


def test_the_timeline_holds_every_span_of_the_step(run_dir: Path) -> None:
    text, _ = read(write_page(run_dir))
    match = re.search(r"<script type='application/json' id='spans'>(.*?)</script>", text, re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    assert len(data["steps"]) == 8
    for step in data["steps"].values():
        assert step["us"] == pytest.approx(9500.0)
        assert [(row["rank"], row["lane"]) for row in step["rows"]] == [
            (0, "compute"),
            (0, "communication"),
            (1, "compute"),
            (1, "communication"),
        ]
        assert [len(row["spans"]) for row in step["rows"]] == [5, 1, 5, 1]
    assert "forward <b>&" in data["names"]


def test_hostile_strings_stay_text(run_dir: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    _, innocent = read(write_page(run_dir))
    (run_dir / "plan.yaml").write_text(f"name: {evil}\n")
    (run_dir / "environment.json").write_text(json.dumps({evil: evil}))
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 13, "evaluate": {evil: 1.0, "loss": 0.1}}) + "\n")
    rank0 = run_dir / "trace" / "rank0.json"
    rank0.write_text(rank0.read_text().replace("forward <b>&", evil))
    text, reader = read(write_page(run_dir))
    assert reader.tags.count("script") == innocent.tags.count("script")
    assert "img" not in reader.tags
    assert "<script>alert" not in text


def test_a_page_of_what_there_is(tmp_path: Path) -> None:
    text, reader = read(write_page(tmp_path))
    assert "metrics.jsonl is missing" in reader.text
    assert "Nothing was logged for loss" in reader.text
    assert "id='spans'" not in text


def test_the_page_embeds_no_more_spans_than_it_may() -> None:
    lengths = {0: 9.0, 1: 1.0, 2: 3.0, 3: 2.0}
    spans = [
        Span(
            rank=rank,
            step=step,
            instruction=0,
            kind="forward",
            name="forward",
            lane="compute",
            start_s=step * 10.0,
            end_s=step * 10.0 + length,
        )
        for step, length in lengths.items()
        for rank in range(10)
    ]
    trace = Trace(spans=tuple(spans), ranks=tuple(range(10)))
    assert [one.step for one in embedded_steps(trace)] == [3, 0, 2, 1]
    assert [one.step for one in embedded_steps(trace, max_spans=25)] == [3, 0]
    assert [one.step for one in embedded_steps(trace, max_spans=5)] == [3]
