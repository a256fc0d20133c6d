"""Contradictions that one task can see by itself are told at once, by one task."""

import subprocess
import sys
from typing import NoReturn

import pytest
from tests.ranks.hosts.hosts import environment

from plait.cli.early import end_if_contradicted
from plait.errors import EchoError
from plait.run.start import party
from plait.run.start.tasks.follower import Follower

TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
}


def test_ranks_that_are_not_the_tasks_are_told_before_torch_is_imported() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv[:] = ['plait', 'run', 'job.py', '--plan', 'ddp', '--ranks', '4']\n"
        "import plait.cli.main\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**TORCHRUN), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "the plan has 4 ranks, but torchrun started 2 tasks, each of which is one rank." in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "code"),
    [
        ("run job.py --ranks=3", {}, 2),
        ("verify job.py --ranks 3", {"RANK": "1", "LOCAL_RANK": "1"}, 1),
        ("run job.py --ranks 3", {"RANK": "7"}, 2),
    ],
)
def test_one_task_tells(
    words: str, variables: dict[str, str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        end_if_contradicted(words.split(), TORCHRUN | variables)
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith("UsageError: ") == (code == 2)


SECOND = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_command_that_is_another_than_that_of_task_0_is_told_by_task_0(
    is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """mpirun can start one with other arguments; where task 0 has ended by its own, nothing is left to say."""
    told = []

    class Met(Follower):
        def __init__(self) -> None:
            self.has_begun = False

        def fail(self, error: BaseException) -> NoReturn:
            told.append(str(error))
            raise EchoError("told")

    monkeypatch.setattr(party, "_met", lambda: Met() if is_told else None)
    with pytest.raises(SystemExit) as ended:
        end_if_contradicted(["run", "job.py", "--ranks", "3"], SECOND)
    assert ended.value.code == 1 and capsys.readouterr().err == ""
    assert ["3 ranks, which 2 tasks of MPICH cannot share equally" in text for text in told] == [
        True
    ] * is_told


def test_tasks_of_several_hosts_meet_first() -> None:
    end_if_contradicted(["run", "job.py", "--ranks", "3"], TORCHRUN | {"LOCAL_WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    "words",
    [
        "",
        "run job.py",
        "run job.py --ranks 2",
        "run job.py --ranks 4 --elastic 2:4",
        "predict job.py --ranks 4",
    ],
)
def test_what_is_for_the_run_to_see_is_left_to_it(words: str) -> None:
    end_if_contradicted(words.split(), TORCHRUN)
