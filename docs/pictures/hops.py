"""The pictures of docs/links.md: an all-reduce hop by hop, drawn from a trace of plait's own simulator.

In: a name in `HOPS`. Out: SVG, one row a rank, one box a message with the blocks that it carries, from when it is sent
to when it is there. All pictures have one scale: what is longer takes longer.
"""

import re
from collections.abc import Mapping

from docs.pictures.svg import _text

from plait.program.hops.program import collective_program
from plait.program.instructions import Instruction, Send
from plait.program.simulate.simulator import simulate

RANKS, NUM_BYTES = 4, 4000
LATENCY_S, BYTES_PER_S = 0.5, 1000.0
"""A message of one block takes 1.5 units of time, one of all four blocks 4.5."""
_UNIT, _ROW, _LEFT, _TOP = 44, 26, 64, 44
"""Points a unit of time and a row; where rows begin."""
_COLOURS = ("#7fb2e5", "#8fcf9f", "#f0c36d", "#d9a3d8")
"""Of blocks."""

HOPS: Mapping[str, tuple[str, str]] = {
    "all_reduce_ring": ("ring", "ring: 6 rounds of one block each; every rank sends all the time"),
    "all_reduce_tree": ("tree", "tree: 4 rounds of the whole tensor; half of the ranks wait"),
    "all_reduce_recursive-halving": (
        "recursive-halving",
        "recursive halving: 4 rounds of 2, 1, 1 and 2 blocks",
    ),
}


def _duration(rank: int, instruction: Instruction) -> float:
    return LATENCY_S + instruction.num_bytes / BYTES_PER_S if isinstance(instruction, Send) else 0.0


def draw_hops(name: str) -> str:
    """One collective as SVG."""
    algorithm, title = HOPS[name]
    trace = simulate(collective_program("all_reduce", algorithm, RANKS, NUM_BYTES), _duration)
    spans = [span for span in trace.spans if span.name.startswith("send")]
    end = max(span.end_s for span in spans)
    width, height = _LEFT + end * _UNIT + 16, _TOP + RANKS * _ROW + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        _text(8, 22, title, size=13, weight="bold"),
    ]
    for rank in range(RANKS):
        parts.append(_text(8, _TOP + rank * _ROW + 15, f"rank {rank}", size=11))
    for span in spans:
        found = re.match(r"send (?:\d+ blocks|block) (\d+)(?:\.\.(\d+))? \d+>(\d+)", span.name)
        assert found is not None, span.name
        first, last, to = found.groups()
        blocks = first if last is None else f"{first}-{last}"
        x, y, wide = (
            _LEFT + span.start_s * _UNIT,
            _TOP + span.rank * _ROW,
            (span.end_s - span.start_s) * _UNIT,
        )
        colour = _COLOURS[int(first) % len(_COLOURS)]
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{wide - 2:g}" height="{_ROW - 6}" fill="{colour}"/>')
        parts.append(_text(x + 4, y + 14, f"{blocks} to {to}", size=10))
    return "\n".join([*parts, "</svg>", ""])
