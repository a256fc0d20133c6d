"""Running ops again changes no number, and saves and costs what is said before the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from tests.unit.run.interpret.live_memory import Activations, Live
from tests.unit.run.interpret.test_memory import Run
from tests.unit.run.within.within import SMALL_BUCKETS, assert_equal, reference
from tests.zoo import GPT, ZOO, Block, Case
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.program.cost.memory import step_memory
from plait.program.segment.recompute import step_flops
from plait.run.prepare.prepare import effect_of_recompute, prepare
from plait.run.verify import Verification, verify

MODULES: Mapping[str, list[str]] = {
    "gpt": ["blocks.*"],
    "gpt_dropout": ["blocks.1"],
    "resnet_bn": ["3", "*.norm1"],
    "unet": ["down*", "middle"],
    "hf_bert": ["*.layer.*.attention"],
    "lstm": ["lstm", "head"],
}
"""Case -> modules that run again."""
PLANS = {"ddp": 2, "zero3": 4, "megatron": 2, "domain": 2, "1f1b": 2, "zero-bubble": 2}


def check(name: str, plan: str, ranks: int, recompute: str) -> Verification:
    """Two steps of 4 and 3 samples each: on 4 ranks, one of them has none of the second micro-batch."""
    known = reference(name, 2, 2)
    setting = MODULES[name] if recompute == "modules" else recompute
    settings = {"sync": SMALL_BUCKETS, "memory": {"recompute": setting}}
    return verify(known.job, plan, ranks, settings=settings, serial=True, against=known)


@pytest.mark.parametrize("recompute", ["full", "selective", "modules"])
@pytest.mark.parametrize("name", MODULES)
def test_one_process_computes_the_same_bits(name: str, recompute: str) -> None:
    found = check(name, "single", 1, recompute)
    assert_equal(found)
    assert all(difference.largest == 0.0 for difference in found.differences)


WAYS = ("full", "selective", "modules")
TURNS = [
    (name, plan, WAYS[(i + j) % len(WAYS)])
    for i, name in enumerate(MODULES)
    for j, plan in enumerate(PLANS)
    if (i + j) % 2 == 0
]
"""Every way under every plan and on every model: three models a plan, three plans a model."""


@pytest.mark.parametrize(("name", "plan", "recompute"), TURNS)
def test_a_plan_computes_what_one_process_does(name: str, plan: str, recompute: str) -> None:
    assert_equal(check(name, plan, PLANS[plan], recompute))


class DeepGPT(GPT):
    """Ten layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(0.0) for _ in range(10)))


CASES: Mapping[str, Case] = {**ZOO, "deep_gpt": replace(ZOO["gpt"], model=DeepGPT)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one step took, as its program says and as torch saw it."""

    said_bytes: int
    seen_bytes: int
    said_flops: int
    seen_flops: int


@cache
def graphs(name: str) -> Captures:
    """Those of a case, however much of it runs again."""
    return Captures(CASES[name].job(batch=64, steps=2))


@cache
def measured(name: str, recompute: str) -> Measured:
    job = CASES[name].job(batch=64, steps=2)
    run = Run(job, resolve("single", 1, {"memory": {"recompute": recompute}}), graphs(name))
    machine = run.machines[0]
    with FlopCounterMode(display=False) as counter:
        run.step(0)
    live = Live([*machine.state.parameters.values(), *machine.state.buffers.values()])
    machine.observer = Activations(live, machine)
    with live:
        program = run.step(1)
    loaded = [
        value for name, value in program.of(0).values.items() if (name.kind, name.micro_batch) == ("batch", 0)
    ]
    return Measured(
        said_bytes=step_memory(program).activations,
        seen_bytes=live.peak + sum(value.num_bytes for value in loaded),
        said_flops=step_flops(program, 0),
        seen_flops=counter.get_total_flops(),
    )


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["deep_gpt", "gpt_dropout", "resnet_bn", "unet", "hf_bert"])
def test_what_is_saved_and_added_is_what_was_said(name: str, recompute: str) -> None:
    """Torch's counter knows no FLOPs of attention on the CPU: they are about 6 % here."""
    job = CASES[name].job(batch=64, steps=2)
    told: list[str] = []
    plan = resolve("single", 1, {"memory": {"recompute": recompute}})
    programs = prepare(
        job, plan, "cpu", torch.float32, lambda event: told.extend(event["notices"]), graphs(name)
    )
    effect = effect_of_recompute(programs.for_sizes([(64,)]), programs)
    assert effect is not None
    assert f"recompute {recompute}: {effect}." in told
    none, now = measured(name, "none"), measured(name, recompute)
    assert effect.kept_bytes[0] == none.said_bytes
    assert now.said_bytes == pytest.approx(now.seen_bytes, rel=0.1)
    assert effect.saved_bytes[0] == pytest.approx(none.seen_bytes - now.seen_bytes, rel=0.1)
    assert effect.saved_bytes[0] > 0.1 * none.seen_bytes
    assert effect.added_flops[0] == pytest.approx(now.seen_flops - none.seen_flops, rel=0.1)


def test_a_deep_model_keeps_little() -> None:
    assert measured("deep_gpt", "full").seen_bytes < 0.4 * measured("deep_gpt", "none").seen_bytes


def test_ranks_of_a_pipeline_are_told_apart() -> None:
    job = ZOO["gpt"].job(batch=8, steps=2, accumulate=4)
    plan = resolve("1f1b", 2, {"memory": {"recompute": "full"}})
    programs = prepare(job, plan, "cpu", torch.float32, lambda event: None)
    effect = effect_of_recompute(programs.for_sizes([(2,)] * 4), programs)
    assert effect is not None
    assert effect.saved_bytes[0] > effect.saved_bytes[1] >= 0, "the first stage holds more micro-batches"
    assert str(effect).startswith("rank 0: ")


def test_a_model_that_runs_eagerly_says_so() -> None:
    told: list[str] = []
    plan = resolve("single", 1, {"memory": {"recompute": "full"}})
    prepare(
        ZOO["branching"].job(), plan, "cpu", torch.float32, lambda event: told.extend(event["notices"])
    )  # fmt: skip
    assert any("memory.recompute has no effect" in notice for notice in told)
