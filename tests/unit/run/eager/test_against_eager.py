"""What plait computes is what a plain PyTorch loop on the user's own module computes, or the user is told."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ordinary import CASES, STEPS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from plait.callbacks import Watching
from plait.errors import CaptureError, JobError
from plait.graph.capture import capture as capturing
from plait.graph.from_job import Captures
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.options import Limits
from plait.plan.named import resolve
from plait.run.proof.serial_run import Record, run_serially
from plait.run.train import train
from plait.run.verify import verify

Plain = tuple[list[float], list[dict[str, Tensor]], nn.Module]


def plain_loop(job: Job) -> Plain:
    """Losses, gradients by step, and the trained module, as one would write it by hand."""
    model = job.build_model()
    model = copy.deepcopy(model) if model is job.model else model
    model.train()
    optimizer = job.build_optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    source = open_data(job.data, job.collate)
    order = job.order(source.num_samples)
    assert order is not None
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        batch: Any = source.fetch(order.at(step).ids)
        optimizer.zero_grad()
        result = job.objective_of(model, batch)
        loss = result if isinstance(result, Tensor) else result[0] / result[1]
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, gradients, model


def difference(job: Job, plain: Plain, record: Record) -> str | None:
    """The first thing in which a run differs from the plain loop."""
    losses, gradients, model = plain
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    tolerance = 2e-2 if low else 2e-5
    for step, (ours, theirs) in enumerate(zip(record.losses, losses, strict=True)):
        if abs(ours - theirs) > tolerance * max(1.0, abs(theirs)):
            return f"loss at step {step}: {ours} for {theirs}"
    for step, (found, wanted) in enumerate(zip(record.gradients, gradients, strict=True)):
        for name, gradient in wanted.items():
            if name not in found or _differs(found[name].view_as(gradient), gradient, tolerance):
                return f"gradient of {name} at step {step}"
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in held.items():
        own = (record.weights | record.buffers)[name]
        if own.dtype != tensor.dtype or _differs(own.view_as(tensor), tensor.detach(), tolerance):
            return f"{name} after the last step"
    return None


def _differs(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.to(wide), theirs.to_dense().to(wide)
    both = torch.isfinite(a.abs()) & torch.isfinite(b.abs())
    if a.shape != b.shape or not torch.equal(a[~both], b[~both]):
        return True
    limit = tolerance * max(0.1, float(b[both].abs().max())) if both.any() else 0.0
    return bool(both.any() and a[both].sub(b[both]).abs().max() > limit)


# State and branches that depend on the whole batch, run eagerly on shares of it; the objective's closure is one
# object for both ranks here, and two in processes.
TOLD_ON_TWO_RANKS = {"KeepsActivation", "RecentNorms", "stateful_objective"}


@pytest.mark.filterwarnings("ignore")  # the user's code gives them, here as in the plain loop
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("LateUnfreeze", "Dropped")])
def test_equals_the_plain_loop(name: str) -> None:
    # Compiling takes seconds and changes nothing; torch's fused attention cannot be differentiated twice.
    stance = "default" if name.startswith("ConditionalOp") else "force_eager"
    with torch.compiler.set_stance(stance), sdpa_kernel(SDPBackend.MATH):
        plain = plain_loop(CASES[name]())
    job = CASES[name]()
    captures = Captures(job)
    for plan, ranks in (("single", 1), ("ddp", 2)):
        record = run_serially(job, resolve(plan, ranks), STEPS, torch.float32, captures=captures)
        found = difference(job, plain, record)
        if ranks > 1 and name in TOLD_ON_TWO_RANKS:
            assert found is not None
            assert any("each rank's forward sees its own share alone" in notice for notice in record.notices)
        else:
            assert found is None, f"{plan}: {found}; told: {record.notices}"
        job = CASES[name]()


class Squeezes(nn.Module):
    """Dims of one entry go; one of which each of two ranks has an entry stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.stack([h[:, :1].squeeze(), h[:, 1].squeeze(0), h[:, 2]], 1)


def test_squeezes_are_those_of_the_whole_micro_batch() -> None:
    data = [(torch.full((8,), 0.1 * i), torch.tensor(i % 3)) for i in range(6)]
    job = Job(
        model=Squeezes,
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=2,
    )
    record = run_serially(job, resolve("ddp", 2), STEPS, torch.float32)
    assert difference(job, plain_loop(job), record) is None


def test_training_what_was_frozen_is_refused() -> None:
    with pytest.raises(JobError, match="requires_grad of first.weight"):
        run_serially(CASES["LateUnfreeze"](), resolve("single", 1), STEPS, torch.float32)


def test_state_outside_of_the_model_is_as_before_when_capture_has_failed() -> None:
    job = CASES["stateful_objective"]()
    with pytest.raises(CaptureError, match=r"objective\.calls\[0\] \(.*ordinary\.py:\d+\)"):
        Captures(job).of_size(4)
    calls = job.objective.__closure__[0].cell_contents  # type: ignore[union-attr,index]
    assert calls == [0]


@pytest.mark.parametrize("name", ["wgan_gp", "Dropped", "CheckpointedPlain"])
def test_verify_compares_one_process_with_the_users_own_code(name: str) -> None:
    outcome = verify(CASES[name](), "ddp", 2, serial=True, steps=2)
    assert outcome.ok
    assert {difference.kind for difference in outcome.eager} == {"loss", "gradient", "weight"}
    assert all(difference.largest < 1e-12 for difference in outcome.eager)


def test_verify_says_that_capture_lost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.graph.capture.stand_ins._Reentrant.apply", lambda f, _, *args: 2 * f(*args))
    outcome = verify(CASES["CheckpointedReentrant"](), "ddp", 2, serial=True, steps=2)
    assert outcome.first is None  # the plan computes what one process computes, which is wrong
    assert outcome.eager_first is not None and not outcome.ok
    assert outcome.eager_first.name == "step 1" and outcome.eager_first.kind == "loss"


def told_by_training(name: str, folder: Path, **limits: Any) -> list[str]:
    heard: list[dict[str, Any]] = []
    train(
        CASES[name](),
        "single",
        out=folder / "run",
        steps=1,
        watching=Watching(listener=heard.append),
        limits=Limits(**limits),
    )
    return [event["notice"] for event in heard if "notice" in event]


@pytest.mark.parametrize("name", ["Dropped", "third_derivative", "OddBuffers"])
def test_a_run_says_that_its_capture_was_checked(name: str, tmp_path: Path) -> None:
    (line,) = [text for text in told_by_training(name, tmp_path) if text.startswith("capture")]
    found = re.fullmatch(r"capture checked: gradients equal eager's (?:to (\S+)|bit for bit)\.", line)
    assert found is not None and float(found[1] or 0) < 1e-5


def test_a_capture_that_lost_something_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.graph.capture.stand_ins._Reentrant.apply", lambda f, _, *args: 2 * f(*args))
    with pytest.raises(CaptureError, match="not what the model's own code computes: .* in last,"):
        told_by_training("CheckpointedReentrant", tmp_path)
    assert not any(
        "capture" in text for text in told_by_training("CheckpointedReentrant", tmp_path, check=False)
    )


class Normed(nn.Module):
    """Statistics that no loss of a first step depends on; where it is checkpointed, torch makes them twice."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.again = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 3),
            again,
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = (
            checkpoint(self.norm, self.first(x), use_reentrant=False)
            if self.again
            else self.norm(self.first(x))
        )
        return self.last(normed)


def test_a_capture_that_lost_a_write_to_a_buffer_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(again: bool) -> Job:
        made = torch.Generator().manual_seed(2)
        return Job(
            model=lambda: Normed(again), loss=nn.CrossEntropyLoss(), batch=8, steps=1,
            data=(torch.randn(8, 4, generator=made), torch.randint(0, 3, (8,), generator=made)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip

    for again in (False, True):
        train(job(again), "single", out=tmp_path / f"right {again}")
    assemble = capturing._assemble

    def losing(*args: Any) -> Any:
        graph = assemble(*args)
        output = next(node for node in graph.graph.nodes if node.op == "output")
        lost = next(node for node in output.args[0] if node.name == graph.new_buffers["norm.running_var"])
        output.args = (tuple(node for node in output.args[0] if node is not lost),)
        kept = {name: node for name, node in graph.new_buffers.items() if name != "norm.running_var"}
        return replace(graph, new_buffers=kept)

    monkeypatch.setattr(capturing, "_assemble", losing)
    with pytest.raises(CaptureError, match="the buffer norm.running_var, in norm, differs"):
        train(job(False), "single", out=tmp_path / "wrong")


def test_anomaly_mode_is_told_and_does_not_keep_a_step_from_being_captured() -> None:
    job = CASES["CheckpointedFirstLayer"]()
    with torch.autograd.set_detect_anomaly(True):
        found = Captures(job).of_size(4)
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    assert [line for line in found.notices if "--detect-nan" in line]
    assert not [line for line in Captures(job).of_size(4).notices if "--detect-nan" in line]


def test_checkpointing_is_told_with_the_module_that_it_wraps() -> None:
    (notice,) = Captures(CASES["CheckpointedFirstLayer"]()).of_size(4).notices
    assert "torch.utils.checkpoint around first:" in notice and "memory.recompute" in notice
