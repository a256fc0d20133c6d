"""Models that cannot be captured: one opaque instruction, the rest as always, the same numbers on all ranks."""

import pytest
import torch
from tests.unit.run.training import compare, train_eagerly, train_job
from tests.unit.run.training import uncapturable_job as job

from plait.job.data.open import open_data
from plait.job.updates.clip import Clip
from plait.plan.named import resolve
from plait.program.instructions import Accumulate, Collective, Finish, Load, Opaque, Update, Wait
from plait.program.opaque import ParameterShape, compile_opaque
from plait.program.program import Program
from plait.program.value import Value
from plait.run.prepare.programs import Programs

PARAMETERS = (
    ParameterShape(value=Value.parameter("a"), shape=(2, 3), dtype=torch.float32),
    ParameterShape(value=Value.parameter("b"), shape=(4,), dtype=torch.float64),
    ParameterShape(value=Value.buffer("mean"), shape=(4,), dtype=torch.float32),
)


def program(ranks: int, sizes: tuple[int, ...] = (5,)) -> Program:
    plan = resolve("ddp" if ranks > 1 else "single", ranks)
    shares = [tuple(size // ranks + (rank < size % ranks) for rank in range(ranks)) for size in sizes]
    return compile_opaque(plan, PARAMETERS, sizes, shares, clip=Clip(), notices=("running eagerly",))


def test_all_ranks_run_the_same_instructions() -> None:
    made = program(3)
    assert made.members == (0, 0, 0)
    kinds = [type(instruction) for instruction in made.classes[0].instructions]
    assert kinds[:2] == [Load, Opaque]
    assert kinds.count(Collective) == kinds.count(Wait) == len(made.buckets) == 3
    assert kinds.index(Finish) < kinds.index(Update)
    assert made.notices == ("running eagerly",)


def test_buckets_are_by_dtype_and_buffers_travel_apart() -> None:
    made = program(2)
    assert [bucket.parameters for bucket in made.buckets] == [("a",), ("b",), ()]
    assert [bucket.buffers for bucket in made.buckets] == [(), (), ("mean",)]
    assert [bucket.scalars for bucket in made.buckets] == [(), ("total", "weight"), ()]  # with the widest


def test_micro_batches_are_added_up_but_the_last_buffers_count() -> None:
    fills = [i for i in program(2, (5, 4)).classes[0].instructions if isinstance(i, Accumulate)]
    assert [(i.bucket, i.fresh) for i in fills if i.bucket == 0] == [(0, True), (0, False)]


def test_one_rank_sums_nothing() -> None:
    assert not any(isinstance(i, (Collective, Wait)) for i in program(1).classes[0].instructions)


def test_the_line_that_stopped_the_capture_is_named() -> None:
    given = job()
    programs = Programs(given, open_data(given.data, given.collate), resolve("ddp", 2), torch.device("cpu"))
    made = programs.for_sizes([(4, 3)])
    assert any(isinstance(i, Opaque) for i in made.classes[0].instructions)
    assert programs.capture_error is not None
    assert "zoo.py:" in (programs.capture_error.where or "")
    assert any("running eagerly" in notice and "zoo.py" in notice for notice in made.notices)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_model_that_cannot_be_captured_trains_as_in_a_plain_loop(ranks: int, accumulate: int) -> None:
    found = train_job(job(accumulate=accumulate, clip_norm=1.0), ranks, torch.float64)
    wanted = train_eagerly("branching", clip_norm=1.0)
    assert not compare(found, wanted)
