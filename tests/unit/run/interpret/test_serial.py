"""The serial interpreter: mailboxes, turns, and a deadlock that is told instead of waited for."""

from dataclasses import replace

import pytest
import torch
from tests.unit.program.compiled import program_of, with_instructions
from tests.unit.run.training import case_job

from plait.errors import HangError
from plait.job.data.share import Share
from plait.plan.mesh import Mesh
from plait.program.instructions import Collective
from plait.program.program import Program
from plait.program.value import WEIGHT
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.interpret.serial import Mailboxes, SerialLinks, Unobserved, add_up, run_step


def collective(op: str = "all_reduce", dim: int = 0, extents: tuple[int, ...] = ()) -> Collective:
    return Collective(
        name="c", op=op, axis="data", dim=dim, extents=extents, reads=(WEIGHT,), writes=(WEIGHT,)  # type: ignore[arg-type]
    )  # fmt: skip


def links(ranks: int) -> list[SerialLinks]:
    boxes = Mailboxes(Mesh(axes=(("data", ranks),)))
    return [SerialLinks(boxes, rank) for rank in range(ranks)]


def test_a_sum_is_ready_when_everybody_has_arrived() -> None:
    first, second = links(2)
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    early = first.start(collective(), a)
    assert not early.ready()
    late = second.start(collective(), b)
    assert early.ready() and late.ready()
    assert early.result() is a, "an all-reduce works in place"
    assert late.result().item() == 3.0
    assert a.item() == 3.0


def test_collectives_meet_in_the_order_of_their_start() -> None:
    first, second = links(2)
    ours = [first.start(collective(), torch.tensor([value])) for value in (1.0, 10.0)]
    theirs = [second.start(collective(), torch.tensor([value])) for value in (2.0, 20.0)]
    assert [handle.result().item() for handle in reversed(ours)] == [30.0, 3.0]
    assert [handle.result().item() for handle in theirs] == [3.0, 30.0]


def test_pieces_of_unequal_extent_are_joined() -> None:
    three = links(3)
    pieces = [torch.full((2, extent), float(rank)) for rank, extent in enumerate((2, 0, 1))]
    handles = [
        link.start(collective("all_gather", 1, (2, 0, 1)), piece)
        for link, piece in zip(three, pieces, strict=True)
    ]
    results = [handle.result() for handle in handles]
    assert results[0].tolist() == [[0.0, 0.0, 2.0]] * 2
    results[0].zero_()
    assert results[1].tolist() == [[0.0, 0.0, 2.0]] * 2, "every rank has a copy of its own"


def test_the_sum_is_taken_in_the_order_of_ranks() -> None:
    numbers = [torch.tensor(value) for value in (1e8, 1.0, -1e8)]
    assert add_up(numbers).item() == ((numbers[0] + numbers[1]) + numbers[2]).item()
    assert numbers[0].item() == 1e8, "the summands are left alone"


def machines(program: Program, ranks: int) -> list[Machine]:
    boxes = Mailboxes(program.plan.mesh)
    job = case_job("mlp", torch.float64)
    cpu = torch.device("cpu")
    return [
        Machine(rank, ModelState(job, cpu, torch.float64), SerialLinks(boxes, rank), Unobserved())
        for rank in range(ranks)
    ]


def shares(sizes: tuple[int, ...]) -> list[list[Share]]:
    return [
        [
            Share(
                batch=(torch.ones(size, 16), torch.zeros(size, dtype=torch.int64)), ids=tuple(range(size)), sizes=sizes,
                offset=sum(sizes[:rank]), global_offset=0,
            )
        ]
        for rank, size in enumerate(sizes)
    ]  # fmt: skip


def test_a_step_runs_all_ranks_to_the_end() -> None:
    program = program_of("mlp", 2)
    ranks = machines(program, 2)
    run_step(ranks, program, 0, shares((4, 3)))
    assert all(machine.state.steps_done == 1 for machine in ranks)
    outcomes = [machine.outcome for machine in ranks if machine.outcome is not None]
    assert outcomes[0].loss == outcomes[1].loss
    assert float(outcomes[0].weight) == 7.0


def test_nothing_of_a_micro_batch_is_left_after_a_step() -> None:
    program = program_of("mlp", 2)
    ranks = machines(program, 2)
    run_step(ranks, program, 0, shares((4, 3)))
    for machine in ranks:
        assert not [v for v in machine._values if v.micro_batch is not None and v.kind != "offset"]


def test_a_deadlock_is_told_with_who_waits_for_what() -> None:
    """Rank 1 never sends its bucket: rank 0 would wait for ever."""
    program = program_of("mlp", 2)
    kept = [i for i in program.classes[1].instructions if "bucket:" not in i.name]
    planted = with_instructions(program, kept, 1)
    with pytest.raises(HangError, match=r"step 1: all ranks wait: rank 0 in wait for bucket:0") as raised:
        run_step(machines(planted, 2), planted, 0, shares((4, 3)))
    assert raised.value.waiting == (0,)


def test_the_first_step_of_a_program_is_new_to_a_rank() -> None:
    """On a GPU kernels are loaded then, and messages are asked for late."""
    program, other = program_of("mlp", 2), program_of("mlp", 2, (6,))
    ranks = machines(program, 2)
    seen = []
    for number, (of, sizes) in enumerate(
        [(program, (4, 3)), (program, (4, 3)), (other, (3, 3)), (program, (4, 3))]
    ):
        run_step(ranks, of, number, shares(sizes))
        seen.append(ranks[0]._at.is_new)
    assert seen == [True, False, True, False]


def test_a_host_may_be_held_by_a_device_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks which launch into a full queue count as waiting; not while kernels are loaded."""
    program = program_of("mlp", 2)
    ranks = machines(program, 2)
    for number in range(2):
        run_step(ranks, program, number, shares((4, 3)))
    machine, handle = (
        ranks[0],
        SerialLinks(Mailboxes(Mesh(axes=(("data", 2),))), 0).start(collective(), torch.ones(1)),
    )
    first, later = replace(machine._at, is_new=True), machine._at
    assert not machine._traffic.may_hold(later)
    machine._traffic.keep(collective(), handle)
    assert not machine._traffic.may_hold(later), "a processor is held by nobody"
    monkeypatch.setattr(machine.state, "device", torch.device("cuda"))
    assert machine._traffic.may_hold(later)
    assert not machine._traffic.may_hold(first)
