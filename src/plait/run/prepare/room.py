"""Refuse a run whose checkpoints cannot fit on the disk, before any process is started.

In: a captured job and the run folder. Out: nothing, or a `DiskError` with the numbers. What cannot be known beforehand
(a model that was not captured, what workers keep beside the model) is not counted: saves look again, each time.
"""

from pathlib import Path

from plait.errors import DiskError
from plait.files.write import free_bytes
from plait.graph.graph import Graph
from plait.job.updates.optimizer_state import Updated, optimizer_state
from plait.run.prepare.programs import Programs
from plait.units import format_bytes

_JOURNAL_BYTES = 256 << 10
"""For plan, environment and the first records."""


def check_room(folder: Path, programs: Programs, *, on_the_way: bool, keep: int = 2) -> None:
    """Raise where the folder's disk has no room for the checkpoints that will be there at once.

    `on_the_way`: whether the run saves before its end; then `keep` checkpoints are there while the next is written.
    """
    graph, free = programs.captures.first, free_bytes(folder)
    if graph is None or free is None:
        return
    each = checkpoint_bytes(graph, programs)
    there = sum(path.stat().st_size for path in folder.glob("checkpoints/step-*/*") if path.is_file())
    needed = max(each, (keep + 1) * each - there if on_the_way else 0) + _JOURNAL_BYTES
    if free < needed:
        count = f"there are {keep + 1} of them at once" if on_the_way else "there is one at the end"
        raise DiskError(
            f"the disk of {folder} has {format_bytes(free)} free; the run needs {format_bytes(needed)}: a checkpoint"
            f" takes about {format_bytes(each)}, {count}, and records take {format_bytes(_JOURNAL_BYTES)} or more.",
            fix="free space there, or choose another disk with --out.",
        )


def checkpoint_bytes(graph: Graph, programs: Programs) -> int:
    """About what a checkpoint takes: parameters, buffers and the optimizer's state."""
    nodes = graph.nodes()
    held = {
        kind: [(entry.name, nodes[entry.node].meta["val"]) for entry in graph.inputs_of(kind)]
        for kind in ("parameter", "buffer")
    }
    built = programs.whole.build_model() if programs.whole.objectives else None
    trained = {entry.name for entry in graph.inputs_of("parameter") if entry.trainable}
    if built is not None:
        trained = {name for name, parameter in built.named_parameters() if parameter.requires_grad}
    updated = [
        Updated(name=name, shape=tuple(value.shape), dtype=value.dtype)
        for name, value in held["parameter"]
        if name in trained
    ]
    state = optimizer_state(programs.whole.build_optimizer, updated)
    model = sum(value.numel() * value.element_size() for found in held.values() for _, value in found)
    return state.num_bytes + int(model) * (2 if programs.whole.average is not None else 1)
