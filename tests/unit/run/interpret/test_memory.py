"""Memory of real tensors: what a rank holds under ZeRO is its share, and activations are what the program says."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.run.interpret.live_memory import Activations, Live, storages
from tests.zoo import ZOO
from torch import nn

from plait.graph.from_job import Captures
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.program.cost.memory import step_memory
from plait.program.instructions import Instruction
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.interpret.serial import Unobserved
from plait.run.prepare.programs import Programs
from plait.run.proof.serial_run import SerialRanks

CPU = torch.device("cpu")
WIDTH, LAYERS = 128, 96


def deep_job() -> Job:
    """Many equal layers: what is on its way at any time is small beside what is held."""
    generator = torch.Generator().manual_seed(1)
    data = list(torch.randn(64, 2, WIDTH, generator=generator).unbind())
    return Job(
        model=lambda: nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        ),
        data=[(x[0], x[1]) for x in data],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=8,
        steps=2,
        clip_norm=1.0,
    )


@cache
def deep_captures() -> Captures:
    """Its graphs, for all plans."""
    return Captures(deep_job())


class Run:
    """All ranks of a plan in this process, step by step."""

    def __init__(self, job: Job, plan: Plan, captures: Captures | None = None) -> None:
        source = captures.source if captures is not None else open_data(job.data, job.collate)
        programs = Programs(job, source, plan, CPU, torch.float32, captures)
        programs.full_step()
        self.ranks = SerialRanks(job, programs, torch.float32)
        self.machines = self.ranks.machines
        for machine in self.machines:
            machine.store.on_ready = None  # copies of gradients are no part of what is measured

    def step(self, number: int) -> Program:
        assert self.ranks.run(number)
        return self.machines[0]._at.program


class Held(Unobserved):
    """Looks after every instruction at all tensors that are parameters, gradients or optimizer state."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.peak = 0

    def hopped(self, step: int, hops: object) -> None:
        pass

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        state, store = self.machine.state, self.machine.store
        gathered = [v for k, v in self.machine._values.items() if k.kind in ("parameter", "chunk", "shard")]
        gradients: list[dict[Any, Any]] = [
            store._memory.views,
            store._kept,
            store._memory._spare,
            store._memory._borrowed,
            store._memory._flat,
        ]
        tables = [list(table.values()) for table in gradients]
        found = storages(
            [
                list(state.parameters.values()),
                gathered,
                tables,
                [list(s.values()) for s in state.optimizer.state.values()],
            ]
        )
        self.peak = max(self.peak, sum(found.values()))


@pytest.mark.parametrize(("stage", "ranks"), [(1, 4), (2, 4), (3, 2), (3, 4)])
def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(stage: int, ranks: int) -> None:
    plan = resolve(f"zero{stage}", ranks, {"sync": {"bucket_mib": 0.05}})
    run = Run(deep_captures().job, plan, deep_captures())
    run.step(0)
    ends = [run.machines[0], run.machines[-1]]  # those between them hold as much as the first
    watchers = [Held(machine) for machine in ends]
    for machine, watcher in zip(ends, watchers, strict=True):
        machine.observer = watcher
    run.step(1)
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    optimizer = 2 * whole
    wanted = {
        1: whole + whole + optimizer / ranks,
        2: whole + (whole + optimizer) / ranks,
        3: (whole + whole + optimizer) / ranks,
    }[stage]
    for watcher in watchers:
        assert wanted <= watcher.peak * 1.001
        assert watcher.peak <= 1.05 * wanted


@pytest.mark.parametrize("name", ["mlp", "alexnet", "resnet_bn", "gpt", "unet", "hf_bert"])
def test_complaint_02_activations_are_what_the_program_says(name: str) -> None:
    """An LSTM is not among them: the memory inside of its kernel is not in the program."""
    job = replace(ZOO[name].job(batch=64, steps=2), steps=2)
    run = Run(job, resolve("single", 1))
    run.step(0)
    machine = run.machines[0]
    live = Live([*machine.state.parameters.values(), *machine.state.buffers.values()])
    machine.observer = Activations(live, machine)
    with live:
        program = run.step(1)
    loaded = [
        value for name, value in program.of(0).values.items() if (name.kind, name.micro_batch) == ("batch", 0)
    ]
    seen = live.peak + sum(value.num_bytes for value in loaded)  # made by the loader, and alive all along
    assert step_memory(program).activations == pytest.approx(seen, rel=0.1)


@cache
def gpt_captures() -> Captures:
    return Captures(ZOO["gpt"].job(batch=64, steps=2))


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3", "megatron"])
def test_activations_of_a_rank_shrink_as_the_program_says(plan: str) -> None:
    """Every rank's own: the other ranks of the serial interpreter are left out."""
    captures = gpt_captures()
    whole = step_memory(Run(captures.job, resolve("single", 1), captures).step(0)).activations
    said = step_memory(Run(captures.job, resolve(plan, 2), captures).step(0)).activations
    if plan == "megatron":
        assert 0.5 * whole < said < whole
    else:
        assert said == pytest.approx(whole / 2, rel=0.15)
