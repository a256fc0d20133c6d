"""Recompute on real processes: every rank saves the bytes and adds the FLOPs that the run said before it began."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.run.interpret.live_memory import Activations, Live
from tests.zoo import GPT, ZOO, Block
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import plait
from plait.job.data.share import Share
from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.prepare.prepare import effect_of_recompute, prepare

pytestmark = pytest.mark.timeout(120)


class DeepGPT(GPT):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(0.0) for _ in range(4)))


def deep_job(micro_batches: int) -> Job:
    return ZOO["gpt"].job(model=DeepGPT, batch=32, steps=2, accumulate=micro_batches)


def watch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Every rank writes down what its second step kept alive and computed."""
    exact = Machine.execute

    def execute(machine: Machine, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        state, buckets = machine.state, machine.store._memory._flat.values()
        live = Live([*state.parameters.values(), *state.buffers.values(), *buckets])
        observer, machine.observer = machine.observer, Activations(live, machine)
        with FlopCounterMode(display=False) as counter, live:
            yield from exact(machine, program, step, shares)
        machine.observer = observer
        found = {"bytes": live.peak, "flops": counter.get_total_flops()}
        (folder / f"rank{machine.rank}.json").write_text(json.dumps(found))

    monkeypatch.setattr(Machine, "execute", execute)


def measured(job: Job, plan: str, recompute: str, folder: Path) -> tuple[list[dict[str, int]], list[str]]:
    """(what each rank saw, what was said before)."""
    said: list[str] = []
    plait.train(
        job,
        plan,
        2,
        changes=plait.Changes(settings={"memory": {"recompute": recompute}}),
        out=folder / recompute,
        saving=plait.Saving(trace=False),
        watching=plait.Watching(listener=lambda event: said.extend(event.get("notices", ()))),
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], said


@pytest.mark.parametrize(("plan", "micro_batches"), [("ddp", 1), ("1f1b", 4)])
def test_ranks_save_and_add_what_was_said(
    plan: str, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's counter knows no FLOPs of attention on the CPU: they are about 6 % here."""
    job = deep_job(micro_batches)
    programs = prepare(
        job, resolve(plan, 2, {"memory": {"recompute": "full"}}), "cpu", torch.float32, lambda event: None
    )
    sizes: Any = [(16, 16)] if plan == "ddp" else [(8,)] * 4
    effect = effect_of_recompute(programs.for_sizes(sizes), programs)
    assert effect is not None
    watch(monkeypatch, tmp_path)
    none, _ = measured(job, plan, "none", tmp_path)
    full, said = measured(job, plan, "full", tmp_path)
    assert f"recompute full: {effect}." in said
    for rank in range(2):
        saved = none[rank]["bytes"] - full[rank]["bytes"]
        assert effect.saved_bytes[rank] == pytest.approx(saved, rel=0.1)
        assert effect.added_flops[rank] == pytest.approx(full[rank]["flops"] - none[rank]["flops"], rel=0.1)
        assert saved > 0.1 * none[rank]["bytes"]
