"""A job is found by file or module, and what goes wrong is said with the user's own file and line."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.errors import JobError, UsageError
from plait.job import Job, load_job

JOB = """
import torch
from torch import nn
from plait.job import Job

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

def job(batch=4):
    return Job(model=Net, data=torch.zeros(4, 2), objective=lambda m, b: m(b).mean(),
               optimizer=torch.optim.SGD, batch=batch)

def other():
    return job(batch=3)

def nothing():
    return None

ready = job(batch=2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, text: str = JOB) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_file_with_and_without_a_function(folder: Path) -> None:
    path = write(folder, "some_job.py")
    assert load_job(path).batch == 4
    assert load_job(f"{path}:other").batch == 3
    assert load_job(f"{path}:ready").batch == 2


def test_a_relative_file_and_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "some_job.py")
    write(folder, "some_package/__init__.py", "")
    write(folder, "some_package/inner.py")
    monkeypatch.chdir(folder)
    assert load_job("some_job.py:other").batch == 3
    assert load_job("some_job:other").batch == 3
    assert load_job("some_package.inner").batch == 4


def test_classes_of_the_file_can_be_found_by_name(folder: Path) -> None:
    job = load_job(write(folder, "some_job.py"))
    model = job.build_model()
    assert type(model).__module__ == "some_job"
    assert isinstance(pickle.loads(pickle.dumps(model)), type(model))


def test_a_file_named_like_another_module_does_not_hide_it(folder: Path) -> None:
    import json

    assert load_job(write(folder, "json.py")).batch == 4
    assert sys.modules["json"] is json


def test_neighbours_of_the_file_can_be_imported_now_and_later(folder: Path) -> None:
    write(folder, "its_neighbour.py", "BATCH = 7")
    write(folder, "its_second_neighbour.py", "ROWS = 5")
    text = JOB + "\nimport its_neighbour\n\ndef near():\n    return job(its_neighbour.BATCH)\n"
    text = text.replace("data=torch.zeros(4, 2)", "data=rows").replace("ready = job(batch=2)", "")
    text += "\ndef rows():\n    import its_second_neighbour\n    return torch.zeros(its_second_neighbour.ROWS, 2)\n"
    job = load_job(write(folder, "some_job.py", text) + ":near")
    assert job.batch == 7
    assert len(job.data()) == 5


def test_an_edited_file_is_read_again(folder: Path) -> None:
    path = write(folder, "some_job.py")
    load_job(path)
    write(folder, "some_job.py", JOB.replace("batch=4", "batch=44"))
    assert load_job(path).batch == 44


def test_a_missing_file_lists_its_neighbours(folder: Path) -> None:
    write(folder, "train.py")
    with pytest.raises(UsageError, match=r"there is no file .*trian.py; .* has train.py") as caught:
        load_job(str(folder / "trian.py"))
    assert caught.value.fix
    with pytest.raises(UsageError, match="there is no file"):
        load_job(str(folder / "no" / "such.py"))


def test_a_missing_module_or_function_says_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder, "some_job.py")
    with pytest.raises(UsageError, match="no function 'jbo'; it has job, other, nothing, ready") as caught:
        load_job(f"{path}:jbo")
    assert caught.value.fix == f"did you mean 'job'? write {path}:FUNCTION with one that returns a plait.Job."
    with pytest.raises(UsageError, match="it has no functions"):
        load_job(write(folder, "bare.py", "x = 1"))
    with pytest.raises(UsageError, match="there is no module no_such_module"):
        load_job("no_such_module:job")
    with pytest.raises(UsageError, match=r"there is no module no_such\.module"):
        load_job("no_such.module:job")


@pytest.mark.parametrize("reference", ["", ":job", "file.py:", "file.py:not a name"])
def test_what_names_nothing_is_bad_usage(reference: str) -> None:
    with pytest.raises(UsageError, match="names no job") as caught:
        load_job(reference)
    assert caught.value.fix


def test_a_function_that_returns_no_job_is_refused(folder: Path) -> None:
    with pytest.raises(JobError, match=r"nothing returned None, not a plait\.Job"):
        load_job(write(folder, "some_job.py") + ":nothing")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import torch\nx = 1 / 0\n", 2, "ZeroDivisionError"),
        ("def job():\n    y = 1\n    return undefined_name\n", 3, "NameError"),
        ("def job(:\n", 1, "SyntaxError"),
        ("import no_such_package_at_all\n", 1, "ModuleNotFoundError"),
        ("import torch\n\n\ndef job():\n    return torch.zeros(2) @ torch.zeros(3)\n", 5, "RuntimeError"),
        ("import sys\nsys.exit('bye')\n", 2, "SystemExit: bye"),
        ("import json\njson.loads('no')\n", 2, "JSONDecodeError"),
    ],
)
def test_a_failure_in_the_file_is_reported_with_its_line(
    folder: Path, text: str, line: int, words: str
) -> None:
    path = write(folder, "failing_job.py", text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert f"{path}:{line}: {words}" in caught.value.what
    assert caught.value.__cause__ is not None
    assert ("--arg" in (caught.value.fix or "")) == ("def job():" in text), (
        "what is imported takes no arguments"
    )
    # A module that failed while it was imported does not stay.
    assert ("failing_job" in sys.modules) == ("def job():" in text)


def test_an_error_of_the_job_itself_passes_unchanged(folder: Path) -> None:
    path = write(folder, "some_job.py", JOB.replace("batch=batch", "batch=0"))
    with pytest.raises(JobError, match="batch is 0"):
        load_job(path)


def test_a_function_with_required_arguments_is_reported(folder: Path) -> None:
    text = JOB + "\ndef needs(size):\n    return job(size)\n"
    with pytest.raises(UsageError, match="needs size"):
        load_job(write(folder, "some_job.py", text) + ":needs")


def test_the_result_is_a_job(folder: Path) -> None:
    assert isinstance(load_job(write(folder, "some_job.py")), Job)


ARGUMENTS = """
from typing import Literal
import torch
from torch import nn
from plait.job import Job
seen = []

def job(lr: float, width=64, *, kind: Literal["sgd", "adam"] = "sgd", deep: bool | None = None, tag="x"):
    seen.append((lr, width, kind, deep, tag))
    return Job(model=lambda: nn.Linear(2, width), data=torch.zeros(4, 2), objective=lambda m, b: m(b).mean(),
               optimizer=torch.optim.SGD, batch=4)

ready = job(0.1)
"""


def test_arguments_are_read_as_the_parameters_own_types(folder: Path) -> None:
    path = write(folder, "argued_job.py", ARGUMENTS)
    load_job(path, {"lr": "3", "width": "16", "kind": "adam", "deep": "true", "tag": "7"})
    assert sys.modules["argued_job"].seen[-1] == (3.0, 16, "adam", True, "7")
    load_job(path, {"lr": 1, "deep": "none"})
    assert sys.modules["argued_job"].seen[-1] == (1.0, 64, "sgd", None, "x")
    assert type(sys.modules["argued_job"].seen[-1][0]) is float


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, r"needs lr.*--arg lr=VALUE"),
        ({"lr": "1", "depth": "2"}, r"--arg depth: .*width=64.* has no such parameter.*use lr, width, kind"),
        ({"lr": "fast"}, r"--arg lr: .* takes float, not 'fast'"),
        ({"lr": "1", "width": "1.5"}, r"--arg width: .* takes int, not '1.5'"),
        ({"lr": "1", "kind": "lion"}, r"takes 'sgd' or 'adam', not 'lion'"),
    ],
)
def test_wrong_arguments_are_told_with_the_functions_parameters(
    folder: Path, args: dict[str, str], told: str
) -> None:
    path = write(folder, "argued_job.py", ARGUMENTS)
    with pytest.raises(UsageError, match=f"(?s){told}"):
        load_job(path, args)


def test_a_job_that_is_made_takes_no_arguments(folder: Path) -> None:
    path = write(folder, "argued_job.py", ARGUMENTS)
    with pytest.raises(UsageError, match="takes no arguments"):
        load_job(f"{path}:ready", {"lr": 1})


def test_a_folder_is_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "several_jobs").mkdir()
    write(folder, "several_jobs/first.py")
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="several_jobs is a folder; several_jobs has first.py"):
        load_job("several_jobs")
    write(folder, "one_job/__init__.py")
    assert load_job("one_job").batch == 4, "a package may have a job"


def test_a_coroutine_is_no_job(folder: Path) -> None:
    """Python's own warning that nobody awaited it would be an error here."""
    with pytest.raises(JobError, match="returned a coroutine"):
        load_job(write(folder, "awaited.py", "async def job():\n    pass\n"))
