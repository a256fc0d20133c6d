"""The step of threads: the first rank leads, and the checker sees to it."""

from dataclasses import replace

import pytest
import torch
from tests.unit.run.training import case_job

from plait.cluster.parse import parse_cluster
from plait.errors import PlanError, ProgramError
from plait.plan.named import resolve
from plait.plan.plan import DATA
from plait.program.check.soundness import check_program
from plait.program.instructions import Collective, Compute, Instruction, Update
from plait.program.program import Program
from plait.run.measure.predict import predict_job
from plait.run.prepare.prepare import prepare


@pytest.fixture(scope="module")
def program() -> Program:
    job = case_job("mlp", torch.float32, steps=2, batch=7, num_samples=14)
    return prepare(job, resolve("threads", 3), "cpu", torch.float32, lambda event: None).full_step()


def _phases(program: Program, rank: int) -> list[str]:
    """What a rank does, in its order, each once."""

    def phase(i: Instruction) -> str:
        return i.kind if isinstance(i, Compute) else i.name.removeprefix("wait for ").split()[0]

    found = map(phase, program.of(rank).instructions)
    wanted = ("replicate", "scatter", "forward", "gather", "backward", "reduce", "update")
    return [name for name in dict.fromkeys(found) if name in wanted]


def test_scatter_replicate_gather_and_reduce_are_instructions(program: Program) -> None:
    every = ["replicate", "scatter", "forward", "gather", "backward", "reduce"]
    assert _phases(program, 0) == [*every, "update"]
    assert _phases(program, 1) == _phases(program, 2) == every
    assert program.shares == ((3, 2, 2),) and len(program.classes) == 3 - 1
    given = [i for i in program.of(1).instructions if isinstance(i, Collective) and i.op == "broadcast"]
    assert sum(i.num_bytes for i in given) == 4 * sum(
        torch.Size(held.shape).numel() for held in program.layout.parameters.values()
    )


def test_a_second_update_and_a_missing_weight_are_refused(program: Program) -> None:
    check_program(program)
    root, other = program.classes
    update = next(i for i in root.instructions if isinstance(i, Update))
    twice = replace(other, instructions=(*other.instructions, replace(update, id=len(other.instructions))))
    with pytest.raises(ProgramError, match="updates 1 times"):
        check_program(replace(program, classes=(root, twice)))
    lacking = [replace(i, writes=i.writes[1:]) if i.name == "take 0" else i for i in other.instructions]
    with pytest.raises(ProgramError, match="which nobody gives it"):
        check_program(replace(program, classes=(root, replace(other, instructions=tuple(lacking)))))


def test_it_is_priced_above_ddp_and_on_one_host_only() -> None:
    job = case_job("mlp", torch.float32, steps=2, batch=8, num_samples=16)
    cluster = parse_cluster("2x4xA100")
    found = {name: predict_job(job, resolve(name, 4), cluster).prediction for name in ("threads", "ddp")}
    around_s = cluster.device.calibration.step_s
    assert found["threads"].step_s - around_s > 1.5 * (found["ddp"].step_s - around_s)
    weights = 4 * sum(p.numel() for p in job.build_model().parameters())
    assert found["threads"].sent_bytes[DATA] >= 3 * weights > found["ddp"].sent_bytes[DATA]
    with pytest.raises(PlanError, match="8 ranks in one process"):
        predict_job(job, resolve("threads", 8), parse_cluster("2x4xA100"))


def test_what_threads_cannot_be_combined_with_is_refused() -> None:
    with pytest.raises(PlanError, match="memory.zero=1 cuts them"):
        resolve("threads", 2, {"memory": {"zero": 1}})
    with pytest.raises(PlanError, match="meet in its memory"):
        resolve("threads", 2, {"links": {"transport": "sockets"}})
    with pytest.raises(PlanError, match="the axis tensor"):
        resolve("threads", None, None, {"data": 2, "tensor": 2})
