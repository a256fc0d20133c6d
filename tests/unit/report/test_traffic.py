"""What the report says of bytes, updates and staleness, in a terminal, on the page and as JSON."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from plait.report.page import write_page
from plait.report.record import read_run
from plait.report.summary import report_json
from plait.report.text import print_report
from plait.report.traffic import traffic_of

TOTALS = {
    "steps": 12, "workers": 2, "servers": 1, "updates": 24, "staleness": {"0": 6, "2": 2}, "gradient_bytes": 4096,
    "shares_by_worker": {"0": 18, "1": 6}, "bytes_sent": {"0": 12 * 2048, "1": 1024, "2": 12 * 3 * 2048},
}  # fmt: skip


def served(run_dir: Path) -> Path:
    (run_dir / "totals.json").write_text(json.dumps(TOTALS))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [line | ({} if "evaluate" in line else {"step_s": 0.5}) for line in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return run_dir


def printed(run_dir: Path) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_report(run_dir, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_it(run_dir: Path) -> None:
    text = printed(served(run_dir))
    for words in (
        "24 (4 a second)", "2.0 KiB a step and worker for gradients of 4.0 KiB", "6.0 KiB a step",
        "mean 0.5, at most 2 updates", "18 by 0, 6 by 1", "75.0%", "25.0%",
    ):  # fmt: skip
        assert words in text
    rows = [line.split()[:3] for line in text.splitlines() if line.strip().startswith(("0 ", "1 ", "2 "))]
    assert ["1", "0", "0.0%"] in rows, "no gap in the histogram"


def test_the_page_and_json_show_it(run_dir: Path) -> None:
    page = write_page(served(run_dir)).read_text()
    assert "What ranks exchanged" in page and "mean 0.5, at most 2 updates" in page
    assert "75.0% of the times 0 updates old" in page
    traffic = report_json(run_dir)["traffic"]
    assert traffic["staleness"] == {"0": 6, "2": 2} and traffic["bytes_per_step"] == 2048
    assert traffic["updates_per_s"] == pytest.approx(4.0)


def test_runs_without_totals_say_nothing_of_it(run_dir: Path) -> None:
    assert "updates" not in printed(run_dir) and "What ranks exchanged" not in write_page(run_dir).read_text()
    for text in ("{", "[]", json.dumps({"steps": 0, "bytes_sent": {"x": 1, "1": None}, "staleness": 3})):
        (run_dir / "totals.json").write_text(text)
        traffic = traffic_of(read_run(run_dir))
        assert traffic.bytes_per_step is None and not traffic.staleness


def test_what_was_compiled_and_how_long_it_took(run_dir: Path) -> None:
    compiled = {"segments": 4, "as_written": 1, "seconds": 12.5}
    totals = TOTALS | {"compiled": compiled}
    (run_dir / "totals.json").write_text(json.dumps(totals))
    assert "12.5 s, 4 segments (1 run as written)" in printed(run_dir)
    assert "Compilation" in write_page(run_dir).read_text()
    told = report_json(run_dir)["compiled"]
    assert told.items() >= compiled.items()
    assert told["first_step"] is None, "an older run, that compiled before its steps"
    (run_dir / "totals.json").write_text(json.dumps(TOTALS))
    assert "compilation" not in printed(run_dir) and report_json(run_dir)["compiled"] is None
