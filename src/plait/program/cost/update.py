"""What the optimizer of a rank updates, how much state it keeps, and how long its step takes where it was not timed.

In: a program and a rank; a function that builds the optimizer. Out: shapes, bytes, seconds. State is found out by one
step on tensors that take no memory, so that any optimizer of the user's is counted as it is.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from plait.cluster.cluster import Device
from plait.program.cost.op_key import update_key
from plait.program.program import Program
from plait.torch_private import pytree
from plait.torch_private.fake import DataDependentOutputException, FakeTensorMode

Builder = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""As `Job.build_optimizer`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a rank updates of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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

    def seconds(self, device: Device, busy: int) -> float:
        """As it was timed on the device; else the traffic of one pass over parameters, gradients and state."""
        timed = device.timed.get(update_key(self.optimizer, self.shapes, busy))
        if timed is not None:
            return timed
        constants = device.calibration
        traffic = 3 * self.parameter_bytes + 2 * self.state_bytes
        return traffic / (device.memory_bandwidth * constants.memory_share) + constants.kernel_s


def updated_parts(program: Program, rank: int) -> list[Part]:
    """What a rank's optimizer updates: the trained parameters that it holds, or its chunks of them."""
    found = []
    chunk = program.plan.data_coordinate(rank)
    for bucket in program.of(rank).buckets:
        for index, name in enumerate(bucket.parameters):
            if name.startswith("buffer:"):
                continue
            shape = bucket.shapes[index]
            if bucket.group is not None:
                low, high = bucket.group.span(index, chunk)
                shape = (high - low,)
            found.append(Part(name=name, shape=shape, dtype=bucket.dtype))
    return found


def update_work(program: Program, rank: int, build: Builder) -> UpdateWork:
    """What one step of the user's optimizer asks of a rank."""
    parts = updated_parts(program, rank)
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = [(p.name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype))) for p in parts]
        if not named:
            return UpdateWork(optimizer="none", shapes=(), parameter_bytes=0, state_bytes=0)
        optimizer = build(named)
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        with suppress(DataDependentOutputException):  # state is made before numbers are looked at
            optimizer.step()
        leaves = pytree.tree_leaves(dict(optimizer.state))
        state_bytes = sum(
            leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)
        )
    return UpdateWork(
        optimizer=type(optimizer).__name__,
        shapes=tuple(part.shape for part in parts),
        parameter_bytes=sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in parts),
        state_bytes=int(state_bytes),
    )
