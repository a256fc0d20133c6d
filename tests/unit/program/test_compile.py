"""Programs: who does what, when; communication outside of segments; few classes for many ranks."""

import pytest
import torch
from tests.unit.program.compiled import graph_of, program_of

from plait.graph.graph import Graph
from plait.job.order import split
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.program import compile as compile_
from plait.program.compile import compile_program
from plait.program.instructions import Accumulate, Collective, Commit, Compute, Load, Tangent, Update, Wait
from plait.program.place.place import place
from plait.program.place.propagate import Placements
from plait.program.ranks import Settings


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(7, 3, (3, 2, 2)), (2, 4, (1, 1, 0, 0)), (8, 4, (2, 2, 2, 2)), (0, 2, (0, 0))],
)
def test_sizes_are_nearly_equal_the_larger_ones_first(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert split(total, parts) == sizes


def test_ranks_with_equal_shares_are_one_class() -> None:
    program = program_of("mlp", 4)
    assert program.shares == ((2, 2, 2, 1),)
    assert program.members == (0, 0, 0, 1)
    assert program.of(3) is program.classes[1]


def test_thousands_of_ranks_are_a_few_classes() -> None:
    graph = graph_of("linear", 8000)
    settings = Settings(clip_norm=None, batch_norm="global", device=torch.device("cpu"))
    program = compile_program({8000: graph}, resolve("ddp", 4096), [8000], settings)
    assert len(program.members) == 4096
    assert len(program.classes) == 2


def test_one_rank_communicates_nothing() -> None:
    kinds = {type(instruction) for instruction in program_of("mlp", 1).classes[0].instructions}
    assert not kinds & {Collective, Wait}


def test_a_step_loads_computes_sums_and_updates() -> None:
    instructions = program_of("mlp", 2).classes[0].instructions
    assert [instruction.id for instruction in instructions] == list(range(len(instructions)))
    first = {
        kind: min(i.id for i in instructions if isinstance(i, kind))
        for kind in (Load, Compute, Tangent, Collective, Update)
    }
    assert first[Load] < first[Compute] < first[Update]
    assert isinstance(instructions[-1], Update)
    waited = {i.of for i in instructions if isinstance(i, Wait)}
    assert waited == {i.id for i in instructions if isinstance(i, Collective)}


def test_buckets_travel_while_the_backward_goes_on() -> None:
    instructions = program_of("gpt", 2, bucket_mib=0.01).classes[0].instructions
    last_backward = max(i.id for i in instructions if isinstance(i, Compute) and i.kind == "backward")
    sent = [i.id for i in instructions if isinstance(i, Collective) and "bucket" in i.name]
    assert len(sent) > 2
    assert sent[0] < last_backward
    waits = [i.id for i in instructions if isinstance(i, Wait) and "bucket" in i.name]
    assert min(waits) > max(sent)


def test_without_overlap_a_bucket_is_awaited_at_once() -> None:
    instructions = program_of("gpt", 2, bucket_mib=0.01, overlap=False).classes[0].instructions
    for instruction in instructions:
        if isinstance(instruction, Collective) and "bucket" in instruction.name:
            following = instructions[instruction.id + 1]
            assert isinstance(following, Wait)
            assert following.of == instruction.id


def test_accumulation_synchronizes_once_after_the_last_micro_batch() -> None:
    program = program_of("mlp", 2, (4, 3))
    instructions = program.classes[0].instructions
    sent = [i for i in instructions if isinstance(i, Collective) and "bucket" in i.name]
    assert len(sent) == len(program.buckets)
    assert {i.micro_batch for i in sent} == {1}
    filled = [(i.micro_batch, i.fresh) for i in instructions if isinstance(i, Accumulate) and i.bucket == 0]
    assert filled == [(0, True), (1, False)]


def test_micro_batches_of_one_size_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, tuple[int, ...]]] = []

    def noted(graph: Graph, plan: Plan, units: tuple[int, ...]) -> tuple[Placements, ...]:
        placed.append((graph.num_samples, units))
        return place(graph, plan, units)

    monkeypatch.setattr(compile_, "place", noted)
    program_of.__wrapped__("mlp", 2, (3, 3, 2, 3))
    assert placed == [(3, (2, 1)), (2, (1, 1))]


def test_segments_hold_no_communication() -> None:
    for entry in program_of("small_batch_norm", 3).classes:
        for segment in entry.segments.values():
            assert "f_all_reduce" not in segment.source
            assert "f_all_gather" not in segment.source
            assert segment.num_ops > 0


def test_batch_statistics_are_gathered_and_buffers_committed() -> None:
    program = program_of("small_batch_norm", 3)
    instructions = program.classes[0].instructions
    assert sum(isinstance(i, Collective) and i.op == "all_gather" for i in instructions) == 2
    (commit,) = [i for i in instructions if isinstance(i, Commit)]
    assert set(commit.buffers) == set(graph_of("small_batch_norm", 7).new_buffers)


def test_values_are_freed_after_their_last_use() -> None:
    for instruction_list in (entry.instructions for entry in program_of("gpt", 2).classes):
        freed = {name: i.id for i in instruction_list for name in i.frees}
        for instruction in instruction_list:
            for name in (*instruction.reads, *instruction.writes):
                assert freed.get(name, len(instruction_list)) >= instruction.id
        written = {name for i in instruction_list for name in i.writes if name.micro_batch is not None}
        assert written <= set(freed), "every value of a micro-batch is freed"


def test_the_weight_is_known_where_the_shapes_tell_it() -> None:
    assert program_of("mse", 2).total_weight == 70.0
    assert program_of("class_weights", 2).total_weight is None


def test_the_digest_tells_programs_apart() -> None:
    graph, plan = graph_of("mlp", 7), resolve("ddp", 2)
    settings = Settings(clip_norm=1.0, batch_norm="global", device=torch.device("cpu"))
    again = compile_program({7: graph}, plan, (7,), settings)
    assert again.digest() == program_of("mlp", 2).digest()
    assert again.digest() != program_of("mlp", 2, bucket_mib=0.0).digest()
    assert again.digest() != program_of("mlp", 3).digest()
