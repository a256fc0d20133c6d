"""Tables fit a terminal of 80 columns, their headers whole, however long names and large numbers are."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import plait
from plait.cli.links_command import links
from plait.cli.look_back import compare
from plait.cli.verify_command import print_verification
from plait.cli.views.plan import ranking_view
from plait.plan.named import resolve
from plait.report.breakdown import RankBreakdown
from plait.report.compare import Compared, Comparison
from plait.report.text import breakdown_table
from plait.run.measure.links.link_times import SIZES, LinkReport, LinkTime

LONG = "transformer.blocks.11.attention.projection.weight"


def shown(print_on: Any) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_on(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def check(text: str, *headers: str) -> None:
    assert "…" not in text, text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    words = re.findall(r"\S+", text)
    assert not [word for header in headers for word in header.split() if word not in words], text


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = Compared(
        name="runs/a_job_with_a_long_name-20261116-110558", is_predicted=False, plan="zero-bubble-2", ranks=1024,
        batch=16384, step_s=0.1234, samples_per_s=1234567.0, memory_bytes=75.4 * 2**30, num_steps=123456,
        final_loss=0.01234,
    )  # fmt: skip
    monkeypatch.setattr(plait, "compare", lambda *folders: Comparison(rows=(row, row)))
    monkeypatch.setenv("COLUMNS", "80")
    compare([])
    text = capsys.readouterr().out
    check(text, "run", "plan", "ranks", "batch", "steps", "step", "samples/s", "speed", "memory", "loss")
    assert "75.4 GiB" in text and "1,234,567" in text


def test_where_a_step_goes() -> None:
    parts = dict.fromkeys(
        ("data_s", "forward_s", "backward_s", "exposed_communication_s", "update_s", "other_s", "idle_s"),
        0.0123,
    )
    one = RankBreakdown(
        rank=127, num_steps=11, step_s=0.1, hidden_communication_s=0.000175, background_s=0.0,
        communicated_bytes=11 * 123456789, **parts,
    )  # fmt: skip
    text = shown(lambda console: console.print(breakdown_table([one], source="measured")))
    check(text, "rank step data forward backward exposed update other idle hidden sent")
    assert "other: evaluation, checkpoints, host work" in " ".join(text.split())


@pytest.mark.parametrize(
    ("deviation", "said"),
    [
        (None, "the plan computes what one process computes, which is what your own"),
        ("it averages", "all ranks of the plan"),
    ],
)
def test_verify(deviation: str | None, said: str) -> None:
    differs = SimpleNamespace(
        kind="gradient", name=f"{LONG} at step 3", largest=1.2e-13, tolerance=1e-9, ok=True
    )
    outcome: Any = SimpleNamespace(
        plan=resolve("zero3", 8), serial=True, steps=3, dtype="float64", eager=[differs], differences=[differs],
        ok=True, notices=(), eager_first=None, draws=(), draws_first=None, first=None, reason=None,
        deviation=deviation,
    )  # fmt: skip
    text = shown(lambda console: print_verification(outcome, console, json_output=False))
    check(text.partition("equal: ")[0], "sides", "what", "difference", "tolerance", "where")
    assert said in " ".join(text.split())


def test_plan() -> None:
    found = SimpleNamespace(
        plan=resolve("1f1b", None, {"memory": {"zero": 1}}, {"pipe": 8, "data": 16, "tensor": 8}),
        num_micro_batches=1024, micro_batch=16, step_s=0.1234, samples_per_s=12345.0, utilization=0.521,
        memory=SimpleNamespace(total=75.4 * 2**30), sent_bytes={"data": 123.4 * 2**30}, cost_per_step=1.2345,
    )  # fmt: skip
    ranking: Any = SimpleNamespace(
        predictions=(found, found), rejected=(), relaxed=(), num_candidates=1234, num_predicted=567, seconds=12.3,
        notices=(),
    )  # fmt: skip
    text = shown(
        lambda console: console.print(ranking_view("gpt3-175b  batch 1536 on 128x8xA100", ranking, 8e10))
    )
    check(text, "plan", "micro", "step", "samples/s", "MFU", "memory", "sent", "cost/1k")


def test_links(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = tuple(
        LinkTime(
            operation="reduce_scatter", algorithm=name, ranks=16, num_bytes=size, seconds=0.1234 + size * 1e-9
        )
        for name in ("gloo", "recursive_halving")
        for size in SIZES
    )
    monkeypatch.setattr(plait, "links", lambda *ranks, **options: LinkReport(times=times, tried=()))
    monkeypatch.setenv("COLUMNS", "80")
    links()
    text = capsys.readouterr().out
    check(text, "algorithm", "1.0KiB", "32.0KiB", "256KiB", "1.0MiB", "8.0MiB", "latency", "GB/s")
    assert "reduce_scatter, 16 ranks" in text and "recursive_halving" in text
