"""What people see while a run goes on: lines for a log, a bar in a terminal, nothing when a program reads."""

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from plait.api.display import progress
from plait.api.display.progress import LastingConsole, show_progress
from plait.cli.console import plain_console


def step(number: int) -> dict[str, Any]:
    return {"metrics": {"step": number, "loss": 1.5, "samples_per_s": 1234.0, "memory_bytes": 2**30}}


def shown(events: list[dict[str, Any]], *, terminal: bool = False, quiet: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    with show_progress(console, quiet=quiet) as listener:
        for event in events:
            listener(event)
    return text.getvalue()


def test_lines_tell_the_first_and_the_last_step() -> None:
    events = [{"started": "runs/x", "total_steps": 50}, *(step(number) for number in range(50))]
    lines = shown(events).splitlines()
    assert lines[0].startswith("step 1/50  loss 1.5  1,234 samples/s  1.0 GiB")
    assert lines[0].endswith("left")
    assert lines[-1].startswith("step 50/50")
    assert "left" not in lines[-1]
    assert len(lines) < 10  # a fast run does not flood a log


def test_a_notebook_shows_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, str]] = []

    class Handle:
        def display(self, data: dict[str, str], raw: bool) -> None:
            written.append(("new", data["text/plain"]))

        def update(self, data: dict[str, str], raw: bool) -> None:
            written.append(("again", data["text/plain"]))

    notebook = ModuleType("IPython.display")
    monkeypatch.setattr(notebook, "DisplayHandle", Handle, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(progress, "LastingConsole", partial(Console, force_jupyter=True))
    with progress.shown(None, None) as listener:
        assert listener is not None  # a notebook is no terminal, but somebody looks
        for event in [{"started": "runs/x", "total_steps": 2}, step(0), step(1)]:
            listener(event)
    assert [(how, text[:8]) for how, text in written] == [("new", "step 1/2"), ("again", "step 2/2")]


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    lines = shown([{"started": "runs/x", "total_steps": 50, "start_step": 40}, step(40)]).splitlines()
    assert lines[0].startswith("step 41/50")


def test_a_stream_has_no_total() -> None:
    assert shown([{"started": "runs/x", "total_steps": None}, step(0)]).startswith("step 1  loss")


def test_notices_and_evaluations_are_told() -> None:
    events: list[dict[str, Any]] = [
        {"notices": ["running eagerly: x.py:3"], "compiled_s": 3.0},
        {"notice": "a slow disk"},
        {"metrics": {"step": 9, "epoch": 0, "evaluate": {"loss": 0.25, "accuracy": 0.5}}},
        {"stage": "one process, 3 steps"},
    ]
    assert shown(events).splitlines() == [
        "notice: running eagerly: x.py:3",
        "captured and compiled in 3 s",
        "notice: a slow disk",
        "evaluation after step 10: loss 0.25  accuracy 0.5",
        "one process, 3 steps",
    ]


RUN = {
    "model": "Net", "num_parameters": 12_400_000, "num_trainable": 12_400_000, "plan": "ddp", "ranks": 2,
    "mesh": {"data": 2}, "servers": 0, "device": "cpu", "batch": 64, "accumulate": 1, "total_steps": 48,
    "start_step": 0, "folder": "runs/x",
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_says_what_it_does(terminal: bool) -> None:
    text = shown([{"run": RUN}], terminal=terminal)
    assert "Net, 12.4M parameters; plan ddp, 2 ranks (data=2) on cpu\n" in text
    assert "batch 64, 48 steps; run folder runs/x\n" in text
    assert shown([{"run": RUN}], quiet=True) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_trainable": 400_000}, "12.4M parameters (12.0M frozen);"),
        ({"ranks": 1, "mesh": {"data": 1}, "plan": "single"}, "plan single, 1 rank on cpu"),
        ({"ranks": 3, "servers": 1}, "3 ranks (data=2, servers=1)"),
        ({"accumulate": 4}, "batch 64 in 4 micro-batches, 48 steps;"),
        ({"total_steps": None}, "batch 64, steps until the data ends;"),
        ({"total_steps": 1}, "batch 64, 1 step;"),
        ({"start_step": 10}, "batch 64, steps 11 to 48;"),
        ({"start_step": 48}, "batch 64, none of 48 steps left;"),
    ],
)
def test_a_run_says_what_is_special_about_it(changed: dict[str, Any], words: str) -> None:
    assert words in shown([{"run": RUN | changed}])


def test_a_terminal_gets_a_bar() -> None:
    text = shown(
        [{"started": "runs/x", "total_steps": 4}, *(step(number) for number in range(4))], terminal=True
    )
    assert "training" in text
    assert "4/4" in text
    assert "loss 1.5" in text


def test_quiet_says_nothing() -> None:
    assert shown([{"notice": "a slow disk"}, step(0)], quiet=True) == ""


def test_tasks_of_open_mpi_print_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a terminal of its own, also where what mpirun prints goes to a file."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert plain_console().is_terminal
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert not plain_console().is_terminal


def test_what_cannot_be_shown_is_done_all_the_same(tmp_path: Path) -> None:
    """A full disk, a reader that left (`| head`), a file that the user's code closed."""
    left, right = os.pipe()
    os.close(left)
    closed = (tmp_path / "closed").open("w")
    closed.close()
    for file in (os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), os.fdopen(right, "w"), closed):
        console = LastingConsole(file=file, markup=False)
        with show_progress(console, quiet=False) as listener:
            listener({"started": "runs/x", "total_steps": 2})
            listener(step(0))
            listener(step(1))
        assert console.quiet
        file.close()  # what was not written is nobody's any more


def test_signs_that_the_locale_lacks_do_not_end_a_command() -> None:
    code = "import plait.cli.main as m; m.call = lambda words: print('a \\u2192 b'); m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"a ? b\n"), done.stderr
