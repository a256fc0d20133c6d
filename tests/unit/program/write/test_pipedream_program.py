"""Programs in which every micro-batch is an update of its own: their order, their stashes, and planted faults."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import graph_of, with_instructions
from torch import Tensor, nn

from plait.errors import ProgramError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import PIPE
from plait.program import ranks
from plait.program.check.soundness import check_program
from plait.program.compile import compile_program
from plait.program.cost.memory import step_memory
from plait.program.instructions import (
    Accumulate,
    Collective,
    Compute,
    Instruction,
    Send,
    Stash,
    Tangent,
    Update,
    Wait,
)
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.versions import stage_versions, versions
from plait.program.value import Value

SIZES = (2, 2, 2, 1)
SETTINGS = Settings(clip_norm=None, batch_norm="global", device=torch.device("cpu"))


@cache
def program_of(
    plan: str = "pipedream",
    stages: int = 3,
    data: int = 1,
    sizes: tuple[int, ...] = SIZES,
    *,
    vertical_sync: bool = False,
    name: str = "mlp",
) -> Program:
    settings = {"pipe": {"vertical_sync": True}} if vertical_sync else {}
    chosen = resolve(plan, None, settings, {PIPE: stages, "data": data})
    return compile_program({size: graph_of(name, size) for size in set(sizes)}, chosen, sizes, SETTINGS)


def of_stage(program: Program, stage: int) -> list[Instruction]:
    return list(program.of(stage * program.plan.data_ranks).instructions)


def order(program: Program, stage: int) -> str:
    """`F0`, `B0`: a stage's segments of micro-batch 0; `U0` its update; `S0` version 0 is copied."""
    found: list[str] = []
    for i in of_stage(program, stage):
        word = ""
        if isinstance(i, Compute):
            word = f"{'F' if i.kind == 'forward' else 'B'}{i.micro_batch}"
        elif isinstance(i, Update):
            word = f"U{i.micro_batch}"
        elif isinstance(i, Stash):
            word = f"S{i.version}"
        if word and found[-1:] != [word]:
            found.append(word)
    return " ".join(found)


def test_every_backward_is_followed_by_its_update() -> None:
    program = program_of(sizes=(1,) * 6)
    assert order(program, 1) == "F0 F1 B0 S0 U0 F2 B1 S1 U1 F3 B2 S2 U2 F4 B3 S3 U3 F5 B4 S4 U4 B5 U5"
    assert order(program, 2) == "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5"


def test_with_vertical_sync_the_last_stage_keeps_versions_too() -> None:
    program = program_of(sizes=(1,) * 6, vertical_sync=True)
    assert order(program, 2) == "F0 B0 S0 U0 F1 B1 S1 U1 F2 B2 S2 U2 F3 B3 S3 U3 F4 B4 U4 F5 B5 U5"


@pytest.mark.parametrize(("stage", "expected"), [(0, (0, 0, 0, 1, 2, 3)), (1, (0, 0, 1, 2, 3, 4))])
def test_the_version_that_a_micro_batch_sees(stage: int, expected: tuple[int, ...]) -> None:
    actions = SCHEDULES["1f1b"](3, 1, 6)
    assert versions(actions, stage, vertical_sync=False) == expected
    assert versions(actions, stage, vertical_sync=True) == (0, 0, 0, 1, 2, 3)


def test_stashes_are_copied_before_the_update_and_freed_by_the_last_backward_that_reads_them() -> None:
    for stage in range(2):
        instructions = of_stage(program_of(), stage)
        for stash in (i for i in instructions if isinstance(i, Stash)):
            assert isinstance(instructions[stash.id + 1], Update)
            for name in stash.writes:
                readers = [i for i in instructions if name in i.reads]
                assert readers
                assert all(i.kind == "backward" for i in readers)
                assert [i.id for i in instructions if name in i.frees] == [readers[-1].id]


def test_only_weights_that_a_backward_reads_are_copied() -> None:
    copied = {name for i in of_stage(program_of(), 1) if isinstance(i, Stash) for name in i.reads}
    assert copied
    assert all(name.name.endswith("weight") for name in copied)  # a bias is not read by a backward


def test_every_micro_batch_divides_by_its_own_weight() -> None:
    """The labels of a cross-entropy tell it before the forward; that of a mean over all outputs is in the shapes."""
    for name, weights in (
        ("mlp", [None] * 4),
        ("mse", [float(graph_of("mse", n).static_weight or 0) for n in SIZES]),
    ):
        program = program_of(name=name)
        for stage in range(3):
            tangents = [i for i in of_stage(program, stage) if isinstance(i, Tangent)]
            assert [i.weight for i in tangents] == weights
            assert [i.writes for i in tangents] == [(Value.scalar("tangent", n),) for n in range(4)]
            read = [(Value.scalar("weight", n),) if weights[n] is None else () for n in range(4)]
            assert [i.reads for i in tangents] == read


def test_gradients_are_summed_over_data_before_each_update() -> None:
    program = program_of(data=2)
    for stage in range(3):
        instructions = of_stage(program, stage)
        updates = [i.id for i in instructions if isinstance(i, Update)]
        sums = [i for i in instructions if isinstance(i, Collective) and i.axis == "data"]
        waits = {i.of: i.id for i in instructions if isinstance(i, Wait)}
        assert len(updates) == 4
        for number, update in enumerate(updates):
            own = [i for i in sums if i.micro_batch == number]
            assert own
            assert all(waits[i.id] < update for i in own)


def test_a_round_without_flushes_is_shorter_than_its_steps() -> None:
    """16 micro-batches on 3 stages: 4 synchronous steps of 4 have four flushes, a round has one."""

    def duration(rank: int, instruction: Instruction) -> float:
        return {"forward": 1.0, "backward": 2.0}.get(instruction.kind, 0.0) * isinstance(instruction, Compute)

    def length(program: Program, steps: int) -> float:
        return max(span.end_s for span in simulate(program, duration, steps=steps).spans)

    steps = length(program_of("1f1b", sizes=(1,) * 4), 4)
    assert length(program_of(sizes=(1,) * 16), 1) < steps - 3 * 2 * 2.0


def test_stashes_count_as_memory_of_the_step() -> None:
    """Of two, one is given up before the backward has made a gradient of its size."""
    programs = [program_of(plan, 4, sizes=(1,) * 6) for plan in ("1f1b", "pipedream")]
    kept = stage_versions(programs[1])[1]
    assert kept.stashes == 2
    synchronous, asynchronous = (step_memory(program, 1).activations for program in programs)
    assert asynchronous - synchronous >= kept.num_bytes // 2 > 0


# --- planted faults -----------------------------------------------------------------------------------------

Plant = Callable[[list[Instruction]], list[Instruction]]


def says(plant: Plant, *parts: str, stage: int = 1, data: int = 1, vertical_sync: bool = False) -> None:
    program = program_of(data=data, vertical_sync=vertical_sync)
    check_program(program)
    index = program.members[stage * data]
    planted = with_instructions(program, plant(list(program.classes[index].instructions)), index)
    with pytest.raises(ProgramError) as raised:
        check_program(planted)
    for part in parts:
        assert part in raised.value.what


def find(given: list[Instruction], kind: type, micro_batch: int = 1) -> Any:
    return next(i for i in given if isinstance(i, kind) and i.micro_batch == micro_batch)


def reader(given: list[Instruction], kind: str) -> Any:
    return next(i for i in given if any(read.kind == kind for read in i.reads))


def test_a_missing_update() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        return [i for i in given if i is not find(given, Update)]

    says(plant, "every one of 4 micro-batches must have one update", "(update 0)", "(update 2)")


def test_an_update_before_its_gradients() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        late = next(i for i in given if isinstance(i, Accumulate) and (i.bucket, i.micro_batch) == (0, 1))
        update = find(given, Update)
        rest = [i for i in given if i is not late]
        place = rest.index(update) + 1
        return [*rest[:place], late, *rest[place:]]

    says(plant, "bucket:0 must be filled afresh and used once for each micro-batch", "(update 1)", stage=2)


def test_gradients_that_are_added_to_those_of_the_update_before() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        added = find(given, Accumulate)
        return [replace(i, fresh=False) if i is added else i for i in given]

    says(plant, "bucket:0 must be filled afresh and used once", "of stage 1, micro-batch 1")


def test_an_update_with_gradients_that_are_not_summed() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        summed = next(i for i in given if isinstance(i, Collective) and i.reads == (Value.bucket(0),))
        return [i for i in given if i is not summed and not (isinstance(i, Wait) and i.of == summed.id)]

    says(plant, "bucket:0 must be filled afresh, summed and used once", "(update 0)", data=2)


def test_a_backward_that_reads_the_newest_weights() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        wrong = reader(given, "stash")
        newest = tuple(Value.parameter(read.name) if read.kind == "stash" else read for read in wrong.reads)
        return [replace(i, reads=newest) if i is wrong else i for i in given]

    says(plant, "weight after 1 updates; micro-batch 1 began with that after 0 in instruction", "of stage 1")


def test_a_stash_that_is_freed_too_early() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        user, update = reader(given, "stash"), find(given, Update, 0)
        name = next(read for read in user.reads if read.kind == "stash")
        given = [replace(i, frees=(*i.frees, name)) if i is update else i for i in given]
        return [
            replace(i, frees=tuple(n for n in i.frees if n != name)) if i.id == user.id else i for i in given
        ]

    says(plant, "reads stash:", "which instruction", "(update 0) of stage 1, micro-batch 0 has freed")


def test_a_stash_that_is_copied_after_the_update() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        stash, update = find(given, Stash, 0), find(given, Update, 0)
        swapped = {stash.id: update, update.id: stash}
        return [swapped.get(i.id, i) for i in given]

    says(plant, "(stash version 0)", "after 1 updates as stash:")


def test_a_stash_that_is_missing() -> None:
    def plant(given: list[Instruction]) -> list[Instruction]:
        return [i for i in given if i is not find(given, Stash, 0)]

    says(plant, "reads stash:", "before it is written")


def test_stages_of_different_versions_under_vertical_sync() -> None:
    program = program_of()
    plan = replace(program.plan, pipe=replace(program.plan.pipe, vertical_sync=True))
    with pytest.raises(
        ProgramError, match=r"of stage 1, micro-batch 2 reads weights after 1 updates; .* after 0"
    ):
        check_program(replace(program, plan=plan))


def test_a_view_of_weights_that_outlives_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's transposed weight shows the parameter itself, which the update changes in place."""
    monkeypatch.setattr(ranks, "shows_again", lambda graph, local, stages: local)
    with pytest.raises(
        ProgramError, match=r"reads \d/\w+, which shows weights that instruction \d+ \(update"
    ):
        program_of.__wrapped__()


# --- what is sent -------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Its first stage sends a part of one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 16))
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table[2:5]
        output: Tensor = self.second(self.first(x).relu() + rows.sum(0))
        return output


def test_a_part_of_a_parameter_is_copied_before_it_is_sent() -> None:
    """A message may leave after the update that changes what it shows."""
    data = [(torch.randn(16), torch.tensor(i % 10)) for i in range(8)]
    job = Job(model=Rows, data=data, loss=nn.CrossEntropyLoss(), batch=8, steps=1, optimizer=torch.optim.Adam)
    graph = Captures(job, None, torch.float64).of_size(2)
    plan = resolve("pipedream", 2, {"pipe": {"cut": ["first"]}})
    program = compile_program({2: graph}, plan, (2, 2, 2, 2), SETTINGS)
    instructions = program.of(0).instructions
    sends = [i for i in instructions if isinstance(i, Send)]
    copies = [i for i in instructions if isinstance(i, Stash) and i.version is None]
    assert len(sends) == 4
    assert [i.reads for i in copies] == [i.reads for i in sends]
    assert [i.id for i in copies] == [i.id - 1 for i in sends]
