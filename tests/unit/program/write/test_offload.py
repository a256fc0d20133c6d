"""Programs whose optimizer state lies on the host: where copies and updates are, what it saves, and planted faults."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.unit.program.compiled import graph_of, with_instructions
from torch import nn

from plait.cluster.presets import preset
from plait.errors import PlanError, ProgramError
from plait.plan.named import resolve
from plait.program.check.soundness import check_program
from plait.program.compile import compile_program
from plait.program.cost.durations import Durations
from plait.program.cost.update import update_work
from plait.program.instructions import Compute, Copy, Instruction, Update, Wait
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.program.simulate.simulator import simulate
from plait.program.value import Value
from plait.program.write.offload import AT_HAND
from plait.search.predict.exact import memory_use


def adamw(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named])


@cache
def program_of(
    plan: str = "single", ranks: int = 1, *, offload: str = "optimizer", clip: bool = False, parts: int = 1
) -> Program:
    settings = Settings(
        clip_norm=1.0 if clip else None,
        batch_norm="global",
        device=torch.device("cpu"),
        build_optimizer=adamw,
    )
    resolved = resolve(plan, ranks, {"memory": {"offload": offload}, "sync": {"bucket_mib": 0.02}})
    return compile_program({4: graph_of("gpt_tied", 4)}, resolved, (4,) * parts, settings)


def positions(program: Program, kind: type[Instruction]) -> list[int]:
    return [i.id for i in program.of(0).instructions if isinstance(i, kind)]


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("ddp", 2), ("zero1", 2), ("zero3", 2)])
def test_updates_come_while_the_backward_goes_on(plan: str, ranks: int) -> None:
    program = program_of(plan, ranks)
    computes, updates = positions(program, Compute), positions(program, Update)
    assert len(updates) > 3
    assert sum(update < computes[-1] for update in updates) >= len(updates) // 2


@pytest.mark.parametrize("parts", [1, 2])
def test_updates_wait_where_the_norm_of_all_gradients_decides(parts: int) -> None:
    program = program_of(clip=True, parts=parts)
    assert min(positions(program, Update)) > max(positions(program, Compute))


def test_few_parts_are_at_hand_at_once() -> None:
    at_hand: set[object] = set()
    for instruction in program_of().of(0).instructions:
        if isinstance(instruction, Copy):
            at_hand ^= {*instruction.reads, *instruction.writes} & {
                v for v in (*instruction.reads, *instruction.writes) if v.kind == "state"
            }
            assert len(at_hand) <= AT_HAND
    assert not at_hand


def test_memory_is_that_of_the_parts_at_hand() -> None:
    away, here = (
        memory_use(program, 0, update_work(program, 0, adamw))
        for program in (program_of(), program_of(offload="none"))
    )
    half = memory_use(program_of(offload="optimizer:0.5"), 0, update_work(program_of(), 0, adamw))
    assert away.optimizer < 100 < here.optimizer / 100  # counters of steps stay
    assert 0.2 * here.optimizer < half.optimizer < 0.8 * here.optimizer
    assert away.gradients == 0 and away.total < half.total < here.total


def test_copies_are_hidden_where_the_bus_is_fast_and_told_where_it_is_slow() -> None:
    program = program_of()
    works = {0: update_work(program, 0, adamw)}

    def step_s(bandwidth: float) -> float:
        base = preset("H200").cluster("one", 1, 1)
        cluster = replace(base, device=replace(base.device, host_bandwidth=bandwidth))
        durations = Durations(program, cluster, works)
        trace = simulate(
            program, durations.duration, steps=3, own_part=durations.own_part, beside=durations.beside
        )
        ends = [max(s.end_s for s in trace.spans if s.step == at) for at in range(3)]
        return ends[2] - ends[1]

    moved = sum(i.num_bytes for i in program.of(0).instructions if isinstance(i, Copy) and i.way == "in")
    fast, slow = step_s(1e15), step_s(1e6)
    assert slow >= moved / 1e6 > 2 * fast


def test_what_the_host_updates_is_gone_from_the_device() -> None:
    away, here = (
        memory_use(program, 0, update_work(program, 0, adamw))
        for program in (program_of(offload="gradients", clip=True), program_of(offload="none", clip=True))
    )
    assert away.optimizer < 100 < here.optimizer / 100 and away.gradients == 0
    assert away.total < here.total - here.optimizer
    program = program_of(offload="gradients", clip=True)
    stores = [i.id for i in program.of(0).instructions if isinstance(i, Copy) and i.way == "out"]
    assert min(stores) < positions(program, Compute)[-1]  # while the backward goes on


def test_updates_of_the_host_are_beside_the_backward() -> None:
    program = program_of(offload="gradients")
    works = {0: update_work(program, 0, adamw)}
    base = preset("H200").cluster("one", 1, 1)

    def step_s(processor: float) -> float:
        cluster = replace(base, device=replace(base.device, processor_bandwidth=processor))
        durations = Durations(program, cluster, works)
        trace = simulate(program, durations.duration, steps=2, own_part=durations.own_part)
        ends = [max(s.end_s for s in trace.spans if s.step == at) for at in range(2)]
        return ends[1] - ends[0]

    fast, slow = step_s(1e15), step_s(1e6)
    assert slow >= works[0].traffic / 1e6 > 2 * fast


def test_ways_that_are_both_used_slow_each_other() -> None:
    program = program_of()
    durations = Durations(program, preset("H200").cluster("one", 1, 1), {0: update_work(program, 0, adamw)})

    def end_s(duplex: float) -> float:
        return max(
            span.end_s
            for span in simulate(
                program, lambda rank, i: durations.duration(rank, i) * (1e3 if isinstance(i, Copy) else 1),
                steps=2, own_part=durations.own_part, duplex=duplex,
            ).spans
        )  # fmt: skip

    assert end_s(0.5) > 1.05 * end_s(1.0)


def faulty(program: Program, change: dict[int, Instruction | None]) -> Program:
    made = [change.get(i.id, i) for i in program.of(0).instructions]
    return with_instructions(program, [i for i in made if i is not None])


def test_faults_are_found() -> None:
    program = program_of()
    instructions = program.of(0).instructions
    first = next(i for i in instructions if isinstance(i, Update))
    out = next(i for i in instructions if isinstance(i, Copy) and i.way == "out")
    second = next(i for i in instructions if isinstance(i, Update) and i.id > first.id)
    with pytest.raises(ProgramError, match="loses state"):
        check_program(faulty(program, {out.id: replace(out, way="drop", writes=())}))
    with pytest.raises(ProgramError, match="does not reach the host|never freed"):
        check_program(faulty(program, {out.id: None}))
    with pytest.raises(ProgramError, match="is updated by"):
        check_program(faulty(program, {second.id: replace(second, parts=(*second.parts, *first.parts))}))
    with pytest.raises(ProgramError, match="never updated"):
        check_program(faulty(program, {first.id: replace(first, parts=second.parts), second.id: None}))
    late = next(i for i in instructions if isinstance(i, Compute))
    reader = replace(late, id=len(instructions), reads=first.writes[-1:], writes=(), frees=())
    with pytest.raises(ProgramError, match=r"reads parameter:.* after its update"):
        check_program(with_instructions(program, [*instructions, reader]))


def test_faults_of_updates_on_the_host_are_found() -> None:
    program = program_of(offload="gradients")
    instructions = program.of(0).instructions
    first = next(i for i in instructions if isinstance(i, Update))
    drop = next(i for i in instructions if isinstance(i, Copy) and i.way == "drop")
    gone = {Value.stored(value) for value in drop.reads}
    updated = next(i for i in instructions if isinstance(i, Update) and gone & set(i.reads))
    store = next(i for i in instructions if isinstance(i, Copy) and set(i.writes) & set(first.reads))
    with pytest.raises(ProgramError, match="which nobody has stored"):
        check_program(faulty(program, {store.id: None}))
    with pytest.raises(ProgramError, match="is at hand on the device"):
        check_program(with_instructions(program, swapped(instructions, drop, updated)))
    wait = next(i for i in instructions if isinstance(i, Wait) and i.of == first.id)
    with pytest.raises(ProgramError, match="never awaited"):
        check_program(faulty(program, {wait.id: None}))


def swapped(instructions: Sequence[Instruction], drop: Copy, update: Update) -> list[Instruction]:
    """With a copy that comes after an update instead of before."""
    made = [i for i in instructions if i is not drop]
    made.insert(made.index(update) + 1, drop)
    return made


@pytest.mark.parametrize("told", ["all", "optimizer:2", ["optimizer", "optimizer:0.5"], []])
def test_what_is_no_offload_is_refused(told: object) -> None:
    with pytest.raises(PlanError, match="memory.offload"):
        resolve("single", 1, {"memory": {"offload": told}})
