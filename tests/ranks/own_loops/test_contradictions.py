"""Loops of the user's own on tasks that are about to do different things: told once, before anything is captured."""

from pathlib import Path

import pytest
from tests.ranks.hosts.hosts import PLAIT, ROOT, ended, start_tasks

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import sys
from dataclasses import replace

import plait
from plait.errors import PlaitError
from tests.ranks import jobs

for plan, batch in (("ddp", "12"), sys.argv[1:]):
    try:
        step = plait.parallelize(replace(jobs.plain(), batch=int(batch)), plan)
    except PlaitError as error:
        print(type(error).__name__, error.what)
    else:
        print("agreed")
"""


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (("ddp", "12"), ("zero3", "12"), "task 1 on {host} has another plan than task 0: zero3"),
        (("ddp", "12"), ("ddp", "24"), "task 1 on {host} has another batch than task 0: 24, not 12."),
        (("hogwild", "12"), ("hogwild", "12"), "hogwild"),
    ],
)
def test_loops_that_differ(
    first: tuple[str, str], second: tuple[str, str], told: str, tmp_path: Path
) -> None:
    """After one that was agreed on."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    tasks = start_tasks([PLAIT[0], script], 2, ROOT, differing=(first, second))
    (code, said, complaint), (other_code, other, silent) = ended(tasks, timeout_s=120)
    assert (code, other_code) == (0, 0), complaint + silent
    own, others = said.splitlines(), other.splitlines()
    assert own[0] == others[0] == "agreed"
    assert own[1].startswith(("UsageError", "PlanError")) and told.partition("{")[0] in own[1], own
    assert told.partition("}")[2] in own[1]
    assert others[1].startswith("EchoError task 0 has told why"), others


ENDS = """
import sys
from dataclasses import replace

import plait
from tests.ranks import jobs

job = replace(jobs.plain(), batch=int(sys.argv[2]))
plait.train(job, "ddp", 2) if sys.argv[1] == "train" else plait.parallelize(job, "ddp")
"""


@pytest.mark.parametrize("call", ["train", "parallelize"])
def test_one_task_of_a_script_tells(call: str, tmp_path: Path) -> None:
    """The others end without a traceback of their own, and not as if all had gone well."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    tasks = start_tasks([PLAIT[0], script], 2, tmp_path, differing=((call, "12"), (call, "24")))
    (code, _, complaint), (other_code, other, silent) = ended(tasks, timeout_s=120)
    assert (code, other_code) == (1, 1)
    assert "has another batch than task 0: 24, not 12." in complaint
    assert other + silent == ""


WEIGHTS = """
import sys
from dataclasses import replace

import plait
import torch
from tests.ranks import jobs

job = jobs.plain()


def drawn():
    torch.manual_seed(int(sys.argv[1]))
    return job.model()


plait.parallelize(replace(job, model=drawn), "ddp")
"""


def test_one_task_tells_that_weights_differ(tmp_path: Path) -> None:
    """Which shows when all have met: facts of the jobs are the same."""
    script = tmp_path / "script.py"
    script.write_text(WEIGHTS)
    tasks = start_tasks([PLAIT[0], script], 2, ROOT, differing=(("1",), ("2",)))
    (code, _, complaint), (other_code, other, silent) = ended(tasks, timeout_s=120)
    assert (code, other_code) == (1, 1)
    assert "the initial weights of rank 1 and rank 0 differ." in complaint
    assert other + silent == ""
