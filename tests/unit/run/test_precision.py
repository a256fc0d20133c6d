"""Weights in bfloat16 with masters, and float16 with a loss scale: against hand-written loops and one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.zoo import ZOO
from torch import nn

from plait.errors import JobError, PlanError, RunError
from plait.graph.ops import scaled
from plait.job.job import Job
from plait.job.precision import MASTER, keep_masters
from plait.run.hold.loss_scale import LossScale
from plait.run.parallelize import Step, parallelize
from plait.run.verify import verify


def job(precision: Any, **changes: Any) -> Job:
    return replace(ZOO["gpt"].job(6, 4, optimizer="adamw", num_samples=24), precision=precision, **changes)


def batches(step: Step) -> list[Any]:
    return [step._programs.captures.source.fetch(torch.arange(6) + 6 * n) for n in range(4)]


def test_weights_are_short_and_masters_are_updated() -> None:
    given = job("bf16-weights")
    step = parallelize(given, "single")
    model = given.build_model()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = replace(given, precision="fp32").build_optimizer(list(masters.items()))
    for batch in batches(step):
        model.zero_grad()
        with given.autocast("cpu"):
            loss = given.objective_of(model, batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float() if parameter.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        assert step(batch) == pytest.approx(loss.item(), rel=2**-7)
    state = step.optimizer.state
    for name, parameter in step.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert state[parameter][MASTER].dtype == state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(parameter, state[parameter][MASTER].bfloat16())
        assert (state[parameter][MASTER] - masters[name]).norm() <= 0.02 * masters[name].norm(), name
    saved = step.checkpoint()
    assert saved.parameters["head.weight"].dtype == torch.bfloat16
    assert saved.optimizer.tensors["head.weight"][MASTER].dtype == torch.float32


def test_small_updates_are_not_lost() -> None:
    """A step of 1e-4 is less than half of a bfloat16's last digit at 1: only a master remembers it."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1e-4)
    keep_masters(optimizer)
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.equal(parameter, torch.full((4,), 0.99).bfloat16())


@pytest.mark.parametrize("precision", ["bf16-weights", "fp16"])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "megatron", "1f1b"])
def test_plans_equal_one_process(plan: str, precision: Any) -> None:
    """By SGD: AdamW makes steps of full length of the rounding noise of gradients that are zero."""
    given = ZOO["mlp"].job(6, 2, optimizer="sgd", num_samples=24, accumulate=2)
    outcome = verify(replace(given, precision=precision), plan, 2, steps=2, serial=True, fp32=True)
    assert outcome.ok, outcome.differences


def test_a_step_that_overflows_is_skipped() -> None:
    step = parallelize(job("fp16", clip_norm={"head": 0.5}), "single")
    scale = step._state.loss_scale
    assert scale is not None
    scale.factor = 2.0**40
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    batch = batches(step)[0]
    step(batch)
    assert scale.skipped == 1
    assert scale.factor == 2.0**39
    assert step.outcome.norm is None
    assert not step.optimizer.state
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    scale.factor = 2.0**10
    step(batch)
    assert scale.skipped == 1
    assert step.outcome.norm is not None
    assert not all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    assert step.checkpoint().extra["loss_scale"] == {"factor": 2.0**10, "good": 1, "skipped": 1}


def test_scaled_gradients_are_those_of_the_loss() -> None:
    given = job("fp16", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    scaled, plain = parallelize(given, "single"), parallelize(replace(given, precision="fp32"), "single")
    for batch in batches(scaled):
        assert scaled(batch) == pytest.approx(plain(batch), rel=2e-3)
    for left, right in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-3 * float(right.detach().abs().max()) + 1e-6)


def test_the_factor_follows_what_happens() -> None:
    scale = LossScale()
    first = scale.factor
    assert not scale.takes(float("inf"))
    assert scale.factor == first / 2
    assert all(scale.takes(1.0) for _ in range(2000))
    assert scale.factor == first
    again = LossScale()
    again.load(scale.state())
    assert again.state() == scale.state()
    scale.factor = 2.0**-24
    with pytest.raises(RunError, match="not finite"):
        scale.takes(float("nan"))


def test_what_has_no_place_is_refused() -> None:
    for precision in ("bf16-weights", "fp16"):
        with pytest.raises(PlanError, match="no place"):
            parallelize(job(precision), "local-sgd", mesh={"data": 1})
    with pytest.raises(JobError, match="'bf16-weights'.*'fp8'"):
        job("fp4")


def test_eight_bits_round_rows_and_columns() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=g).bfloat16() for _ in range(2))
    a[3] *= 1e4
    bias = torch.randn(32, generator=g).bfloat16()
    found = torch.ops.plait.scaled_product(a, b, bias)
    exact = a.double() @ b.double() + bias
    off = (found - exact).abs() / (a.double().norm(dim=1, keepdim=True) * b.double().norm(dim=0))
    assert 2**-10 < off.max() < 2**-4  # rounded, each row by itself
    assert torch.equal(found[:3], torch.ops.plait.scaled_product(a[:3], b, bias))
    assert torch.equal(torch.ops.plait.scaled_product(torch.zeros_like(a), b, None), torch.zeros_like(a))


def test_eight_bits_of_gradients_have_one_scale() -> None:
    """Gradients that differ by 2^20 are rounded alike: e5m2 spans them, e4m3 would not."""
    g = torch.Generator().manual_seed(0)
    activation, gradient = (torch.randn(64, 32, generator=g).bfloat16() for _ in range(2))
    gradient += gradient.sign()  # none is as good as zero
    gradient[:, :16] *= 2.0**-20
    shorts, scales = zip(
        torch.ops.plait.transposed_short(gradient),
        torch.ops.plait.transposed_rows(*torch.ops.plait.rounded_rows(activation)), strict=True,
    )  # fmt: skip
    assert [short.dtype for short in shorts] == [torch.float8_e5m2, torch.float8_e4m3fn]
    assert all(scale.log2() == scale.log2().round() for scale in scales)
    exact = gradient.double().t() @ activation.double()
    bound = gradient.double().norm(dim=0)[:, None] * activation.double().norm(dim=0)
    for op, dtype in ((scaled.SCALED_GRADIENT, torch.bfloat16), (scaled.WIDE_GRADIENT, torch.float32)):
        found = op(*shorts, *scales)
        assert found.dtype == dtype and found.is_contiguous()
        off = (found - exact).abs() / bound
        assert 2**-10 < off.max() < 2**-3
        assert 2**-10 < off[:16].max() < 2**-3
    part, small = torch.ops.plait.transposed_short(gradient[:, :16].contiguous())
    assert torch.equal(
        part.float() * small, shorts[0][:16].float() * scales[0]
    )  # as if the rest were not there


def test_rows_in_eight_bits_are_turned_without_the_sixteen_that_they_were() -> None:
    """All that a second rounding may change are entries that are tiny beside the largest: denormal in 8 bits."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 32, generator=g) * 2.0 ** torch.randint(-12, 1, (64, 1), generator=g)).bfloat16()
    rows, scale = torch.ops.plait.rounded_rows(x)
    turned, one = torch.ops.plait.transposed_rows(rows, scale)
    assert turned.is_contiguous() and turned.dtype == torch.float8_e4m3fn and float(one) == float(scale.max())
    at_once = (x.float() / one).to(torch.float8_e4m3fn).t()
    normal = at_once.float().abs() >= 2.0**-6
    assert 0.3 < normal.float().mean() < 0.9
    assert torch.equal(turned.float()[normal], at_once.float()[normal])
    assert float((turned.float() - at_once.float()).abs().max()) <= 2.0**-9  # the least of denormal numbers
    b, bias = torch.randn(32, 16, generator=g).bfloat16(), torch.randn(16, generator=g).bfloat16()
    found = torch.ops.plait.rounded_product(rows, scale, b, bias)
    assert torch.equal(found, torch.ops.plait.scaled_product(x, b, bias))


@pytest.mark.parametrize("plan", ["ddp", "zero3", "1f1b", "megatron"])
def test_eight_bits_under_plans(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row does not depend on the others of its batch: cut batches agree to 16 bits, cut rows to 8."""
    monkeypatch.setattr(scaled, "pays", lambda *_: True)
    given = replace(ZOO["mlp"].job(6, 2, optimizer="sgd", num_samples=24, accumulate=2), precision="fp8")
    outcome = verify(given, plan, 2, steps=2, serial=True, fp32=True)
    assert outcome.ok, outcome.differences
    gradient = next(d for d in outcome.differences if d.kind == "gradient")
    assert gradient.largest < (2**-4 if plan == "megatron" else 2**-6)


def test_eight_bits_learn_as_fp32_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "pays", lambda *_: True)
    given = ZOO["gpt"].job(16, 60, optimizer="adamw", num_samples=16)
    losses = {}
    for precision in ("fp32", "fp8"):
        step = parallelize(replace(given, precision=precision), "single")
        batch = step._programs.captures.source.fetch(torch.arange(16))
        losses[precision] = [step(batch) for _ in range(40)]
        program = step._programs.full_step()
        called = [str(n.target) for s in program.classes[0].segments.values() for n in s.nodes]
        for name in (
            "scaled_product",
            "rounded_product",
            "transposed_rows",
            "transposed_short",
            "scaled_gradient",
        ):
            assert called.count(f"plait.{name}.default") == (9 if precision == "fp8" else 0)
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["fp8"] != losses["fp32"]


def test_eight_bits_only_where_they_pay() -> None:
    assert scaled.pays(16384, 2048, 8192)
    assert not scaled.pays(16384, 2048, 16)
    assert not scaled.pays(8, 4096, 4096)
    step = parallelize(job("fp8"), "single")
    segments = step._programs.full_step().classes[0].segments.values()
    called = [str(node.target) for segment in segments for node in segment.nodes]
    assert not [name for name in called if "scaled" in name or "short" in name]
