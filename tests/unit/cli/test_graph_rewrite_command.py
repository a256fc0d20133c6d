"""`plait graph --rewrite`: before and after as a table, as JSON and as a page, and the rules that were used."""

import json
from pathlib import Path

import pytest

from plait.cli.main import call

JOBS = """
from tests.unit.rewrite.models import Towers, Wide, job_of

def towers(): return job_of(Towers, 8, out=(8,))
def wide(): return job_of(Wide, 8, out=(8,))
"""
MERGED = "linear layers of one input merge"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "rewrite_jobs.py"
    path.write_text(JOBS)
    return str(path)


def test_before_and_after_are_shown(jobs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call(["graph", f"{jobs}:towers", "--rewrite", "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words[1:] for line in lines if (words := line.split())}
    assert rows["addmm"] == ["5", "2"]
    assert float(rows["predicted"][-1].removesuffix("x")) < 1 and "measured" in rows
    assert f"  {MERGED}" in lines
    assert not any("distribute" in line for line in lines)
    text = page.read_text()
    assert text.count("<iframe") == 2 and MERGED in text and "<td>  addmm</td><td>5</td><td>2</td>" in text


def test_rules_that_found_something_worse_are_not_told(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["graph", f"{jobs}:wide", "--rewrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"]["flops"] < found["before"]["flops"]
    assert found["rules"] and all("associate" in rule for rule in found["rules"])


def test_other_views_of_a_graph_are_refused(jobs: str) -> None:
    assert call(["graph", f"{jobs}:wide", "--rewrite", "--placements"]) == 2
