"""What the optimizer of a rank updates, how much state it keeps, and how long its step takes where it was not timed.

In: a program and a rank, or a graph; a function that builds the optimizer. Out: shapes, bytes, seconds.
"""

from dataclasses import dataclass

import torch

from plait.cluster.cluster import Device
from plait.graph.graph import Graph
from plait.job.updates.optimizer_state import Builder, Updated, optimizer_state
from plait.program.cost.op_key import update_key
from plait.program.instructions import Update
from plait.program.program import Bucket, Program


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWork:
    """One optimizer step of one rank."""

    optimizer: str
    """The name of its class."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that it updates."""
    parameter_bytes: int
    """Of these tensors; their gradients have as many."""
    state_bytes: int
    """What the optimizer keeps from step to step."""

    def extra_bytes(self, *, at_once: bool) -> int:
        """What a step needs beside: with two moments, the root of the second one, of one tensor or of all."""
        if self.state_bytes < 1.5 * self.parameter_bytes or not self.shapes:
            return 0
        if at_once:
            return self.parameter_bytes
        elements = [torch.Size(shape).numel() for shape in self.shapes]
        return self.parameter_bytes * max(elements) // max(sum(elements), 1)

    @property
    def traffic(self) -> int:
        """Bytes of one pass over parameters, gradients and state."""
        return 3 * self.parameter_bytes + 2 * self.state_bytes

    def seconds(self, device: Device, busy: int) -> float:
        """As it was timed on the device; else the traffic of one pass over parameters, gradients and state."""
        timed = device.timed.get(update_key(self.optimizer, self.shapes, busy))
        if timed is not None:
            return timed
        constants = device.calibration
        return self.traffic / (device.memory_bandwidth * constants.memory_share) + constants.kernel_s


def updated_parts(program: Program, rank: int) -> list[Updated]:
    """What a rank's optimizer updates: the trained parameters that it holds, or its chunks of them; nothing where
    another rank does it."""
    found, own = [], program.of(rank)
    if own.serve is None and not any(isinstance(i, Update) for i in own.instructions):
        return []
    servers = program.plan.sync.servers if own.serve is not None else 1
    coordinate = program.plan.data_coordinate(rank) if own.serve is None else 0
    for bucket in own.buckets:
        found += updated_of(bucket, coordinate, servers)
    return found


def updated_of(bucket: Bucket, data_coordinate: int, servers: int = 1) -> list[Updated]:
    """What the rank at a place on `data` updates of the parameters of a bucket; `servers`: each a share of all."""
    found = []
    for index, name in enumerate(bucket.parameters):
        shape = bucket.shapes[index]
        if bucket.group is not None:
            low, high = bucket.group.span(index, data_coordinate)
            if bucket.group.whole and high == low:
                continue
            shape = shape if bucket.group.whole else (high - low,)
        elif servers > 1:
            shape = (-(-torch.Size(shape).numel() // servers),)
        found.append(Updated(name=name, shape=shape, dtype=bucket.dtype))
    return found


def update_work(program: Program, rank: int, build: Builder) -> UpdateWork:
    """What one step of the user's optimizer asks of a rank."""
    parts = updated_parts(program, rank)
    state = optimizer_state(build, parts)
    return UpdateWork(
        optimizer=state.optimizer,
        shapes=tuple(part.shape for part in parts),
        parameter_bytes=sum(part.num_bytes for part in parts),
        state_bytes=state.num_bytes,
    )


def state_ratio(graph: Graph, build: Builder) -> float:
    """Bytes of optimizer state for each byte of the trained parameters: 2 for Adam, 0 for plain SGD."""
    nodes = graph.nodes()
    values = {
        entry.name: nodes[entry.node].meta["val"] for entry in graph.inputs_of("parameter") if entry.trainable
    }
    trained = [Updated(name=name, shape=tuple(v.shape), dtype=v.dtype) for name, v in values.items()]
    return optimizer_state(build, trained).num_bytes / max(1, sum(entry.num_bytes for entry in trained))
