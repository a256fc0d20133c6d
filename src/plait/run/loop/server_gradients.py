"""Gradients that servers have applied, written down for verification.

In: each server's shards of them. Out: files in the run's folder, one an update, as other plans write them.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.run.hold.state import ModelState
from plait.run.loop.task import Task


def write_parts(task: Task, shard: int, gradients: list[dict[str, Tensor]]) -> None:
    """For verification: this server's shard of every update's gradients."""
    for number, entry in enumerate(gradients):
        save_file({name: part.contiguous() for name, part in entry.items()}, _part(task, number, shard))


def join_parts(task: Task, state: ModelState, count: int) -> None:
    """Put the parts of all servers together; the others have written theirs before they gave up their state."""
    for number in range(count):
        parts = [load_file(_part(task, number, shard)) for shard in range(task.plan.sync.servers)]
        whole = parts[0]
        if state.holding is not None:
            layout = state.holding.layout
            whole = {name: layout.assemble(name, [part[name] for part in parts]) for name in parts[0]}
        save_file(whole, task.folder / f"gradients-{number:06d}.safetensors")


def _part(task: Task, number: int, shard: int) -> Path:
    return task.folder / f"gradients-{number:06d}-of-server-{shard}.safetensors"
