"""Collectives as messages, by every algorithm, on any number of ranks: checked, and on numbers what they must be."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plait.errors import PlanError
from plait.program.hops.algorithms import ALGORITHMS, OPERATIONS, rounds_of
from plait.program.hops.program import collective_program
from plait.program.hops.rounds import block_sizes
from plait.program.instructions import Instruction, Send
from plait.program.simulate.simulator import simulate
from plait.run.interpret.serial import Mailboxes, SerialLinks
from plait.run.link.hops import run_hops

COUNT = 23
"""Elements of a tensor: blocks of unequal sizes on any number of ranks but one."""


def serially(
    operation: str, algorithm: str, ranks: int, root: int, hosts: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """(the blocks of every rank afterwards, what every rank had)."""
    program = collective_program(operation, algorithm, ranks, 4 * COUNT, root=root, hosts=hosts)
    number = ranks * ranks if operation == "all_to_all" else ranks
    count = COUNT * number // ranks  # of an all_to_all, a piece for every pair
    given = [torch.arange(count).float() + 1000 * rank for rank in range(ranks)]
    blocks = [list(own.clone().split(block_sizes(len(own), number))) for own in given]
    boxes = Mailboxes(program.plan.mesh)
    running: dict[int, Iterator[None]] = {
        rank: run_hops(program.of(rank).instructions, SerialLinks(boxes, rank), blocks[rank])
        for rank in range(ranks)
    }
    while running:
        for rank, turns in list(running.items()):
            if next(turns, StopIteration) is StopIteration:
                del running[rank]
    assert not any(boxes.letters.values()), "a message was not taken"
    return blocks, given


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_collective_by_every_algorithm(operation: str, algorithm: str) -> None:
    for ranks, root, hosts in (
        (1, 0, 1),
        (2, 1, 1),
        (3, 0, 1),
        (4, 3, 2),
        (5, 2, 1),
        (6, 4, 3),
        (7, 0, 1),
        (8, 5, 2),
    ):
        blocks, given = serially(operation, algorithm, ranks, root, hosts)
        total = torch.stack(given).sum(0)
        sizes = block_sizes(len(given[0]), ranks)
        for rank in range(ranks):
            found = torch.cat(blocks[rank])
            match operation:
                case "broadcast":
                    assert torch.equal(found, given[root])
                case "all_reduce":
                    assert torch.equal(found, total)
                case "reduce":
                    assert rank != root or torch.equal(found, total)
                case "reduce_scatter":
                    assert torch.equal(blocks[rank][rank], total.split(sizes)[rank])
                case "scatter":
                    assert torch.equal(blocks[rank][rank], given[root].split(sizes)[rank])
                case "all_gather" | "gather":
                    wanted = torch.cat([own.split(sizes)[at] for at, own in enumerate(given)])
                    assert (operation == "gather" and rank != root) or torch.equal(found, wanted)
                case "all_to_all":
                    for source in range(ranks):
                        block = source * ranks + rank
                        theirs = given[source].split(block_sizes(len(given[source]), ranks * ranks))[block]
                        assert torch.equal(blocks[rank][block], theirs)


def sent_bytes(operation: str, algorithm: str, ranks: int, num_bytes: int, hosts: int = 1) -> list[int]:
    program = collective_program(operation, algorithm, ranks, num_bytes, hosts=hosts)
    return [
        sum(i.num_bytes for i in program.of(rank).instructions if isinstance(i, Send))
        for rank in range(ranks)
    ]


def test_a_ring_sends_the_least_and_a_tree_takes_the_fewest_rounds() -> None:
    assert sent_bytes("all_reduce", "ring", 8, 8000) == [2 * 7 * 1000] * 8
    assert sent_bytes("all_reduce", "recursive-halving", 8, 8000) == [2 * 7 * 1000] * 8
    assert len(rounds_of("all_reduce", "ring", 8)) == 14
    assert (
        len(rounds_of("all_reduce", "tree", 8)) == len(rounds_of("all_reduce", "recursive-halving", 8)) == 6
    )
    assert len(rounds_of("broadcast", "tree", 8)) == 3


def test_two_levels_send_little_between_hosts() -> None:
    program = collective_program("all_reduce", "hierarchical", 8, 8000, hosts=2)
    far = [
        instruction.num_bytes
        for rank in range(8)
        for instruction in program.of(rank).instructions
        if isinstance(instruction, Send) and rank // 4 != instruction.to // 4
    ]
    assert sum(far) == 2 * 8000  # each host sends its sum once; a ring of 8 sends 14000 over two places
    assert sum(sent_bytes("all_reduce", "hierarchical", 8, 8000, hosts=2)) == 8 * 2 * 7 * 1000


def test_the_simulator_sees_every_hop() -> None:
    """With a latency of 1 s and 1000 bytes a second: the textbook's times."""

    def duration(rank: int, instruction: Instruction) -> float:
        return 1.0 + instruction.num_bytes / 1000 if isinstance(instruction, Send) else 0.0

    def seconds(algorithm: str, num_bytes: int) -> float:
        trace = simulate(collective_program("all_reduce", algorithm, 4, num_bytes), duration)
        return max(span.end_s for span in trace.spans)

    assert seconds("ring", 4000) == pytest.approx(2 * 3 * (1 + 1))
    assert seconds("tree", 4000) == pytest.approx(2 * 2 * (1 + 4))
    assert seconds("recursive-halving", 4000) == pytest.approx(2 * (1 + 2) + 2 * (1 + 1))
    assert seconds("tree", 4) < seconds("ring", 4)  # latency decides


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(PlanError, match="no all_reduce by magic"):
        rounds_of("all_reduce", "magic", 4)
    with pytest.raises(PlanError, match="5 ranks on 2 hosts"):
        rounds_of("all_reduce", "hierarchical", 5, hosts=2)
