"""The checker finds what is planted in pipelines, and names both instructions, their ranks, stages and micro-batches.

The sound program is 1F1B on `pipe=2 x data=2`: each stage sums a bucket of its own over its own pair of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.errors import ProgramError
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, PIPE, Plan
from plait.program.check.soundness import check_program
from plait.program.instructions import (
    Accumulate,
    Collective,
    Compute,
    Instruction,
    Join,
    Recv,
    Send,
    Update,
    Wait,
)
from plait.program.layout import Layout
from plait.program.program import Bucket, Program, RankProgram, Spec
from plait.program.simulate.schedule_clock import program_of_schedule
from plait.program.stage.schedules import SCHEDULES
from plait.program.value import WEIGHT, Value

BUCKET, node = Value.bucket(0), Value.node
Plant = Callable[[list[Any]], Sequence[Instruction]]


def stage_program(pipeline: Sequence[Instruction], stage: int, micro_batches: int) -> RankProgram:
    """A stage's part of the pipeline, its gradients summed over `data`."""
    made: list[Instruction] = []
    ids: dict[int, int] = {}
    for given in pipeline:
        ids[given.id] = len(made)
        again = replace(given, id=len(made), num_bytes=64 if isinstance(given, Send | Recv) else 0)
        if isinstance(again, Wait):
            again = replace(again, of=ids[again.of])
        number = again.micro_batch
        if isinstance(again, Compute) and again.kind == "backward":
            assert number is not None
            gradient = node("gradient", number)
            made += [
                replace(again, writes=(*again.writes, gradient)),
                Accumulate(
                    id=len(made) + 1, name="bucket 0", kind="backward", reads=(gradient,), writes=(BUCKET,),
                    frees=(gradient,), bucket=0, fresh=number == 0, begins=number == 0, micro_batch=number, stage=stage,
                ),
            ]  # fmt: skip
        else:
            made.append(again)
    count = len(made)
    made += [
        Collective(
            id=count, name="all_reduce bucket:0", kind="communication", op="all_reduce", axis=DATA,
            reads=(BUCKET,), writes=(BUCKET,), num_bytes=16 * (stage + 1), stage=stage,
        ),
        Wait(id=count + 1, name="wait for bucket:0", kind="wait", of=count, reads=(BUCKET,), writes=(BUCKET,)),
        Update(id=count + 2, name="update", kind="update", reads=(BUCKET,)),
    ]  # fmt: skip
    bucket = Bucket(
        parameters=(f"layer{stage}",), shapes=((4 * (stage + 1),),), dtype=torch.float32, axis=DATA
    )
    values = {
        node(f"{name}.1", number): Spec(kind="activation", shape=(4, 4), dtype=torch.float32)
        for number in range(micro_batches)
        for name in ("x", "dx")
    }
    return RankProgram(instructions=tuple(made), buckets=(bucket,), segments={}, values=values, constants={})


def sound(schedule: str = "1f1b", micro_batches: int = 3) -> Program:
    """Two stages on two ranks each."""
    pipeline = program_of_schedule(schedule, SCHEDULES[schedule](2, 1, micro_batches))
    mesh = Mesh(axes=((PIPE, 2), (DATA, 2)))
    return replace(
        pipeline,
        plan=Plan(name=schedule, mesh=mesh),
        layout=Layout(mesh=mesh, axes=(), parameters={}),
        classes=tuple(stage_program(pipeline.of(s).instructions, s, micro_batches) for s in range(2)),
        members=(0, 0, 1, 1),
    )


def planted(plant: Plant, of_class: int, program: Program | None = None) -> Program:
    program = program or sound()
    classes = list(program.classes)
    given = list(classes[of_class].instructions)
    classes[of_class] = replace(classes[of_class], instructions=tuple(plant(given)))
    return replace(program, classes=tuple(classes))


def says(plant: Plant, *parts: str, of_class: int) -> None:
    with pytest.raises(ProgramError) as raised:
        check_program(planted(plant, of_class))
    for part in parts:
        assert part in raised.value.what


def find(of_class: int, kind: type, name: str) -> Any:
    return next(i for i in sound().classes[of_class].instructions if isinstance(i, kind) and name in i.name)


def text(instruction: Instruction) -> str:
    number = "" if instruction.micro_batch is None else f", micro-batch {instruction.micro_batch}"
    return f"instruction {instruction.id} ({instruction.name}) of stage {instruction.stage}{number}"


def without(*gone: Instruction) -> Plant:
    ids = {i.id for i in gone}
    return lambda given: [i for i in given if i.id not in ids]


def changed(old: Instruction, **fields: Any) -> Plant:
    return lambda given: [replace(i, **fields) if i.id == old.id else i for i in given]


def moved(what: Sequence[Instruction], before: Instruction) -> Plant:
    ids = {i.id for i in what}

    def plant(given: list[Any]) -> list[Instruction]:
        rest = [i for i in given if i.id not in ids]
        place = next(index for index, i in enumerate(rest) if i.id == before.id)
        return [*rest[:place], *what, *rest[place:]]

    return plant


def test_stages_need_not_start_the_same_collectives() -> None:
    for schedule in ("naive", "gpipe", "1f1b"):
        check_program(sound(schedule))


def test_a_message_that_nobody_receives() -> None:
    recv, wait = find(1, Recv, "micro-batch 1"), find(1, Wait, "forward 0>1 micro-batch 1")
    send = find(0, Send, "micro-batch 1")
    user = next(
        i for i in sound().classes[1].instructions if isinstance(i, Compute) and node("x.1", 1) in i.reads
    )
    says(
        without(recv, wait),
        f"rank 0 sends 'forward 0>1 micro-batch 1' to rank 2 in {text(send)}; it is never received",
        f"Rank 2 needs it in {text(user)}",
        of_class=1,
    )


def test_a_message_that_nobody_sends() -> None:
    send, recv = find(1, Send, "micro-batch 2"), find(0, Recv, "backward 1>0 micro-batch 2")
    maker = next(
        i for i in sound().classes[1].instructions if isinstance(i, Compute) and node("dx.1", 2) in i.writes
    )
    says(
        without(send),
        f"rank 0 receives 'backward 1>0 micro-batch 2' from rank 2 in {text(recv)}; it is never sent",
        f"Rank 2 makes it in {text(maker)}",
        of_class=1,
    )


def test_a_message_that_is_sent_twice() -> None:
    send = find(0, Send, "micro-batch 1")
    again = replace(send, id=900)
    says(
        lambda given: [*given, again],
        f"rank 0 sends 'forward 0>1 micro-batch 1' twice: {text(send)} and {text(again)}",
        of_class=0,
    )


def test_a_message_to_nowhere() -> None:
    send = find(0, Send, "micro-batch 1")
    says(changed(send, to=2), f"rank 0, {text(send)}: coordinate 2 on pipe is no other rank", of_class=0)
    says(changed(send, to=0), f"rank 0, {text(send)}: coordinate 0 on pipe is no other rank", of_class=0)


def test_a_message_of_other_size_than_expected() -> None:
    send, recv = find(0, Send, "micro-batch 1"), find(1, Recv, "forward 0>1 micro-batch 1")
    says(
        changed(recv, num_bytes=32),
        f"rank 0 sends 1 values of 64 bytes in {text(send)}",
        f"rank 2 expects 1 of 32 bytes in {text(recv)}",
        of_class=1,
    )
    program = sound()
    other = {
        **program.classes[1].values,
        node("x.1", 1): Spec(kind="activation", shape=(2, 8), dtype=torch.float32),
    }
    classes = (program.classes[0], replace(program.classes[1], values=other))
    with pytest.raises(ProgramError, match=r"rank 0 sends 1 values .*\(send forward 0>1 micro-batch 1\)"):
        check_program(replace(program, classes=classes))


def test_two_messages_in_an_order_that_deadlocks() -> None:
    """Stage 1 wants micro-batch 2 before it gives back 0; stage 0 sends 2 after it has got 0."""
    before = find(1, Recv, "micro-batch 1")
    recv, wait = find(1, Recv, "micro-batch 2"), find(1, Wait, "forward 0>1 micro-batch 2")
    back, send = find(1, Send, "backward 1>0 micro-batch 0"), find(0, Send, "forward 0>1 micro-batch 2")
    stuck = find(0, Wait, "backward 1>0 micro-batch 0")
    says(
        moved((before, recv, wait), before=back),
        f"rank 0 in {text(stuck)} for {text(back)} of rank 2",
        f"rank 2 in {text(wait)} for {text(send)} of rank 0",
        of_class=1,
    )


def test_a_collective_and_a_message_that_wait_for_each_other() -> None:
    """Rank 0 sums with rank 1 before it sends; rank 1 sums after it has got what depends on rank 0's message."""
    program = replace(sound(), plan=Plan(name="1f1b", mesh=Mesh(axes=((PIPE, 2),))), members=(0, 1))
    classes = []
    for index, entry in enumerate(program.classes):
        rest, end = list(entry.instructions[:-3]), entry.instructions[-3:]
        extra = Collective(
            id=800, name="all_reduce weight", kind="communication", op="all_reduce", axis=PIPE, reads=(WEIGHT,),
            writes=(WEIGHT,), num_bytes=8,
        )  # fmt: skip
        made = Compute(id=802, name="weight", kind="forward", segment="weight", writes=(WEIGHT,))
        early = [made, extra, Wait(id=801, name="wait for weight", kind="wait", of=800)]
        rest = [*early, *rest] if index == 0 else [*rest[:-1], *early, *rest[-1:]]
        classes.append(replace(entry, instructions=(*rest, *end)))
    first = find(1, Wait, "forward 0>1 micro-batch 0")
    with pytest.raises(ProgramError) as raised:
        check_program(replace(program, classes=tuple(classes)))
    assert (
        "rank 0 in instruction 801 (wait for weight) for instruction 800 (all_reduce weight) of rank 1"
        in str(raised.value)
    )
    assert f"rank 1 in {text(first)} for {text(find(0, Send, 'micro-batch 0'))} of rank 0" in str(
        raised.value
    )


def test_a_received_value_that_is_used_before_its_wait() -> None:
    recv, wait = find(1, Recv, "micro-batch 1"), find(1, Wait, "forward 0>1 micro-batch 1")
    user = next(
        i for i in sound().classes[1].instructions if isinstance(i, Compute) and node("x.1", 1) in i.reads
    )
    says(
        moved((user,), before=wait),
        f"rank 2: {text(user)} uses 1/x.1 while {text(recv)} is still communicating it",
        of_class=1,
    )


def test_a_message_that_nobody_awaits() -> None:
    recv, wait = find(0, Recv, "micro-batch 2"), find(0, Wait, "backward 1>0 micro-batch 2")
    user = next(
        i for i in sound().classes[0].instructions if isinstance(i, Compute) and node("dx.1", 2) in i.reads
    )

    def plant(given: list[Any]) -> list[Instruction]:
        alone = replace(user, reads=(node("kept.0", 2),), frees=(node("kept.0", 2),))
        return [alone if i.id == user.id else i for i in given if i.id != wait.id]

    says(plant, f"rank 0: {text(recv)} is never awaited", of_class=0)


def test_a_gradient_that_is_summed_twice() -> None:
    first, wait = find(1, Collective, "bucket:0"), find(1, Wait, "bucket:0")
    again = (replace(first, id=900), replace(wait, id=901, of=900))
    update = find(1, Update, "update")
    says(
        moved(again, before=update),
        "rank 2: bucket:0 is summed 2 times over data; it must be 1",
        text(first),
        text(again[0]),
        of_class=1,
    )


def test_a_gradient_that_is_not_summed() -> None:
    last = [i for i in sound().classes[1].instructions if isinstance(i, Accumulate)][-1]
    says(
        without(find(1, Collective, "bucket:0"), find(1, Wait, "wait for bucket:0")),
        "rank 2: bucket:0 is summed 0 times over data; it must be 1",
        text(last),
        of_class=1,
    )


def test_a_gradient_that_is_added_twice() -> None:
    added = [i for i in sound().classes[0].instructions if isinstance(i, Accumulate)][1]
    again = replace(added, id=900)

    def plant(given: list[Any]) -> list[Instruction]:
        place = next(index for index, i in enumerate(given) if i.id == added.id)
        return [*given[:place], replace(added, frees=()), again, *given[place + 1 :]]

    says(
        plant,
        f"gradient 1/gradient of layer0 is added by {text(added)} and again by {text(again)}",
        of_class=0,
    )


def test_a_micro_batch_whose_gradient_is_not_added() -> None:
    added = [i for i in sound().classes[0].instructions if isinstance(i, Accumulate)]
    made = next(i for i in sound().classes[0].instructions if node("gradient", 1) in i.writes)

    def plant(given: list[Any]) -> list[Instruction]:
        kept = [i for i in given if i.id != added[1].id]
        return [replace(i, frees=(*i.frees, node("gradient", 1))) if i.id == made.id else i for i in kept]

    says(
        plant,
        f"bucket:0 misses the gradients of micro-batch 1: {text(added[0])} to {text(added[2])}",
        of_class=0,
    )


def test_a_value_that_is_freed_twice_or_never() -> None:
    send = find(0, Send, "micro-batch 1")
    later = find(0, Send, "micro-batch 2")
    says(
        changed(later, frees=(node("x.1", 1), node("x.1", 2))),
        f"1/x.1 is freed by {text(send)} and again by {text(later)}",
        of_class=0,
    )
    made = next(i for i in sound().classes[0].instructions if node("x.1", 1) in i.writes)
    says(changed(send, frees=()), f"1/x.1, written by {text(made)}, is never freed", of_class=0)
    says(
        changed(send, frees=(node("x.1", 1), node("x.1", 9))),
        f"{text(send)} frees 9/x.1, which nobody has written",
        of_class=0,
    )


def test_ranks_of_a_stage_that_sum_other_gradients() -> None:
    program = sound()
    other = replace(
        program.classes[1], buckets=(replace(program.classes[1].buckets[0], parameters=("other",)),)
    )
    third = replace(program, classes=(*program.classes, other), members=(0, 0, 1, 2))
    with pytest.raises(ProgramError) as raised:
        check_program(third)
    sums = text(find(1, Collective, "bucket:0"))
    assert (
        "ranks 2 and 3 of class 1 and class 2 do not start the same collectives over data"
        in raised.value.what
    )
    assert raised.value.what.count(sums) == 2


def tied() -> Program:
    """Both stages train the same parameter and give each other their part."""
    program = sound()
    classes = []
    for own, entry in enumerate(program.classes):
        *rest, sent, wait, update = entry.instructions
        other, what = 1 - own, ("tied 0>1", "tied 1>0")
        part = (Value.tied_part(0, other),)
        exchange: list[Instruction] = [
            Recv(
                id=700, name=f"receive {what[other]}", kind="communication", axis=PIPE, source=other,
                message=what[other], writes=part, num_bytes=16,
            ),
            Send(
                id=701, name=f"send {what[own]}", kind="communication", axis=PIPE, to=other, message=what[own],
                reads=(BUCKET,), num_bytes=16,
            ),
            Wait(id=702, name=f"wait for {what[other]}", kind="wait", of=700, reads=part, writes=part),
            Join(
                id=703, name="join tied", kind="update", bucket=0, reads=(BUCKET, *part), writes=(BUCKET,),
                frees=part, parts=(other,), own=own, stage=own,
            ),
        ]  # fmt: skip
        bucket = replace(entry.buckets[0], parameters=("tied",), shapes=((4,),), tied=(0, 1))
        last = (replace(sent, num_bytes=16), wait, *exchange, replace(update, id=704))
        classes.append(replace(entry, instructions=(*rest, *last), buckets=(bucket,)))
    return replace(program, classes=tuple(classes))


def test_tied_gradients_are_joined_once_on_every_stage() -> None:
    check_program(tied())
    join = next(i for i in tied().classes[1].instructions if isinstance(i, Join))

    def twice(given: list[Any]) -> list[Instruction]:
        return [*given[:-2], replace(join, id=702, frees=()), *given[-2:]]

    faults: list[tuple[Plant, str]] = [
        (changed(join, bucket=9), "rank 2: bucket:0, tied over (0, 1) of pipe, is joined 0 times"),
        (twice, f"is joined 2 times: {text(replace(join, id=702))}: {text(join)}"),
        (
            changed(join, parts=(3,)),
            f"{text(join)} adds the parts of (3,) to that of 1; bucket:0 is tied over (0, 1)",
        ),
        (
            lambda given: [*given[:-1], replace(given[-1], id=1)],
            "not between its last gradient and the update",
        ),
    ]
    for plant, told in faults:
        with pytest.raises(ProgramError) as raised:
            check_program(planted(plant, 1, tied()))
        assert told in raised.value.what


def test_a_tied_gradient_that_one_stage_keeps_for_itself() -> None:
    program = sound()
    classes = [
        replace(entry, buckets=(replace(entry.buckets[0], parameters=("same",)),))
        for entry in program.classes
    ]
    with pytest.raises(
        ProgramError, match=r"the gradient of same is made on \[0, 1\] of pipe; bucket:0 is tied over \[\]"
    ):
        check_program(replace(program, classes=tuple(classes)))
