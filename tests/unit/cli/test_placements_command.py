"""`plait graph --placements` on jobs of the zoo: tables, JSON, page, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import call

JOBS = """
from tests.zoo import ZOO

def mlp(): return ZOO["mlp"].job(batch=8)
def gpt(): return ZOO["gpt_tied"].job(batch=8, accumulate=2)
def branching(): return ZOO["branching"].job()
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "zoo_jobs.py"
    path.write_text(JOBS)
    return str(path)


def test_the_tables_say_what_is_where_and_what_is_sent(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:gpt", "--placements", "--mesh", "data=2,tensor=2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "plan megatron on data=2 x tensor=2: a step of 4 samples each in 2 micro-batches",
        "chosen  tensor=2: placements by pattern",
        "blocks.*.attention.qkv.weight  ×2",
        "S(0/3)",
        "P S(1) S(0) -> P",
        "blocks.*.mlp.2 forward view 2",
        "positions forward embedding",
        "whole on every rank",
        "gradients of 28 parameters",
        "need no communication",
        "No fallbacks",
    ):
        assert words in text
    assert re.search(r"\bzoo\.py:\d+ *$", text, re.MULTILINE)  # whole, at the end of its line
    assert not re.search(r"\bzoo\.py:? *$", text, re.MULTILINE), text


def test_json_has_all_of_it(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:mlp", "--placements", "--plan", "megatron", "--ranks", "2", "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert content["plan"] == "megatron"
    assert content["axes"] == [["tensor", 2]]
    assert {entry["name"]: entry["placements"] for entry in content["parameters"]}["0.weight"] == ["S(0)"]
    assert {entry["key"] for entry in content["ops"]} >= {"0 forward addmm 1", "backward nll_loss_backward 1"}
    assert content["notices"] and content["transfers"] and content["totals"]
    assert content["fallbacks"] == []


def test_settings_reach_the_job_and_the_plan(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "batch=6", "--set", "memory.zero=2"]
    assert call(["graph", f"{jobs}:mlp", "--placements", "--plan", "ddp", "--ranks", "2", *settings]) == 0
    text = capsys.readouterr().out
    assert "a step of 6 samples" in text
    assert "optimizer state and gradients cut over data" in text


def test_the_page_is_whole_and_escaped(jobs: str, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "placements.html"
    options = ["--placements", "--plan", "megatron", "--ranks", "2", "--html", str(page)]
    assert call(["graph", f"{jobs}:gpt", *options]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    assert '<td class="cut">S(0/3)</td>' in text
    assert "P S(1) S(0) -&gt; P" in text
    assert "blocks.*.mlp.2.weight" in text


def test_one_rank_has_nothing_to_place(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:mlp", "--placements", "--plan", "single"]) == 0
    assert "One rank holds and computes everything." in capsys.readouterr().out


def test_a_plan_without_placements_is_bad_usage(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:mlp", "--plan", "ddp"]) == 2
    assert "add --placements" in capsys.readouterr().err


def test_an_axis_that_nothing_can_use_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:mlp", "--placements", "--mesh", "tensor=3"]) == 2
    error = capsys.readouterr().err
    assert "3 does not divide 32" in error
    assert "Fix:" in error


def test_a_model_that_cannot_be_captured_exits_1(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:branching", "--placements", "--plan", "ddp", "--ranks", "2"]) == 1
    assert "zoo.py:" in capsys.readouterr().out


def test_a_pipeline_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:mlp", "--placements", "--plan", "1f1b", "--ranks", "2"]) == 2
    assert "pipe=2 cuts between them" in capsys.readouterr().err
