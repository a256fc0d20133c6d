"""`plait graph` on jobs of the zoo: the summary, the listing, the page, the refusal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from plait.cli.graph_command import graph_command
from plait.errors import UsageError

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


def show(
    reference: str, *, batch: int | None = None, json_output: bool = False, html: Path | None = None
) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=140)
    code = graph_command(reference, batch=batch, json_output=json_output, html=html, console=console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_the_summary_names_what_matters(jobs: str) -> None:
    code, text = show(f"{jobs}:gpt")
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


def test_without_a_batch_the_jobs_micro_batch_is_captured(jobs: str) -> None:
    assert "one step of 5 samples" in show(f"{jobs}:halves")[1]
    assert "one step of 3 samples" in show(f"{jobs}:halves", batch=3)[1]


def test_unused_parameters_are_a_notice(jobs: str) -> None:
    assert "does not depend on forgotten.weight, forgotten.bias" in show(f"{jobs}:forgetful")[1]


def test_json_is_all_of_standard_output(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = show(f"{jobs}:gpt", json_output=True)
    listing = json.loads(capsys.readouterr().out)
    assert (code, text) == (0, "")
    assert {op["phase"] for op in listing["ops"]} == {"forward", "backward", "update"}
    assert listing["summary"]["forward_flops"] == sum(
        op["flops"] for op in listing["ops"] if op["phase"] == "forward"
    )


def test_the_page_is_written_whole(jobs: str, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "graph.html"
    code, text = show(f"{jobs}:gpt", html=page)
    assert code == 0
    assert "graph.html" in text.replace("\n", "")
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert [entry.name for entry in page.parent.iterdir()] == ["graph.html"]


def test_a_page_that_cannot_be_written_is_one_error(jobs: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        show(f"{jobs}:gpt", html=tmp_path)


def test_a_model_that_cannot_be_captured_exits_1_with_the_line(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = show(f"{jobs}:branching")
    assert code == 1
    assert "zoo.py:" in text
    assert "Fix:" in text
    code, _ = show(f"{jobs}:branching", json_output=True)
    assert code == 1
    assert "zoo.py:" in json.loads(capsys.readouterr().out)["where"]


def test_a_batch_of_nothing_is_bad_usage(jobs: str) -> None:
    with pytest.raises(UsageError, match="--batch 0"):
        show(f"{jobs}:gpt", batch=0)
