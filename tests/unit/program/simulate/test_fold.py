"""Folded simulation: one rank of each class says what all of them would say."""

from collections import Counter

import pytest
from tests.unit.program.exact_programs import compiled, durations_of

import plait
from plait.cluster.parse import parse_cluster
from plait.program.check.walk import Walk
from plait.program.instructions import Collective, Compute, Recv, Send, Wait
from plait.program.layout import Layout
from plait.program.program import Program, RankProgram
from plait.program.simulate.fold import representatives
from plait.program.simulate.simulator import simulate
from plait.program.value import WEIGHT

MESHES = {
    "ddp, even": ("ddp", {"data": 8}, 16, 1),
    "ddp, uneven shares": ("ddp", {"data": 8}, 19, 1),
    "zero3": ("zero3", {"data": 4}, 8, 2),
    "hybrid": ("1f1b", {"pipe": 2, "data": 2, "tensor": 2}, 16, 4),
    "uneven pipeline": ("gpipe", {"pipe": 2, "data": 4}, 18, 3),
}


@pytest.mark.parametrize("case", MESHES)
def test_folded_ranks_have_the_clocks_of_all(case: str) -> None:
    name, mesh, batch, micro = MESHES[case]
    program = compiled("mlp" if "pipe" not in mesh else "gpt", name, mesh, batch, micro)
    # One host: durations may differ between classes, but not within one.
    times = durations_of(program, parse_cluster("1x16xA100"))
    whole = simulate(program, times.duration, steps=2)
    folded = simulate(program, times.duration, steps=2, folded=True)
    shown = set(folded.ranks)
    assert len(shown) == len(program.classes) < len(whole.ranks)
    key = lambda span: (span.rank, span.step, span.instruction, span.lane)  # noqa: E731
    ours = {key(span): (span.start_s, span.end_s) for span in folded.spans}
    all_of = {key(span): (span.start_s, span.end_s) for span in whole.spans if span.rank in shown}
    assert ours.keys() == all_of.keys()
    for place, moment in ours.items():
        assert moment == pytest.approx(all_of[place], rel=1e-12), place
    by_class = {program.members[rank]: rank for rank in shown}
    for span in whole.spans:
        stands_for = by_class[program.members[span.rank]]
        twin = ours[stands_for, span.step, span.instruction, span.lane]
        assert twin == pytest.approx((span.start_s, span.end_s), rel=1e-12)


def test_four_thousand_ranks_cost_as_much_as_their_classes() -> None:
    program = many_ranks(pipe=16, data=64, tensor=4)
    assert program.plan.mesh.size == 4096
    executed = Counter(rank for rank, _, _ in Walk(program, representatives(program)))
    assert len(executed) == 16
    assert sum(executed.values()) == sum(len(entry.instructions) for entry in program.classes)
    trace = simulate(program, lambda rank, instruction: 1.0, folded=True)
    assert len(trace.ranks) == 16 and max(span.end_s for span in trace.spans) > 16


def test_a_program_whose_messages_leave_the_representatives_is_not_folded() -> None:
    plan = plait.resolve("ddp", None, mesh={"data": 4})
    send = Send(id=0, name="send", kind="communication", axis="data", to=3, message="m")
    recv = Recv(id=0, name="recv", kind="communication", axis="data", source=0, message="m")
    idle, wait = Compute(id=0, name="x", kind="forward", segment="x"), Wait(id=1, name="w", kind="wait", of=0)
    program = program_of(plan, [(send,), (idle,), (recv, wait)], (0, 1, 1, 2))
    assert representatives(program) == (0, 1, 1, 3)
    to_second = Send(id=0, name="send", kind="communication", axis="data", to=2, message="m")
    assert representatives(program_of(plan, [(to_second,), (idle,)], (0, 1, 1, 1))) == (0, 1, 2, 3)


def program_of(plan: plait.Plan, lists: list[tuple], members: tuple[int, ...]) -> Program:
    """A program whose classes do exactly this."""
    classes = tuple(
        RankProgram(instructions=own, buckets=(), segments={}, values={}, constants={}) for own in lists
    )
    return Program(
        plan=plan, layout=Layout(mesh=plan.mesh, axes=(), parameters={}), micro_batches=(plan.mesh.size,),
        shares=((1,) * plan.data_ranks,), classes=classes, members=members, gathered=(), notices=(),
        total_weight=1.0,
    )  # fmt: skip


def many_ranks(*, pipe: int, data: int, tensor: int) -> Program:
    """A pipeline whose stages each add up along `tensor` and `data`."""
    plan = plait.resolve("1f1b", None, mesh={"pipe": pipe, "data": data, "tensor": tensor})
    lists = []
    for stage in range(pipe):
        own: list = []
        if stage > 0:
            own.append(
                Recv(id=0, name="r", kind="communication", axis="pipe", source=stage - 1, message=f"m{stage}")
            )
            own.append(Wait(id=1, name="w", kind="wait", of=0))
        own.append(Compute(id=len(own), name="c", kind="forward", segment="c"))
        for axis in ("tensor", "data"):
            at = len(own)
            own.append(
                Collective(
                    id=at, name=axis, kind="communication", lane="communication", op="all_reduce", axis=axis,
                    reads=(WEIGHT,),
                )
            )  # fmt: skip
            own.append(Wait(id=at + 1, name="w", kind="wait", of=at))
        if stage + 1 < pipe:
            own.append(
                Send(
                    id=len(own),
                    name="s",
                    kind="communication",
                    axis="pipe",
                    to=stage + 1,
                    message=f"m{stage + 1}",
                )
            )
        lists.append(tuple(own))
    members = tuple(plan.mesh.coordinate(rank, "pipe") for rank in range(plan.mesh.size))
    return program_of(plan, lists, members)
