"""What `Update` does on a rank: one step of the optimizer, by the device, or by the host beside it.

In: an update of a step, its gradients in the store. Out: changed parameters. The host's updates are made on a thread,
one after the other, while the device goes on; no two updates of a rank are made at once, since they share an optimizer.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.job.updates.optimizers import leaves_of
from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.copies import Copies
from plait.run.interpret.step import Step
from plait.run.link.links import Handle
from plait.threads import start_thread

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of which torch has one kernel for all tensors on a processor."""


class Updates:
    """The updates of one rank."""

    def __init__(
        self,
        state: ModelState,
        store: GradientStore,
        copies: Copies,
        keep: Callable[[Any, Handle], None],
    ) -> None:
        """`keep` remembers what was started until its `Wait`."""
        self._state, self._store, self._copies, self._keep = state, store, copies, keep
        self._one = threading.Lock()
        self._counts: bool | None = None
        """Whether the step is made; None: that is not decided yet."""

    def begin(self) -> None:
        """A step begins."""
        self._counts = None

    def counts(self, norm: Tensor | None) -> bool:
        """Whether a step is made: with a loss scale, where its gradients are finite; the same for all its parts."""
        if self._state.loss_scale is None:
            return True
        if self._counts is None:
            self._counts = self._state.loss_scale.takes(float(norm) if norm is not None else 0.0)
        return self._counts

    def update(self, now: Step, instruction: ins.Update, *, counts: bool) -> None:
        """Make one, or begin it."""
        if instruction.lane == "host":
            self._keep(instruction, _OnHost(lambda: self._on_host(now, instruction, counts=counts)))
            return
        with self._one:
            self._make(now, instruction, counts=counts)

    @torch.no_grad()
    def _on_host(self, now: Step, instruction: ins.Update, *, counts: bool) -> None:
        """On a thread: when the gradients have come."""
        device, state = self._state.device, (Value.state(instruction.parts[0]),)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for index in instruction.parts:
                kept = Value.bucket if now.own.buckets[index].group is None else Value.shard
                self._copies.wait(now, (kept(index),))
            with self._one:
                self._copies.settle(now, state, counters=True)
                self._copies.wait(now, state)
                self._make(now, instruction, counts=counts)

    def _make(self, now: Step, instruction: ins.Update, *, counts: bool) -> None:
        buckets = [now.own.buckets[index] for index in instruction.parts] or now.own.buckets
        self._store.hand_over(buckets, part=bool(instruction.parts))
        if counts:
            with _fused(self._state.optimizer) if instruction.lane == "host" else nullcontext():
                self._state.update(now.number)
        self._store.take_back(buckets)


class _OnHost:
    """An update on a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="update on the host", daemon=True)
        start_thread(self._thread)

    def ready(self) -> bool:
        return True

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return None


@contextmanager
def _fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch's optimizers that leave it open use one kernel for all tensors."""
    groups = [
        group
        for leaf in leaves_of(optimizer)
        if type(leaf) in _FUSED and torch.get_default_dtype() == torch.float32
        for group in leaf.param_groups
        if group.get("fused", False) is None
        and not any(group.get(other) for other in ("foreach", "capturable", "differentiable"))
        and all(p.is_floating_point() and (p.grad is None or not p.grad.is_sparse) for p in group["params"])
    ]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None
