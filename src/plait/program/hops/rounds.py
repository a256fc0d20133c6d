"""A collective as messages between ranks, round after round, written as instructions.

In: who moves or adds which blocks of a tensor to whom. Out: the instructions of each rank: `Send`, `Recv`, `Wait`,
`Combine`. In a round every rank first makes room, then sends, then waits, then adds: so no round can block itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.program.instructions import Combine, Instruction, Recv, Send
from plait.program.value import Value
from plait.program.write.writer import Writer

AXIS = "data"
"""Along which the ranks of a collective that stands alone are."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of a round."""

    source: int
    to: int
    blocks: tuple[int, ...]
    """Of the tensor, by number."""
    adds: bool
    """Whether the receiver adds them to its own; else they take their place."""


def move(source: int, to: int, blocks: Iterable[int]) -> Hop:
    """Blocks that take the place of the receiver's."""
    return Hop(source, to, tuple(blocks), False)


def add(source: int, to: int, blocks: Iterable[int]) -> Hop:
    """Blocks that the receiver adds to its own."""
    return Hop(source, to, tuple(blocks), True)


Rounds = Sequence[Sequence[Hop]]


def joined(*parts: Rounds) -> list[Sequence[Hop]]:
    """One after another, without rounds in which nobody has anything to say."""
    return [hops for rounds in parts for hops in rounds if hops]


def together(first: Rounds, second: Rounds) -> list[list[Hop]]:
    """Side by side."""
    longest = max(len(first), len(second))
    return [
        [*(first[at] if at < len(first) else ()), *(second[at] if at < len(second) else ())]
        for at in range(longest)
    ]


def instructions(
    rounds: Rounds, ranks: int, block_bytes: Sequence[int], axis: str = AXIS
) -> list[tuple[Instruction, ...]]:
    """What each rank does; `block_bytes`: the size of every block."""
    writers = [Writer() for _ in range(ranks)]
    for number, hops in enumerate(rounds):
        real = [hop for hop in hops if hop.blocks]
        waits: list[tuple[int, int, Hop]] = []
        for hop in real:
            names = tuple(_arriving(hop, block) for block in hop.blocks)
            size = sum(block_bytes[block] for block in hop.blocks)
            recv = Recv(
                name=f"receive {named(number, hop)}", axis=axis, source=hop.source, message=named(number, hop),
                writes=names, num_bytes=size,
            )  # fmt: skip
            waits.append((hop.to, writers[hop.to].add(recv), hop))
        for hop in real:
            writers[hop.source].add(
                Send(
                    name=f"send {named(number, hop)}", axis=axis, to=hop.to, message=named(number, hop),
                    reads=tuple(map(Value.block, hop.blocks)),
                    num_bytes=sum(block_bytes[block] for block in hop.blocks),
                )
            )  # fmt: skip
        for to, position, hop in waits:
            writers[to].wait(position, named(number, hop))
            for block in hop.blocks if hop.adds else ():
                own, part = Value.block(block), Value.tied_part(block, hop.source)
                writers[to].add(
                    Combine(name=f"add block {block}", reads=(own, part), writes=(own,), frees=(part,))
                )
    return [tuple(writer.instructions) for writer in writers]


def _arriving(hop: Hop, block: int) -> Value:
    return Value.tied_part(block, hop.source) if hop.adds else Value.block(block)


def named(number: int, hop: Hop) -> str:
    """A message, as a person reads it."""
    first, last = hop.blocks[0], hop.blocks[-1]
    blocks = f"block {first}" if len(hop.blocks) == 1 else f"{len(hop.blocks)} blocks {first}..{last}"
    return f"{blocks} {hop.source}>{hop.to} round {number}"


def block_sizes(count: int, blocks: int) -> tuple[int, ...]:
    """Of almost equal blocks, the first ones larger."""
    whole, rest = divmod(count, blocks)
    return tuple(whole + (block < rest) for block in range(blocks))
