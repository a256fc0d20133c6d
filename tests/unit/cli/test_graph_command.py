"""`plait graph` on jobs of the zoo: the summary, the listing, the page, the refusal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli.main import call

Show = Callable[..., tuple[int, str, str]]

JOBS = """
from tests.zoo import ZOO

def gpt(): return ZOO["gpt_tied"].job()
def halves(): return ZOO["mlp"].job(batch=9, accumulate=2)
def forgetful(): return ZOO["unused_parameter"].job()
def branching(): return ZOO["branching"].job()
"""


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "zoo_jobs.py"
    path.write_text(JOBS)
    return str(path)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    monkeypatch.setenv("COLUMNS", "140")

    def shown(reference: str, *options: str) -> tuple[int, str, str]:
        code = call(["graph", reference, *options])
        told = capsys.readouterr()
        return code, told.out, told.err

    return shown


def test_the_summary_names_what_matters(jobs: str, show: Show) -> None:
    code, text, _ = show(f"{jobs}:gpt")
    assert code == 0
    for words in (
        "26.8k",
        "head.weight = tokens.weight",
        "FLOPs",
        "3.4 MFLOP forward",
        "kept for the backward",
    ):
        assert words in text
    assert "blocks.{0-1}.mlp  ×2" in text


def test_without_a_batch_the_jobs_micro_batch_is_captured(jobs: str, show: Show) -> None:
    assert "one step of 5 samples" in show(f"{jobs}:halves")[1]
    assert "one step of 3 samples" in show(f"{jobs}:halves", "--batch", "3")[1]


def test_unused_parameters_are_a_notice(jobs: str, show: Show) -> None:
    assert "does not depend on forgotten.weight, forgotten.bias" in show(f"{jobs}:forgetful")[1]


def test_json_is_all_of_standard_output(jobs: str, show: Show) -> None:
    code, text, _ = show(f"{jobs}:gpt", "--json")
    listing = json.loads(text)
    assert code == 0
    assert {op["phase"] for op in listing["ops"]} == {"forward", "backward", "update"}
    assert listing["summary"]["forward_flops"] == sum(
        op["flops"] for op in listing["ops"] if op["phase"] == "forward"
    )


def test_the_page_is_written_whole(jobs: str, tmp_path: Path, show: Show) -> None:
    page = tmp_path / "deep" / "graph.html"
    code, text, _ = show(f"{jobs}:gpt", "--html", str(page))
    assert code == 0
    assert "graph.html" in text.replace("\n", "")
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert [entry.name for entry in page.parent.iterdir()] == ["graph.html"]


def test_a_page_that_cannot_be_written_is_one_error(jobs: str, tmp_path: Path, show: Show) -> None:
    code, _, told = show(f"{jobs}:gpt", "--html", str(tmp_path))
    assert code == 2 and "cannot be written" in told


def test_a_model_that_cannot_be_captured_exits_1_with_the_line(jobs: str, show: Show) -> None:
    code, text, _ = show(f"{jobs}:branching")
    assert code == 1
    assert "zoo.py:" in text
    assert "Fix:" in text
    code, text, told = show(f"{jobs}:branching", "--json")
    assert code == 1
    assert "zoo.py:" in json.loads(text)["where"] and "Fix:" in told


def test_a_batch_of_nothing_is_bad_usage(jobs: str, show: Show) -> None:
    code, _, told = show(f"{jobs}:gpt", "--batch", "0")
    assert code == 2 and "--batch 0" in told
