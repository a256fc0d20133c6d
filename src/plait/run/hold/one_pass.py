"""Adam's and AdamW's step on a GPU in one pass: every gradient, weight and moment is read once and written once.

In: an optimizer whose parameters have gradients. Out: the parameters and state that its own `step` would have made of
them, up to rounding, of 16-bit weights with masters too; torch makes three passes over those. Parameters, options,
state and hooks that the kernel does not know are left to torch, and so is the first step of a parameter, which makes
its state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from plait.job.precision import MASTER, keep_masters
from plait.job.updates.optimizers import leaves_of
from plait.latest import Latest
from plait.torch_private import foreach
from plait.torch_private.optimizers import has_hooks_beside

_TABLES = 16
"""That are kept: gradients come to lie in the same few places."""
_FEW = 2**24
"""Entries of float32 weights up to which torch's own kernel takes no time worth saving."""
_STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the step of one parameter reads and writes."""

    parameter: nn.Parameter
    gradient: Tensor
    weight: Tensor
    """In float32: the parameter itself, or its master."""
    mean: Tensor
    square: Tensor
    step: Tensor
    """How many were made."""

    @property
    def is_short(self) -> bool:
        """Whether the parameter is rounded from `weight`."""
        return self.parameter.dtype != torch.float32

    def lies_alike(self) -> bool:
        """Whether all lie alike on one device, where a kernel can read 16 bytes at a time."""
        own, wide = self.parameter, (self.weight, self.mean, self.square)
        tensors = (own, self.gradient, *wide)
        return (
            own.numel() > 0
            and not self.gradient.is_sparse
            and own.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and self.gradient.dtype in (own.dtype, torch.float32)
            and self.step.dtype == torch.float32
            and all(tensor.dtype == torch.float32 for tensor in wide)
            and all(tensor.device == own.device and tensor.stride() == own.stride() for tensor in tensors)
            and (own.is_contiguous() or _is_channels_last(own))
            and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        )

    def addresses(self) -> tuple[int, ...]:
        """A row of the kernel's table."""
        tensors = (self.gradient, self.weight, self.mean, self.square, self.parameter)
        return (self.parameter.numel(), *(tensor.data_ptr() for tensor in tensors))


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


class OnePass:
    """The steps of one rank's optimizer."""

    def __init__(self) -> None:
        self._tables: Latest[tuple[tuple[int, ...], ...], Tensor] = Latest(_TABLES)
        self._blocks: Latest[tuple[int, ...], Tensor] = Latest(_TABLES)
        """By the sizes of tensors: of every block its tensor and its place there."""

    @contextmanager
    def made(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Make the step of all parameters that it can; inside, these have no gradient, so that torch passes them by."""
        gradients: list[tuple[nn.Parameter, Tensor]] = []
        for leaf in leaves_of(optimizer):
            if type(leaf) in (torch.optim.Adam, torch.optim.AdamW) and not has_hooks_beside(
                leaf, keep_masters.__module__
            ):
                for group in leaf.param_groups:
                    gradients += self._step(leaf, group)
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    @torch.no_grad()
    def _step(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        given = [p for p in group["params"] if p.grad is not None and _is_here(p)]
        if not given or not _knows(group):
            return []
        if all(p.dtype == torch.float32 for p in given) and sum(p.numel() for p in given) <= _FEW:
            return []
        entries = [
            entry for p in given if (entry := _entry(p, optimizer.state.get(p))) and entry.lies_alike()
        ]
        kernels = _kernels() if entries else None
        if kernels is None:
            return []
        alike: dict[object, list[Entry]] = {}
        for entry in entries:
            kind = (entry.parameter.device, entry.parameter.dtype, entry.gradient.dtype, entry.step.device)
            alike.setdefault(kind, []).append(entry)
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        for some in alike.values():
            foreach.add_([entry.step for entry in some], 1)
            self._launch(kernels, some, group, decoupled=bool(decoupled))
        torch.autograd.graph.increment_version([entry.parameter for entry in entries])
        return [(entry.parameter, entry.gradient) for entry in entries]

    def _launch(
        self, kernels: ModuleType, entries: Sequence[Entry], group: dict[str, Any], *, decoupled: bool
    ) -> None:
        device = entries[0].parameter.device
        rows = tuple(entry.addresses() for entry in entries)
        table = self._tables.get(rows)
        if table is None:
            table = _moved(torch.tensor(rows), device)
            self._tables.put(rows, table)
        sizes = tuple(row[0] for row in rows)
        blocks = self._blocks.get(sizes)
        if blocks is None or blocks.device != device:
            blocks = _moved(_blocks([-(-size // kernels.BLOCK) for size in sizes]), device)
            self._blocks.put(sizes, blocks)
        first, second = group["betas"]
        kernels.update(
            table, blocks, _corrections(entries, first, second, device), len(blocks),
            (group["lr"], first, second, group["eps"], group["weight_decay"]), entries[0].gradient.dtype,
            entries[0].parameter.dtype if entries[0].is_short else None,
            decoupled=decoupled, negated=bool(group["maximize"]), device=device,
        )  # fmt: skip


@cache
def _kernels() -> ModuleType | None:
    """None where this machine cannot build them."""
    try:
        from plait.run.hold import adam_kernels as kernels

        kernels.try_out(torch.device("cuda", torch.cuda.current_device()))
    except Exception:  # no Triton, no C compiler, a device that it does not know
        return None
    return kernels


def _is_here(parameter: nn.Parameter) -> bool:
    """Whether the kernel's device has it."""
    return parameter.is_cuda


def _entry(parameter: nn.Parameter, state: dict[str, Any] | None) -> Entry | None:
    """None where the state is not what Adam's is: before the first step, with further tensors, or on the host."""
    masters = set() if parameter.dtype == torch.float32 else {MASTER}
    if not state or set(state) != _STATE | masters or not all(isinstance(v, Tensor) for v in state.values()):
        return None
    assert parameter.grad is not None
    return Entry(
        parameter=parameter, gradient=parameter.grad, weight=state[MASTER] if masters else parameter,
        mean=state["exp_avg"], square=state["exp_avg_sq"], step=state["step"],
    )  # fmt: skip


def _knows(group: dict[str, Any]) -> bool:
    """Whether its options are those of the kernel; who asks for another way by name gets that."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    other = ("amsgrad", "differentiable", "capturable", "foreach")
    return (
        all(isinstance(number, int | float) for number in numbers)
        and not any(group.get(option) for option in other)
        and group.get("fused") is not False
    )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def _blocks(counts: Sequence[int]) -> Tensor:
    """(tensor, block of it), of every block."""
    of = [torch.stack((torch.full((n,), at), torch.arange(n)), 1) for at, n in enumerate(counts)]
    return torch.cat(of).int()


def _corrections(entries: Sequence[Entry], first: float, second: float, device: torch.device) -> Tensor:
    """Of every tensor 1 - first^step and the root of 1 - second^step; in float64, as both are small at first."""
    steps = torch.stack([entry.step for entry in entries]).double()
    made = torch.stack((1 - first**steps, (1 - second**steps).sqrt()), 1).float()
    return made if made.is_cuda else _moved(made, device)
