"""The simulator against step times worked out by hand, and against a real run's trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.measured import measured_durations
from tests.zoo import ZOO

import plait
from plait.errors import ProgramError
from plait.job.data.open import open_data
from plait.plan.plan import Plan
from plait.program.check.walk import Walk
from plait.program.instructions import Collective, Compute, Instruction, Recv, Send, Update, Wait
from plait.program.layout import Layout
from plait.program.program import Program, RankProgram
from plait.program.simulate.schedule_clock import durations, program_of_schedule
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Costs
from plait.run.prepare.programs import Programs
from plait.trace.files import read_trace
from plait.trace.span import Trace

DURATIONS = {"first": 2.0, "second": 2.0, "reduce 0": 3.0, "reduce 1": 3.0, "update": 1.0}


def reduce(number: int, position: int) -> Collective:
    return Collective(
        id=position, name=f"reduce {number}", kind="communication", lane="communication", op="all_reduce", axis="data",
        num_bytes=8,
    )  # fmt: skip


def wait(position: int, of: int) -> Wait:
    return Wait(id=position, name=f"wait for {of}", kind="wait", of=of)


def compute(name: str, position: int) -> Compute:
    return Compute(id=position, name=name, kind="backward", segment=name)


def program_of(*ranks: tuple[Instruction, ...]) -> Program:
    """A program whose ranks do exactly this."""
    plan = plait.resolve("ddp", len(ranks))
    return Program(
        plan=plan,
        layout=Layout(mesh=plan.mesh, axes=(), parameters={}),
        micro_batches=(len(ranks),),
        shares=((1,) * len(ranks),),
        classes=tuple(
            RankProgram(instructions=own, buckets=(), segments={}, values={}, constants={}) for own in ranks
        ),
        members=tuple(range(len(ranks))),
        gathered=(),
        notices=(),
        total_weight=1.0,
    )


UPDATE = Update(id=6, name="update", kind="update")
OVERLAPPED = (
    compute("first", 0),
    reduce(0, 1),
    compute("second", 2),
    reduce(1, 3),
    wait(4, 1),
    wait(5, 3),
    UPDATE,
)
ONE_BY_ONE = (
    compute("first", 0),
    reduce(0, 1),
    wait(2, 1),
    compute("second", 3),
    reduce(1, 4),
    wait(5, 4),
    UPDATE,
)


def times(trace: Trace, rank: int = 0) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start_s, span.end_s) for span in trace.spans if span.rank == rank}


def test_communication_is_hidden_behind_computation() -> None:
    trace = simulate(
        program_of(OVERLAPPED, OVERLAPPED), lambda rank, instruction: DURATIONS[instruction.name]
    )
    assert times(trace) == {
        "first": (0, 2),
        "reduce 0": (2, 5),
        "second": (2, 4),
        "reduce 1": (4, 8),  # issued at 4, begun at 5: one after the other on its lane
        "wait for 1": (4, 5),
        "wait for 3": (5, 8),
        "update": (8, 9),
    }
    assert times(trace, 1) == times(trace, 0)
    assert trace.source == "simulated"


def test_without_overlap_a_step_is_the_sum() -> None:
    trace = simulate(
        program_of(ONE_BY_ONE, ONE_BY_ONE), lambda rank, instruction: DURATIONS[instruction.name]
    )
    assert times(trace)["update"] == (10, 11)


def test_everybody_waits_for_the_slowest() -> None:
    def duration(rank: int, instruction: Instruction) -> float:
        return 10.0 if (rank, instruction.name) == (1, "second") else DURATIONS[instruction.name]

    trace = simulate(program_of(OVERLAPPED, OVERLAPPED, OVERLAPPED), duration)
    assert times(trace, 0)["wait for 3"] == (5, 15)  # from 12, when rank 1 comes, to 15
    assert times(trace, 0)["reduce 1"] == (4, 15)
    assert times(trace, 1)["reduce 1"] == (12, 15)
    assert {times(trace, rank)["update"] for rank in range(3)} == {(15, 16)}


def test_processors_that_send_by_themselves_compute_meanwhile_for_longer() -> None:
    """Where the wire is what takes long, that does not show."""

    def simulated(wire_s: float) -> Trace:
        times = DURATIONS | {"reduce 0": wire_s, "reduce 1": wire_s}
        return simulate(
            program_of(OVERLAPPED, OVERLAPPED),
            lambda rank, instruction: times[instruction.name],
            at_start=lambda rank, started: 0.25,
            beside=lambda rank, started: 0.5 if started.name == "reduce 0" else 0.0,
        )

    assert times(simulated(1.0))["reduce 0"] == (2.25, 3.25)
    assert times(simulated(1.0))["wait for 1"] == (4.5, 5)
    assert times(simulated(1.0))["wait for 3"] == (5, 5.5)
    assert times(simulated(3.0))["wait for 1"] == (4.5, 5.25)


@pytest.mark.parametrize(
    ("links", "ends"), [({}, 6), ({"groups": 2}, 6), ({"algorithm": "ring"}, 8), ({"groups": 3}, 6)]
)
def test_others_have_the_wire_while_a_collective_waits_for_its_latency(
    links: dict[str, Any], ends: float
) -> None:
    """Of 3 s the wire is needed for 1: issued at 2, the second one ends at 5; hop by hop on one lane it begins at 4."""
    program = program_of(OVERLAPPED, OVERLAPPED)
    lanes = replace(program, plan=plait.resolve("ddp", 2, {"links": links}))
    both = DURATIONS | {"first": 1.0, "second": 1.0}
    trace = simulate(
        lanes, lambda rank, instruction: both[instruction.name], latency=lambda rank, collective: 2.0
    )
    assert times(trace)["reduce 0"] == (1, 4)
    assert times(trace)["update"][1] == ends


def test_steps_follow_each_other() -> None:
    trace = simulate(
        program_of(OVERLAPPED, OVERLAPPED), lambda rank, instruction: DURATIONS[instruction.name], steps=3
    )
    ends = [span.end_s for span in trace.spans if span.name == "update" and span.rank == 0]
    assert ends == [9, 18, 27]


def test_a_deadlock_is_found_and_told() -> None:
    alone = (compute("first", 0), UPDATE)
    with pytest.raises(ProgramError, match="deadlocks: rank 0 in wait for 1"):
        simulate(program_of(ONE_BY_ONE, alone), lambda rank, instruction: 1.0)


def compiled(plan: Plan) -> Program:
    job = ZOO["mlp"].job(batch=8)
    source = open_data(job.data, job.collate)
    sizes = [(4,) * plan.mesh.size]
    return Programs(job, source, plan, torch.device("cpu")).for_sizes(sizes)


def test_overlap_pays_in_a_compiled_program() -> None:
    """With small buckets and slow links, sending while the backward goes on is faster than sending afterwards."""

    def step_s(overlap: bool) -> float:
        plan = plait.resolve("ddp", 2, {"sync": {"bucket_mib": 0, "overlap": overlap}})
        trace = simulate(compiled(plan), lambda rank, instruction: 1.0)
        return max(span.end_s for span in trace.spans)

    assert step_s(True) < step_s(False)


def test_a_compiled_program_takes_its_compute_and_what_is_not_hidden() -> None:
    plan = plait.resolve("ddp", 2)
    program = compiled(plan)
    instructions = program.of(0).instructions
    local = [i for i in instructions if not isinstance(i, Collective | Wait)]
    free = simulate(program, lambda rank, i: 0.0 if isinstance(i, Collective) else 1.0)
    assert max(span.end_s for span in free.spans) == len(local)
    slow = simulate(program, lambda rank, i: 100.0 if isinstance(i, Collective) else 1.0)
    collectives = [i for i in instructions if isinstance(i, Collective)]
    assert 100 * len(collectives) < max(s.end_s for s in slow.spans) <= 100 * len(collectives) + len(local)
    assert {(s.rank, s.instruction) for s in slow.spans} == {
        (r, i.id) for r in range(2) for i in instructions
    }


@pytest.mark.timeout(60)
def test_a_measured_trace_can_be_simulated_again(tmp_path: Path) -> None:
    job = replace(ZOO["mlp"].job(batch=8, steps=6), shuffle=False)
    result = plait.train(job, "ddp", 2, out=tmp_path / "run")
    trace = read_trace(result.folder)
    program = compiled(plait.resolve("ddp", 2))
    again = simulate(program, measured_durations(trace, program).duration)
    names = {(span.rank, span.instruction): span.name for span in trace.spans}
    assert {(span.rank, span.instruction): span.name for span in again.spans}.items() <= names.items()
    for rank in (0, 1):
        measured = (
            sum(s.end_s - s.start_s for s in trace.spans if s.rank == rank and s.kind == "backward") / 6
        )
        simulated = sum(s.end_s - s.start_s for s in again.spans if s.rank == rank and s.kind == "backward")
        assert simulated == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("instructions", [ONE_BY_ONE, OVERLAPPED])
def test_waiting_is_no_duration_of_a_collective(instructions: tuple[Instruction, ...]) -> None:
    def duration(rank: int, instruction: Instruction) -> float:
        return 10.0 if (rank, instruction.name) == (1, "first") else DURATIONS[instruction.name]

    program = program_of(instructions, instructions)
    learned = measured_durations(simulate(program, duration, steps=2), program).duration
    assert learned(0, instructions[1]) == learned(1, instructions[1]) == 3.0  # rank 0 stood there for longer
    assert times(simulate(program, learned)) == times(simulate(program, duration))


def send(position: int, message: str, to: int) -> Send:
    return Send(
        id=position, name=f"send {message}", kind="communication", lane="communication", axis="data", to=to,
        message=message,
    )  # fmt: skip


def recv(position: int, message: str, source: int) -> Recv:
    return Recv(
        id=position, name=f"receive {message}", kind="communication", lane="communication", axis="data",
        source=source, message=message,
    )  # fmt: skip


def takes(rank: int, instruction: Instruction) -> float:
    return 3.0 if isinstance(instruction, Send) else DURATIONS[instruction.name]


def test_messages_of_one_direction_travel_one_after_the_other() -> None:
    """The sender goes on; the receiver stands still until what it waits for is there; the way back is free."""
    first = (
        compute("first", 0), send(1, "a", 1), send(2, "b", 1), recv(3, "c", 1), compute("second", 4), wait(5, 3),
    )  # fmt: skip
    second = (
        recv(0, "b", 0), recv(1, "a", 0), send(2, "c", 0), wait(3, 1), compute("first", 4), wait(5, 0),
        UPDATE,
    )  # fmt: skip
    trace = simulate(program_of(first, second), takes)
    assert times(trace, 0) == {
        "first": (0, 2),
        "send a": (2, 5),
        "send b": (2, 8),  # leaves at 5
        "receive c": (2, 3),
        "second": (2, 4),
        "wait for 3": (4, 4),
    }
    assert times(trace, 1) == {
        "send c": (0, 3),
        "receive a": (0, 5),
        "receive b": (0, 8),
        "wait for 1": (0, 5),
        "first": (5, 7),
        "wait for 0": (7, 8),
        "update": (8, 9),
    }


def test_a_receive_after_the_message_came_takes_no_time() -> None:
    late = (compute("first", 0), compute("second", 1), recv(2, "a", 0), wait(3, 2))
    trace = simulate(program_of((send(0, "a", 1),), late), takes)
    assert times(trace, 1)["receive a"] == times(trace, 1)["wait for 2"] == (4, 4)


def test_ranks_that_wait_for_each_others_messages_are_told() -> None:
    first = (recv(0, "b", 1), wait(1, 0), send(2, "a", 1))
    second = (recv(0, "a", 0), wait(1, 0), send(2, "b", 0))
    with pytest.raises(ProgramError, match="deadlocks: rank 0 in wait for 0, rank 1 in wait for 0"):
        simulate(program_of(first, second), takes)


class Counted(tuple[Instruction, ...]):
    """Instructions that know how often they were looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_instruction_is_looked_at_more_than_twice(name: str) -> None:
    """Long pipelines and many micro-batches are simulated in a time that grows as the instructions do."""
    program = program_of_schedule(name, SCHEDULES[name](12, 1, 30))
    counted = [replace(entry, instructions=Counted(entry.instructions)) for entry in program.classes]
    Counted.looks = 0
    done = list(Walk(replace(program, classes=tuple(counted))))
    total = sum(len(entry.instructions) for entry in program.classes)
    assert len(done) == total <= Counted.looks <= 2 * total


def test_durations_of_messages_are_learned_from_a_trace() -> None:
    """A pipeline simulated with what was learned from its trace takes the same time; so does a hop."""
    program = program_of_schedule("1f1b", SCHEDULES["1f1b"](3, 1, 5))
    truth = durations(Costs(forward=2.0, input=1.0, weight=1.0), message=0.5)
    trace = simulate(program, truth, steps=2)
    learned = measured_durations(trace, program).duration
    for rank in range(3):
        for instruction in program.of(rank).instructions:
            if isinstance(instruction, Compute | Send):
                assert learned(rank, instruction) == truth(rank, instruction)
    assert simulate(program, learned, steps=2).spans == trace.spans
