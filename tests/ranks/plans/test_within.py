"""Plans that cut tensors on real processes: they compute what one process does, move checkpoints between each other,
end cleanly when a rank dies, and are refused before any process starts where they cannot be had."""

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import jobs
from tests.zoo import ZOO
from torch import Tensor

import plait
from plait.errors import WorkerError
from plait.run.checkpoint.store import load_checkpoint
from plait.run.link import between
from plait.run.link.between import links_between
from plait.run.proof.reference import Reference, reference_of
from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]

SETTINGS = {"sync": {"bucket_mib": 0.01}}


@cache
def reference(name: str) -> Reference:
    """Two steps of 7 samples, in one process."""
    job = ZOO[name].job(batch=7, steps=2, num_samples=14, optimizer="adamw", clip_norm=0.5)
    return reference_of(job, steps=2)


SHARED: tuple[tuple[str, str, dict[str, int]], ...] = (
    *(("gpt_dropout", plan, {"data": ranks}) for plan in ("zero1", "zero2", "zero3") for ranks in (2, 3)),
    ("gpt_dropout", "megatron", {"tensor": 2}),
    ("masked_gpt", "megatron", {"data": 2, "tensor": 2}),
    ("gpt_tied", "zero3", {"data": 2, "tensor": 2}),
    ("unet", "domain", {"domain": 2}),
    ("gpt", "domain", {"data": 2, "domain": 2}),
)
THROUGH_SOCKETS = (SHARED[5], *SHARED[7:10])
"""Every collective on one axis and on two: links know nothing of models."""


@pytest.mark.parametrize(
    ("name", "plan", "mesh", "share"),
    [*((*row, True) for row in SHARED), *((*row, False) for row in THROUGH_SOCKETS)],
)
def test_processes_compute_what_one_does(
    name: str, plan: str, mesh: dict[str, int], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through shared memory and through sockets."""
    monkeypatch.setattr(between, "links_between", lambda *a, **k: links_between(*a, **k | {"share": share}))
    known = reference(name)
    found = verify(known.job, plan, mesh=mesh, settings=SETTINGS, against=known)
    assert found.ok, found.first
    assert not found.serial


def test_norms_and_dropout_on_pieces_of_the_sequence() -> None:
    known = reference("gpt_dropout")
    found = verify(
        known.job, "megatron", 2, settings=SETTINGS | {"tensor": {"sequence": True}}, against=known
    )
    assert found.ok, found.first


# --- checkpoints --------------------------------------------------------------------------------------------

PAIRS: tuple[tuple[tuple[str, dict[str, int]], tuple[str, dict[str, int]]], ...] = (
    (("zero3", {"data": 2}), ("megatron", {"tensor": 2})),
    (("megatron", {"tensor": 2}), ("zero1", {"data": 3})),
    (("zero3", {"data": 2, "tensor": 2}), ("single", {})),
    (("domain", {"domain": 2}), ("zero2", {"data": 2})),
)


@cache
def uninterrupted() -> tuple[float, ...]:
    job = ZOO["gpt_tied"].job(batch=7, steps=4, num_samples=28, optimizer="adamw", clip_norm=0.5)
    return reference_of(job, steps=4).record.losses


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_a_run_goes_on_under_another_plan(before: Any, after: Any, tmp_path: Path) -> None:
    job = ZOO["gpt_tied"].job(batch=7, steps=4, num_samples=28, optimizer="adamw", clip_norm=0.5)
    options: dict[str, Any] = {"trial": plait.Trial(dtype="float64"), "saving": plait.Saving(trace=False)}
    first = plait.train(
        job,
        before[0],
        changes=plait.Changes(mesh=before[1], settings=SETTINGS),
        steps=2,
        out=tmp_path / "run",
        **options,
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
        changes=plait.Changes(mesh=after[1], settings=SETTINGS),
        out=tmp_path / "run",
        **options,
    )
    assert then.losses == pytest.approx(uninterrupted()[2:], rel=1e-9)


# --- failures -----------------------------------------------------------------------------------------------


def test_a_rank_that_dies_in_the_middle_of_a_step_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed between two reductions of a step of zero3, while the others gather and sum."""

    def dying(mesh: Any, rank: int, *more: Any, **options: Any) -> Any:
        links = links_between(mesh, rank, *more, **options)
        exact, seen = links.start, iter(range(100))

        def start(collective: Any, tensor: Tensor, out: Tensor | None = None) -> Any:
            if rank == 1 and collective.op == "reduce_scatter" and next(seen) == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return exact(collective, tensor, out)

        monkeypatch.setattr(links, "start", start, raising=False)
        return links

    monkeypatch.setattr(between, "links_between", dying)
    job = ZOO["gpt"].job(batch=7, steps=20, num_samples=70)
    with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
        plait.train(job, "zero3", 3, changes=plait.Changes(settings=SETTINGS), out=tmp_path / "run")
    assert caught.value.rank == 1
    assert "SIGKILL" in (tmp_path / "run" / "failure.txt").read_text()


# --- bad input ----------------------------------------------------------------------------------------------


def placements(text: str) -> str:
    """A plan file with placements along `tensor`."""
    return f"plan: megatron\nmesh: {{data: 1, tensor: 2}}\nplacements: {{tensor: {text}}}\n"


REFUSED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "mesh and ranks": (
        "plain", ("--mesh", "data=2,tensor=2", "--ranks", "3"), ("has 4 ranks; 3 were asked for", "--ranks 4"),
    ),
    "unknown axis": ("plain", ("--mesh", "data=2,tensr=2"), ("mesh axis 'tensr'", "did you mean 'tensor'")),
    "size of an axis": ("plain", ("--mesh", "data=0"), ("data=0", "1 or more")),
    "too many for the batch": ("plain", ("--plan", "zero3", "--ranks", "17"), ("batch=16 is smaller than ranks=17",)),
    "no such stage": ("plain", ("--set", "memory.zero=4", "--ranks", "2"), ("memory.zero=4", "0, 1, 2 or 3")),
    "nothing to cut by weight": (
        "plain", ("--plan", "megatron", "--ranks", "7"), ("axis tensor=7: nothing can use it",),
    ),
    "nothing to cut by domain": (
        "plain", ("--plan", "domain", "--ranks", "2"), ("nothing of the batch can be cut", "data=2"),
    ),
    **{
        f"{plan} of an uncapturable model": (
            "raising_model", ("--plan", plan, "--ranks", "2"), (f"plan {plan} needs the inside of the model",),
        )
        for plan in ("megatron", "domain")
    },
    "placement of an unknown parameter": (
        "dropout", ("--plan", placements("{parameters: {nowhere.weight: S(0)}}")),
        ("no parameter is called 'nowhere.weight'", "0.weight"),
    ),
    "placement on a dim that is not there": (
        "dropout", ("--plan", placements("{parameters: {0.weight: S(2)}}")), ("0.weight has 2 dims", "below 2"),
    ),
    "placement on a dim that does not divide": (
        "dropout", ("--plan", placements("{parameters: {4.bias: S(0/4)}}")), ("4.bias", "does not divide"),
    ),
    "placement that is none": (
        "dropout", ("--plan", placements("{parameters: {0.weight: X}}")), ("X is not a placement", "S(dim)"),
    ),
    "op that is not there": (
        "dropout", ("--plan", placements('{ops: {"nowhere forward mm 0": "R R -> R"}}')), ("no op is called",),
    ),
    "op that cannot run so": (
        "dropout", ("--plan", placements('{ops: {"0 forward mm 1": "S(1) S(1) -> S(0)"}}')),
        ("cannot run as S(1) S(1) -> S(0)", "it can run as"),
    ),
}  # fmt: skip
"""Name -> (job, options, what is told)."""


@pytest.mark.parametrize("name", REFUSED)
def test_complaint_08_bad_input_is_told_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, options, told = REFUSED[name]
    if options[0] == "--plan" and options[1].startswith("plan:"):
        (tmp_path / "plan.yaml").write_text(options[1])
        options = ("--plan", str(tmp_path / "plan.yaml"), *options[2:])
    monkeypatch.setattr(
        "plait.run.parent.ranks.launch", lambda *_, **__: pytest.fail("a process was started")
    )
    assert jobs.cli("run", jobs.reference(job), *options, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert said.startswith(("PlanError: ", "JobError: ")), said
    assert "Fix: " in said
    assert "Traceback" not in said
    for words in told:
        assert words in said
    assert not (tmp_path / "run").exists()
