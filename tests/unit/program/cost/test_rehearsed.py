"""What was rehearsed of a program decides how long its instructions keep a rank, and of no other one."""

from dataclasses import replace

from tests.unit.program.exact_programs import compiled

from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.options import Emulation
from plait.program.cost.durations import Durations
from plait.program.cost.op_key import rehearsed_key
from plait.program.instructions import Collective, Compute, Load, Recv, Send
from plait.program.program import Program

NETWORK = emulated(parse_cluster("2xcpu"), Emulation.parse("bandwidth=1Gbit,latency=1ms,hosts=2x1"))


def durations(program: Program, of: Program, seconds: float) -> Durations:
    """With that time for all instructions of `of`."""
    every = [(rank, i) for rank in range(2) for i in of.of(rank).instructions]
    timed = {rehearsed_key(of, rank, type(i), i.name, 2): seconds for rank, i in every}
    return Durations(program, replace(NETWORK, device=replace(NETWORK.device, timed=timed)), {})


def test_instructions_take_what_they_took() -> None:
    program = compiled("mlp", "ddp", {"data": 2}, 8)
    found = durations(program, program, 5.0)
    kinds = dict.fromkeys(map(type, program.classes[0].instructions))
    assert {Load, Compute, Collective} <= kinds.keys()
    for instruction in program.classes[0].instructions:
        if isinstance(instruction, Collective):  # half of it before the wire, half after it
            assert found.at_start(0, instruction) == found.own_part(0, instruction) == 2.5
            assert found.latency(0, instruction) < 1
        elif instruction.lane == "compute" and instruction.kind != "wait":
            assert found.duration(0, instruction) == 5.0


def test_messages_between_hosts_keep_both_ends() -> None:
    program = compiled("mlp", "1f1b", {"pipe": 2}, 8)
    found = durations(program, program, 5.0)
    (send,) = (i for i in program.of(0).instructions if isinstance(i, Send))
    (recv,) = (i for i in program.of(1).instructions if isinstance(i, Recv))
    assert found.at_start(0, send) == found.own_part(1, recv) == 5.0
    assert found.duration(0, send) < 1  # on its way


def test_another_program_has_times_of_its_own() -> None:
    program, other = (compiled("mlp", plan, {"data": 2}, 8) for plan in ("ddp", "zero1"))
    found = durations(program, other, 5.0)
    assert all(found.duration(0, i) < 1 for i in program.classes[0].instructions if isinstance(i, Compute))
