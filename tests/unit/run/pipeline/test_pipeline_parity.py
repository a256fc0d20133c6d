"""Parity of every schedule with one process on the same micro-batches, which are ragged; all ranks in this process.

A pipeline changes where an op runs, not what it computes: micro-batches are added up in the order of one process, every
op sees the same operands, and the loss is added to zeros. So nothing may differ by a bit, except where a sum changes
its order:

- a tied parameter on several stages: each stage adds up its own part over the micro-batches, and the parts meet at the
  end of the step, where one process adds the parts of each micro-batch. Two parts of one micro-batch are the same sum;
- a gradient that shows a part of a larger tensor, sent to another stage: only that part travels, so it lies in memory
  otherwise than in one process, and a kernel may walk through it in another order;
- the norm for clipping: squares are added up by rank. This is in test_pipeline_hybrids.py.

For those, DESIGN's tolerance for float64 holds: 1e-9 of a tensor's largest value.

This is a sample; `python -m bench.parity` runs every model under every schedule, with 1, 4 and 7 micro-batches on 2 and
4 ranks.
"""

import pytest
import torch
from tests.unit.run.pipeline.pipelines import (
    EVERYWHERE,
    LARGE,
    SCHEDULES,
    SLICED,
    SMALL,
    TIED,
    TRANSFORMERS,
    assert_equal,
    check,
    compare,
    differences,
    in_turn,
    job_of,
    reference,
)
from torch import Tensor, nn

from plait.plan.named import resolve
from plait.program.layout import Layout
from plait.run.prepare.prepare import prepare
from plait.run.proof.reference import reference_of


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, schedule) for name in EVERYWHERE for schedule in SCHEDULES),
        *in_turn(["gpt", "lstm", "ignore_index", "masked_gpt"], SCHEDULES, 3),
        *in_turn(LARGE, ("1f1b", "interleaved", "zero-bubble-2"), 2),
        *in_turn(TRANSFORMERS, ("interleaved", "zero-bubble-2", "1f1b", "interleaved", "gpipe", "zero-bubble"), 2),
    ],
)  # fmt: skip
def test_four_stages_of_four_micro_batches(name: str, schedule: str) -> None:
    """Three small models under every schedule; others take turns, large ones at the schedules that cut most."""
    compare(name, schedule, 4, 4)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, schedule) for name in EVERYWHERE for schedule in SCHEDULES if schedule != "naive"),
        ("resnet_bn", "1f1b"), ("moe_capacity", "zero-bubble"), ("hf_gpt2", "1f1b"),
    ],
)  # fmt: skip
def test_two_stages_of_seven_micro_batches(name: str, schedule: str) -> None:
    """More micro-batches than stages is a matter of schedules, not of models: three large ones stand for all."""
    compare(name, schedule, 2, 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "gpt_dropout"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 7), (2, 4)])
def test_other_numbers_of_stages_and_micro_batches(
    name: str, stages: int, micro_batches: int, schedule: str
) -> None:
    compare(name, schedule, stages, micro_batches)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "interleaved") for name in (*SMALL, "moe_capacity", "resnet_bn")),
        *((name, "zero-bubble") for name in EVERYWHERE),
    ],
)
def test_a_single_micro_batch(name: str, schedule: str) -> None:
    """Of one micro-batch, naive, gpipe and 1f1b make the same step, and so do the two of zero-bubble."""
    compare(name, schedule, 4, 1)


@pytest.mark.parametrize(
    ("name", "schedule", "stages"), [("gpt_tied", "1f1b", 2), (SLICED, "interleaved", 4)]
)
def test_where_a_sum_changes_its_order_the_difference_is_rounding(
    name: str, schedule: str, stages: int
) -> None:
    """Otherwise the exceptions above would be unfounded, or would hide a difference of another kind."""
    found = differences(check(reference(name, 4 if name in TIED else 1), schedule, stages))
    assert 0 < found["gradient"] < 1e-12


class Repeated(nn.Module):
    """Its first layer is used again, by the stage after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        output: Tensor = self.last(self.first(x).tanh())
        return output


@pytest.mark.parametrize(
    ("mesh", "zero"), [({"pipe": 2}, 0), ({"pipe": 2, "data": 2}, 0), ({"pipe": 2, "data": 2}, 1)]
)
def test_a_parameter_of_two_stages_of_one_rank(mesh: dict[str, int], zero: int) -> None:
    """Both add to one gradient, which is complete after the last micro-batch of the last of them."""
    job = job_of("mlp", 4, model=Repeated)
    known = reference_of(job, steps=2)
    settings = {"memory": {"zero": zero}, "pipe": {"per_rank": 2}}
    plan = resolve("interleaved", None, settings, mesh)
    programs = prepare(job, plan, "cpu", torch.float64, lambda event: None, known.captures)
    assert isinstance(programs.layout, Layout)
    assert programs.layout.owners["first.weight"] == (0,)
    assert_equal(check(known, "interleaved", mesh=mesh, settings=settings))


class Thrice(nn.Module):
    """Its first layer is used twice by one stage, and again by the next: three summands of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.first(x).tanh()).tanh()).tanh()
        output: Tensor = self.last(self.first(x).tanh())
        return output


def test_a_parameter_that_one_stage_uses_twice_and_another_once() -> None:
    known = reference_of(job_of("mlp", 4, model=Thrice), steps=1)
    assert_equal(check(known, "1f1b", 2, settings={"pipe": {"cut": ["second"]}}))


class Added(nn.Module):
    """Parameters whose gradients are one tensor, larger than the gradients that a stage adds up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 600), nn.Linear(600, 10)
        self.one, self.other = nn.Parameter(torch.zeros(600, 600)), nn.Parameter(torch.zeros(600, 600))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) @ (self.one + self.other))
        return output


def test_gradients_that_share_memory_are_added_up_apart() -> None:
    job = job_of("mlp", 4, model=Added)
    known = reference_of(job, steps=1)
    settings = {"pipe": {"cut": ["last"]}}
    plan = resolve("1f1b", 2, settings)
    program = prepare(job, plan, "cpu", torch.float64, lambda event: None, known.captures).for_sizes(
        [(2,), (2,), (2,), (1,)]
    )
    of = {name: i for entry in program.classes for i, b in enumerate(entry.buckets) for name in b.parameters}
    assert of["one"] != of["other"], "of other buckets"
    assert_equal(check(known, "1f1b", 2, settings=settings))


class Inverted(nn.Module):
    """Inverts a matrix, which torch checks with an op that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)
        self.matrix = nn.Parameter(2 * torch.eye(16) + 0.01 * torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) @ torch.linalg.inv(self.matrix))
        return output


def test_ops_that_return_nothing() -> None:
    known = reference_of(job_of("mlp", 4, model=Inverted), steps=1)
    assert_equal(check(known, "1f1b", 2))


class Hooked(nn.Module):
    """The backward of its first layer reads what its second has computed, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        shown: list[Tensor] = []
        h = self.first(x).view(-1, 2, 4)
        h.register_hook(lambda gradient: gradient * (1 + shown[0]))
        k = self.second(h.flatten(1).tanh())
        shown.append(k.detach().view(-1, 2, 4))
        output: Tensor = self.last(k.tanh())
        return output


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_backward_that_reads_a_view_of_what_a_later_stage_has(schedule: str) -> None:
    known = reference_of(job_of("mlp", 4, model=Hooked), steps=1)
    assert_equal(check(known, schedule, 2, settings={"pipe": {"cut": ["second"]}}))
