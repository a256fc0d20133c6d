"""One rule for memory before a program is compiled, and it agrees with what the program says, for any optimizer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import PlanError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.program.cost.memory import step_memory
from plait.program.cost.update import state_ratio, update_work
from plait.program.instructions import Collective
from plait.program.program import Program
from plait.run.prepare.programs import Programs
from plait.search.choose.subject import state_bytes
from plait.search.place.resolve import resolve_placements
from plait.search.predict.memory_rule import StateBytes, state_held

WIDTH, LAYERS = 256, 4
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Tensors of a parameter's size that each optimizer keeps."""


def job_of(optimizer: str, accumulate: int = 1) -> Job:
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    }
    return Job(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        data=[(torch.zeros(WIDTH), torch.zeros(WIDTH))] * 8,
        loss=nn.MSELoss(),
        optimizer=makers[optimizer],
        batch=8,
        steps=1,
        accumulate=accumulate,
    )


@cache
def captures() -> Captures:
    """The same graphs for every optimizer."""
    return Captures(job_of("sgd"))


def compiled(job: Job, name: str, mesh: Mapping[str, int], memory: Mapping[str, Any]) -> Program:
    plan = plait.resolve(name, None, {"memory": memory}, dict(mesh))
    programs = Programs(job, captures().source, plan, torch.device("cpu"), torch.float32, captures())
    return programs.for_sizes([(8 // job.accumulate // plan.data_ranks,) * plan.data_ranks] * job.accumulate)


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_sketch_and_the_program_hold_the_same_state(optimizer: str, zero: int) -> None:
    job = job_of(optimizer)
    program = compiled(job, "ddp", {"data": 4}, {"zero": zero})
    exact, update = step_memory(program), update_work(program, 0, job.build_optimizer)
    state = state_bytes(job, captures().of_size(8))
    assert state.optimizer / state.parameter == pytest.approx(STATES[optimizer], rel=0.01)
    sketched = LAYERS * (WIDTH + 1) * WIDTH * state.held(program.plan.shards)
    assert sketched == pytest.approx(exact.parameters + exact.gradients + update.state_bytes, rel=0.02)


@pytest.mark.parametrize("optimizer", STATES)
def test_placements_count_the_state_of_the_jobs_own_optimizer(optimizer: str) -> None:
    """`memory.limit` is searched with the state that there is: what SGD fits in is too little for the others."""
    job, graph = job_of(optimizer), captures().of_size(8)
    plan: Plan = plait.resolve("tensor", None, None, {"data": 1, "tensor": 2})
    assert state_ratio(graph, job.build_optimizer) == pytest.approx(STATES[optimizer], rel=0.01)
    half = LAYERS * WIDTH * WIDTH * 4 / 2
    limited = replace(plan, memory=replace(plan.memory, limit=f"{2.3 * half / 2**20:.3f}MiB"))
    if optimizer == "sgd":
        resolve_placements(graph, limited, job.build_optimizer)
    else:
        with pytest.raises(PlanError, match=r"memory\.limit"):
            resolve_placements(graph, limited, job.build_optimizer)


def test_stages_have_room_for_sgd_where_adam_has_none() -> None:
    """Of two layers a stage, SGD holds two tensors of each weight's size, AdamW four: there is room for three."""
    limit = {"limit": f"{3 * 2 * WIDTH * WIDTH * 4 / 2**20:.3f}MiB"}
    compiled(job_of("sgd", accumulate=2), "1f1b", {"pipe": 2}, limit)
    with pytest.raises(PlanError, match="no cut into 2 stages fits"):
        compiled(job_of("adamw", accumulate=2), "1f1b", {"pipe": 2}, limit)


def test_what_is_gathered_is_of_parameters_alone() -> None:
    """Sums of activations over `tensor` are no parameters that zero3 gathers, however many samples there are."""
    batch = 1024
    job = replace(job_of("sgd"), data=[(torch.zeros(WIDTH), torch.zeros(WIDTH))] * batch, batch=batch)
    plan = plait.resolve("megatron", None, {"memory": {"zero": 3}}, {"data": 2, "tensor": 2})
    own = Captures(job)
    plan, _ = resolve_placements(own.of_size(batch), plan, job.build_optimizer)
    programs = Programs(job, own.source, plan, torch.device("cpu"), torch.float32, own)
    program = programs.for_sizes([(batch // 2,) * 2])
    sums = [i for i in program.classes[0].instructions if isinstance(i, Collective) and i.axis == "tensor"]
    groups = [g.chunks * g.chunk_elements * g.dtype.itemsize for g in program.layout.groups]
    assert sums and step_memory(program).gathered == sum(groups)


def test_what_the_host_updates_is_not_fetched() -> None:
    plan = plait.resolve("single", 1, {"memory": {"offload": ["gradients:0.25", "optimizer:0.75"]}})
    held = state_held(1000.0, plan, StateBytes(), num_micro=2)
    assert (held.optimizer, held.moved) == (0.25 * 8000, 0.5 * 8000)
    assert (held.out, held.back, held.updated) == (0.25 * 4000, 0.25 * 4000, 250)
