"""Every collective of lecture 001, drawn message by message from a real run on four processes.

python -m examples.lectures.lecture001_collectives
"""

import time
from html import escape
from typing import Any

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show

from plait.plan.mesh import Mesh
from plait.program.hops.program import collective_program
from plait.program.hops.rounds import AXIS, block_sizes
from plait.program.instructions import Instruction, Recv, Wait
from plait.run.link.hops import run_hops
from plait.run.link.process_links import ProcessLinks
from plait.run.start.launch import Seat, connect, disconnect, launch

RANKS, COUNT = 4, 1 << 20
"""Processes, and float32 numbers of the tensor: 4 MiB."""
SHOWN = (
    ("broadcast", "ring"), ("broadcast", "tree"), ("scatter", "tree"), ("gather", "tree"), ("reduce", "tree"),
    ("all_gather", "ring"), ("reduce_scatter", "ring"), ("all_reduce", "ring"), ("all_reduce", "tree"),
)  # fmt: skip
"""The lecture's six operations, and the two halves of its ring."""
Message = tuple[int, int, str, float, float]
"""From, to, blocks, seconds from the start when the receiver began to wait and when it had it."""
_COLOURS = ("#7fb2e5", "#8fcf9f", "#f0c36d", "#d9a3d8")


def _run(operation: str, algorithm: str, seat: Seat, links: ProcessLinks) -> list[Any]:
    """Messages that came to this rank, the first number of each block after it, seconds."""
    own = collective_program(operation, algorithm, RANKS, 4 * COUNT).of(seat.rank).instructions
    recvs = {one.id: one for one in own if isinstance(one, Recv)}
    blocks = list(torch.split(torch.full((COUNT,), float(seat.rank + 1)), list(block_sizes(COUNT, RANKS))))
    torch.distributed.barrier()
    messages: list[Message] = []
    began = last = time.monotonic()

    def watch(instruction: Instruction) -> None:
        nonlocal last
        now = time.monotonic()
        if isinstance(instruction, Wait):
            recv = recvs[instruction.of]
            names = ",".join(str(one.number) for one in recv.writes)
            messages.append((recv.source, seat.rank, names, last - began, now - began))
        last = now

    for _ in run_hops(own, links, blocks, watch):
        pass
    return [messages, [float(block[0]) for block in blocks], time.monotonic() - began]


def _main(seat: Seat) -> list[list[Any]]:
    connect(seat, timeout_s=60.0)
    try:
        links = ProcessLinks(Mesh(axes=((AXIS, RANKS),)), seat.rank)
        _run(*SHOWN[0], seat, links)  # connects
        return [_run(operation, algorithm, seat, links) for operation, algorithm in SHOWN]
    finally:
        disconnect()


def draw(title: str, messages: list[Message]) -> str:
    """A row a process; a box from when it began to wait until the message was there."""
    end = max(message[4] for message in messages)
    left, row, width = 70, 30, 720
    height = 44 + row * RANKS + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" '
        f'font-size="11" role="img" aria-label="{escape(title)}"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="8" y="20" font-size="14">{escape(title)}: {1e3 * end:.1f} ms</text>'
    ]
    parts += [f'<text x="8" y="{44 + row * rank + 17}">rank {rank}</text>' for rank in range(RANKS)]
    scale = (width - left - 12) / end
    for source, to, blocks, start, stop in messages:
        x, wide, y = left + start * scale, max((stop - start) * scale, 2.0), 44 + row * to
        colour = (
            _COLOURS[int(blocks.split(",")[0]) % len(_COLOURS)]
            if blocks.count(",") < RANKS - 1
            else "#ced4da"
        )
        label = f"{blocks} from {source}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="24" fill="{colour}" stroke="#fff">'
            f"<title>{escape(label)}</title></rect>"
        )
        if wide > 7 * len(label):
            parts.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + 16}" text-anchor="middle">{escape(label)}</text>'
            )
    return "".join(parts) + "</svg>\n"


def right(operation: str, values: list[list[float]]) -> bool:
    """Whether every process has what it must have; block b of rank r held r + 1 before."""
    total = sum(range(1, RANKS + 1))
    everybody, owners = range(RANKS), [float(rank + 1) for rank in range(RANKS)]
    match operation:
        case "broadcast":
            return all(block == 1.0 for own in values for block in own)
        case "scatter":
            return all(values[rank][rank] == 1.0 for rank in everybody)
        case "gather":
            return values[0] == owners
        case "all_gather":
            return all(own == owners for own in values)
        case "reduce":
            return all(block == total for block in values[0])
        case "reduce_scatter":
            return all(values[rank][rank] == total for rank in everybody)
    return all(block == total for own in values for block in own)


def exhibit() -> Exhibit:
    told = launch(_main, ranks=RANKS)
    rows: list[list[float | str]] = []
    pictures, correct = {}, []
    for at, (operation, algorithm) in enumerate(SHOWN):
        messages = sorted((tuple(message) for own in told for message in own[at][0]), key=lambda m: m[4])
        correct.append(right(operation, [own[at][1] for own in told]))
        most = max(sum(1 for message in messages if message[1] == rank) for rank in range(RANKS))
        seconds = max(own[at][2] for own in told)
        rows.append(
            [
                operation,
                algorithm,
                len(messages),
                most,
                f"{1e3 * seconds:.1f} ms",
                "yes" if correct[-1] else "no",
            ]
        )
        pictures[
            f"{operation} by a {algorithm}: each box is a message, from when its receiver waits until it is there"
        ] = draw(f"{operation}, {algorithm}", messages)
    ring = next(row for row in rows if row[:2] == ["all_reduce", "ring"])
    return Exhibit(
        lecture="001",
        title="Collectives, message by message",
        idea="Broadcast, scatter, gather, reduce, all-gather, all-reduce: the lecture draws who sends "
        "what to whom, and an all-reduce as a ring: in p - 1 rounds every process adds a block to what "
        "comes from its neighbour and passes it on, in p - 1 more the sums go round. Here each is a "
        "program of sends and receives that runs between four processes; the pictures are the times that "
        "those processes took.",
        numbers=[
            Number(what="rounds of a ring all-reduce on 4", lecture="2 (p - 1) = 6", ours=float(ring[3])),
            Number(
                what="collectives with the right result everywhere", ours=f"{sum(correct)} of {len(correct)}"
            ),
        ],
        tables=[
            Table(
                title="4 MiB between four processes over sockets",
                columns=["operation", "algorithm", "messages", "most to one rank", "time", "right"],
                rows=rows,
            )
        ],
        pictures=pictures,
        seen="The ring sends a quarter of the tensor in each of six rounds and keeps every process busy; "
        "the tree sends all of it in fewer rounds while half of the processes wait. "
        "`plait run --set links.algorithm=ring` trains by it, and its timeline shows these hops.",
    )


if __name__ == "__main__":
    show(exhibit())
