"""What a terminal shows of a run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from plait.report.text import print_report
from plait.report.timeline import timeline, typical_step
from plait.trace import Span, Trace, read_trace, write_trace


def shown(folder: Path, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(folder, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_tells_the_run(run_dir: Path) -> None:
    text = shown(run_dir)
    for words in ("ddp", "2 → 0.16667", "1,007 samples/s", "12.0 KiB at most", "best 0.9 (step 8), last 0.8"):
        assert words in text
    for words in ("torch 2.13.0", "exposed", "hidden", "Evaluation", "2.0 KiB", "mean of 11 steps"):
        assert words in text
    assert "note:" not in text


def test_no_line_is_wider_than_the_terminal(run_dir: Path) -> None:
    inside = [line for line in shown(run_dir, 80).splitlines() if not line.startswith("Run ")]
    assert max(len(line.rstrip()) for line in inside) <= 80
    assert "…" not in shown(run_dir, 80)


def test_missing_files_are_named_and_the_rest_is_shown(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    text = shown(run_dir)
    assert "note: metrics.jsonl is missing" in text
    assert "Where a step goes" in text


def test_an_empty_folder_prints_notes_only(tmp_path: Path) -> None:
    text = shown(tmp_path)
    assert text.count("note:") == 4
    assert "Where a step goes" not in text


def test_strings_are_not_markup(run_dir: Path) -> None:
    (run_dir / "plan.yaml").write_text("name: '[red]mine[/red]'\n")
    assert "[red]mine[/red]" in shown(run_dir)


def test_the_timeline_shows_overlap(run_dir: Path) -> None:
    trace = read_trace(run_dir)
    drawn = timeline(trace, step=5, num_cells=19)  # 9.5 ms: half a millisecond a cell
    compute, communication = (row.cells for row in drawn.rows if row.rank == 0)
    assert compute == ("data", *["forward"] * 6, *["backward"] * 8, *["wait"] * 2, *["update"] * 2)
    assert communication == (*[None] * 11, *["communication"] * 6, *[None] * 2)
    assert drawn.duration_s == pytest.approx(9.5e-3)


def test_a_timeline_row_reads_from_left_to_right(run_dir: Path) -> None:
    row = next(line for line in shown(run_dir).splitlines() if line.startswith("rank 0 compute"))
    order = [row.index(glyph) for glyph in "▄█▓░▀"]
    assert order == sorted(order)


def test_the_typical_step_is_the_median_and_never_the_warm_up() -> None:
    lengths = {0: 90.0, 1: 1.0, 2: 3.0, 3: 2.0}
    spans = tuple(
        Span(
            rank=0,
            step=step,
            instruction=0,
            kind="forward",
            name="forward",
            lane="compute",
            start_s=step * 100.0,
            end_s=step * 100.0 + length,
        )
        for step, length in lengths.items()
    )
    assert typical_step(Trace(spans=spans, ranks=(0,))) == 3
    assert typical_step(Trace(spans=(), ranks=(0,))) is None


def test_many_ranks_are_cut_and_it_is_said(tmp_path: Path) -> None:
    spans = tuple(
        Span(
            rank=rank, step=0, instruction=0, kind="forward", name="f", lane="compute", start_s=0.0, end_s=1.0
        )
        for rank in range(12)
    )
    write_trace(Trace(spans=spans, ranks=tuple(range(12))), tmp_path)
    text = shown(tmp_path)
    assert "4 more ranks" in text
    assert "rank 8 compute" not in text
