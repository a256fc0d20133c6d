"""Pipelines on real processes: they compute what one process does, evaluate, move checkpoints to and from other plans,
and say which stage and which micro-batch were at work when a rank dies, hangs or fails."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from tests.zoo import ZOO

import plait
from plait.errors import HangError, JobError, RunError, WorkerError
from plait.job.job import Job
from plait.program.instructions import Compute
from plait.run.checkpoint.store import load_checkpoint
from plait.run.interpret.segments import Segments
from plait.run.interpret.step import Step
from plait.run.link import between, process_links
from plait.run.link.between import links_between
from plait.run.proof.reference import Reference, reference_of
from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]


@cache
def reference(name: str) -> Reference:
    """Two steps of 7 samples in 4 micro-batches, the last one smaller, in one process."""
    job = ZOO[name].job(batch=7, steps=2, num_samples=14, optimizer="adamw", clip_norm=0.5, accumulate=4)
    return reference_of(job, steps=2)


SHARED: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("gpt_dropout", "1f1b", {"pipe": 2}),
    ("gpt_dropout", "1f1b", {"pipe": 4}),
    ("gpt_tied", "zero-bubble", {"pipe": 2}),
    ("masked_gpt", "1f1b", {"pipe": 2, "data": 2}),
    ("gpt_dropout", "1f1b", {"pipe": 2, "tensor": 2}),
    ("unet", "interleaved", {"pipe": 2}),
)


THROUGH_SOCKETS = (SHARED[0], SHARED[3], SHARED[5])
"""Messages between two ranks, beside sums, and between several stages of two ranks: links know nothing of models."""


@pytest.mark.parametrize(
    ("name", "plan", "mesh", "share"),
    [*((*row, True) for row in SHARED), *((*row, False) for row in THROUGH_SOCKETS)],
)
def test_processes_compute_what_one_does(
    name: str, plan: str, mesh: dict[str, int], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "links_between", lambda *a, **k: links_between(*a, **k | {"share": share}))
    known = reference(name)
    found = verify(known.job, plan, mesh=mesh, against=known)
    assert found.ok, found.first
    assert not found.serial


def test_messages_need_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no tags; what skips to the second stage of a rank is sent long before it is needed there."""
    monkeypatch.setattr(between, "links_between", lambda *a, **k: links_between(*a, **k | {"share": False}))
    monkeypatch.setattr(process_links, "_tag", lambda message, flat: 0)
    known = reference("moe_capacity")
    found = verify(known.job, "interleaved", mesh={"pipe": 2}, against=known)
    assert found.ok, found.first
    assert not found.serial


def test_evaluation_takes_weights_and_buffers_from_the_stages_that_own_them(tmp_path: Path) -> None:
    """Batch norm's statistics are those of the stage that counts them; losses are those of one process."""
    job = replace(jobs.dropout(), accumulate=3)
    one = plait.train(job, "single", 1, out=tmp_path / "one")
    two = plait.train(job, "1f1b", 2, out=tmp_path / "two")
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.evaluation == pytest.approx(one.evaluation, rel=1e-5)
    assert two.weights.keys() == one.weights.keys()
    for name, tensor in two.weights.items():
        torch.testing.assert_close(tensor, one.weights[name], rtol=1e-4, atol=1e-4, msg=name)


# --- checkpoints --------------------------------------------------------------------------------------------

PAIRS: tuple[tuple[tuple[str, dict[str, int]], tuple[str, dict[str, int]]], ...] = (
    (("1f1b", {"pipe": 2}), ("zero3", {"data": 3})),
    (("ddp", {"data": 2}), ("zero-bubble", {"pipe": 3})),
)


def long_job() -> Job:
    return ZOO["gpt_tied"].job(
        batch=7, steps=4, num_samples=28, optimizer="adamw", clip_norm=0.5, accumulate=2
    )


@cache
def uninterrupted() -> tuple[float, ...]:
    return reference_of(long_job(), steps=4).record.losses


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_a_run_goes_on_under_another_plan(before: Any, after: Any, tmp_path: Path) -> None:
    job = long_job()
    options: dict[str, Any] = {"trial": plait.Trial(dtype="float64"), "saving": plait.Saving(trace=False)}
    first = plait.train(
        job, before[0], changes=plait.Changes(mesh=before[1]), steps=2, out=tmp_path / "run", **options
    )
    assert first.losses == pytest.approx(uninterrupted()[:2], rel=1e-9)
    state = load_checkpoint(tmp_path / "run")
    assert {name: tuple(t.shape) for name, t in state.parameters.items()} == {
        name: tuple(p.shape) for name, p in job.build_model().named_parameters()
    }
    then = plait.resume(
        tmp_path / "run",
        job=job,
        plan=after[0],
        changes=plait.Changes(mesh=after[1]),
        out=tmp_path / "run",
        **options,
    )
    assert then.losses == pytest.approx(uninterrupted()[2:], rel=1e-9)


# --- failures -----------------------------------------------------------------------------------------------


def at_stage_1(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Something happens in the backward of stage 1, micro-batch 1, of the third step."""
    exact = Segments._compute

    def compute(segments: Segments, now: Step, instruction: Compute) -> None:
        here = (now.number, instruction.stage, instruction.micro_batch, instruction.kind)
        if here == (2, 1, 1, "backward"):
            action()
        exact(segments, now, instruction)

    monkeypatch.setattr(Segments, "_compute", compute)


def gpt_job() -> Job:
    return ZOO["gpt"].job(batch=8, steps=6, accumulate=4)


WHERE = "of stage 1, micro-batch 1'"


def test_a_rank_that_is_killed_is_told_with_its_stage_and_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_stage_1(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        plait.train(gpt_job(), "1f1b", 2, out=tmp_path / "run")
    assert caught.value.rank == 1
    assert WHERE in str(caught.value)
    assert "step 3" in str(caught.value)


def test_an_exception_is_told_with_its_stage_and_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ArithmeticError("a kernel failed")

    at_stage_1(monkeypatch, fail)
    with pytest.raises(WorkerError, match="rank 1 of 2 failed") as caught:
        plait.train(gpt_job(), "zero-bubble", 2, out=tmp_path / "run")
    assert WHERE in str(caught.value)
    assert str(caught.value).rstrip().endswith("ArithmeticError: a kernel failed")


def _oversleep() -> None:
    time.sleep(100)


def test_a_hang_names_the_rank_that_all_others_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 waits for a message, stages 2 and 3 for the sum of the loss: nobody but stage 1 is missing."""
    at_stage_1(monkeypatch, _oversleep)
    with pytest.raises(HangError) as caught:
        plait.train(gpt_job(), "1f1b", 4, out=tmp_path / "run", limits=plait.Limits(hang_s=3))
    assert caught.value.missing == (1,)
    told = str(caught.value)
    assert WHERE in told
    assert "_oversleep" in told
    assert "rank 0: step 3, waiting in 'wait for backward 1>0 micro-batch 1 of stage 0'" in told


def test_samples_of_another_shape_are_told_before_a_rank_waits_in_vain(tmp_path: Path) -> None:
    """A micro-batch unlike the others of its step: every rank sees it, and the run ends with one error."""
    job = ZOO["mlp"].job(batch=8, steps=4, accumulate=4)
    data = [(torch.zeros(17), y) if 20 <= i < 22 else (x, y) for i, (x, y) in enumerate(job.data)]
    with pytest.raises(JobError) as caught:
        plait.train(replace(job, shuffle=False, data=data), "1f1b", 2, out=tmp_path / "run")
    told = str(caught.value)
    assert "a step has samples with tensors of [16], []; [17], [], unlike those before" in told


def test_a_batch_of_another_shape_is_told_with_its_micro_batch(tmp_path: Path) -> None:
    job = ZOO["mlp"].job(batch=8, steps=4, accumulate=4)
    data = [(torch.zeros(17), y) if 16 <= i < 24 else (x, y) for i, (x, y) in enumerate(job.data)]
    with pytest.raises(
        JobError, match=r"a step has samples with tensors of \[17\], \[\], unlike those before"
    ) as caught:
        plait.train(replace(job, shuffle=False, data=data), "1f1b", 2, out=tmp_path / "run")
    assert "[2, 17] X [16, 32]" in str(caught.value)


class Unequal:
    """Whichever rank comes first to the third step sees shorter texts in it than the other one."""

    def __init__(self, samples: Any, flag: Path) -> None:
        self.samples, self.flag, self.parent = samples, flag, os.getpid()
        self.is_short: bool | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index >= 16 and self.is_short is None and os.getpid() != self.parent:
            try:
                self.flag.touch(exist_ok=False)
                self.is_short = True
            except FileExistsError:
                self.is_short = False
        return tuple(tensor[:5] if self.is_short else tensor for tensor in self.samples[index])


def test_ranks_that_see_different_shapes_are_told_with_stages_and_micro_batch(tmp_path: Path) -> None:
    """Otherwise a rank would read a part of a message, or more than it."""
    job = gpt_job()
    job = replace(job, shuffle=False, data=Unequal(job.data, tmp_path / "flag"))
    with pytest.raises(RunError) as caught:
        plait.train(job, "1f1b", 2, out=tmp_path / "run")
    told = str(caught.value)
    assert re.match(
        r"rank 1 expects \d+ bytes of forward 0>1 micro-batch 0, rank 0 sent \d+: their batches", told
    )
