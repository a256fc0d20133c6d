"""Programs of small cases, compiled once for the tests of this folder."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from tests.unit.run.training import captures

from plait.graph.graph import Graph
from plait.plan.named import resolve
from plait.program.compile import compile_program
from plait.program.instructions import Instruction
from plait.program.place.place import place
from plait.program.place.propagate import Placements
from plait.program.program import Program
from plait.program.ranks import Settings


def graph_of(name: str, size: int) -> Graph:
    """The captured micro-step of a case in float64."""
    return captures(name, torch.float64, "fp32").of_size(size)


def placed_on_data(graph: Graph, units: tuple[int, ...]) -> Placements:
    """What `ddp` chooses where ranks have so many samples."""
    (placed,) = place(graph, resolve("ddp", len(units)), units)
    return placed


@cache
def program_of(
    name: str,
    ranks: int,
    micro_batches: tuple[int, ...] = (7,),
    *,
    bucket_mib: float = 8.0,
    overlap: bool = True,
) -> Program:
    """A compiled case."""
    plan = resolve(
        "ddp" if ranks > 1 else "single", ranks, {"sync": {"bucket_mib": bucket_mib, "overlap": overlap}}
    )
    graphs = {size: graph_of(name, size) for size in set(micro_batches)}
    settings = Settings(clip_norm=1.0, batch_norm="global", device=torch.device("cpu"))
    return compile_program(graphs, plan, micro_batches, settings)


def with_instructions(program: Program, instructions: Sequence[Instruction], of_class: int = 0) -> Program:
    """The program with other instructions for one class of ranks."""
    classes = list(program.classes)
    classes[of_class] = replace(classes[of_class], instructions=tuple(instructions))
    return replace(program, classes=tuple(classes))
