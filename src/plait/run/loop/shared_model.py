"""One model for processes of one host that write to it without locks (hogwild, Niu et al. 2011).

In: a task. Out: a model in memory that all workers share. Updates may overwrite each other; where gradients are sparse
they seldom meet. Only updates that divide by state which all share take turns: a moment that has one worker's gradient
over a variance that has another's is a step of any size. Who saves is in `shared_saver.py`.
"""

import fcntl
import mmap
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.state import ModelState
from plait.run.link.shm.memory import is_suitable
from plait.run.loop.task import Task
from plait.run.start.memory_file import anonymous_file

_ZERO_AT_FIRST = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SparseAdam,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)
"""Optimizers whose state before the first step is what a step with gradients of zero leaves, but for its count."""

_LOOK_S = 0.001
"""Between two looks whether a checkpoint was made."""
_ALIGNMENT = 64
"""Tensors in the shared region start at a cache line, so that workers of different tensors never write to one."""


def check_shared(plan: Plan, device: str, engine: str | None = None) -> None:
    """Refuse where workers cannot share one model; `engine`: who started them as several tasks, if anybody."""
    if engine is not None and (plan.agreement.threads or plan.agreement.weights == "shared"):
        raise PlanError(
            f"plan {plan.name} has one model in memory that all workers use, which tasks of {engine} cannot share.",
            fix="start it alone on one host, or use a plan whose workers have copies, such as local-sgd.",
        )
    if plan.agreement.weights != "shared":
        return
    if device != "cpu":
        raise PlanError(
            f"plan {plan.name} shares one model in the memory of a host; its workers cannot write to it from {device}.",
            fix="use --device cpu, or the plan server-async.",
        )
    if not is_suitable():
        raise PlanError(
            f"plan {plan.name} needs Linux on x86, where processes find each other's memory and see each other's "
            "stores in their order.",
            fix="use the plan server-async.",
        )


class SharedModel:
    """One model for all workers of a host, and their optimizers' state.

    Forked workers inherit it; in a fresh interpreter it is built again and then shown the same memory.
    """

    def __init__(self, task: Task) -> None:
        self._build(task)
        self._file, self._pid = anonymous_file("plait-model"), os.getpid()
        size = sum(_padded(tensor) for tensor in self._tensors())
        os.posix_fallocate(self._file, 0, size)  # a full host is an error here, not a crash at a later write
        self._move(self._file, write=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self._task, "path": f"/proc/{self._pid}/fd/{self._file}"}

    def __setstate__(self, given: dict[str, Any]) -> None:
        self._build(given["task"])
        try:
            self._file, self._pid = os.open(given["path"], os.O_RDWR), os.getpid()
        except OSError as error:
            raise PlanError(
                f"plan hogwild cannot share memory with fresh interpreters here ({error.strerror}).",
                fix="use Linux, or the plan server-async.",
            ) from error
        self._move(self._file, write=False)

    def _build(self, task: Task) -> None:
        plan = task.plan
        self._task = task
        self.state = ModelState(task.job, torch.device("cpu"), task.dtype)
        self.start_step = 0
        self._saved = torch.zeros(1, dtype=torch.int64)
        """The step before which all is saved: workers look at it, the parent sets it."""
        self.progress: dict[str, Any] = {}
        if task.resume is not None:
            before = load_checkpoint(task.resume)
            self.state.load(before)
            self.start_step, self.progress = before.step, before.extra.get("progress", {})
        optimizer = self.state.optimizer
        self.knows_state = bool(optimizer.state) or _begin(optimizer)
        """Whether the parent sees the state of optimizers."""
        if plan.hogwild.shared_state and not self.knows_state:
            raise PlanError(
                f"hogwild.shared_state: how the state of {type(optimizer).__name__} begins is not known.",
                fix=f"drop it, or use one of {', '.join(kind.__name__ for kind in _ZERO_AT_FIRST)}.",
            )
        count = 1 if plan.hogwild.shared_state or not self.knows_state else plan.mesh.size
        self._optimizers = [
            {p: dict(entries) for p, entries in optimizer.state.items()} for _ in range(count)
        ]

    def _tensors(self) -> list[Tensor]:
        """All that is shared, in an order that is the same in every process."""
        states = [v for one in self._optimizers for entries in one.values() for v in entries.values()]
        given = [self._saved, *self.state.parameters.values(), *self.state.buffers.values(), *states]
        return [value.detach() for value in given if isinstance(value, Tensor)]

    def _move(self, file: int, *, write: bool) -> None:
        """Let all tensors lie in the file; `write`: with the values that they have here."""
        tensors = self._tensors()
        memory = mmap.mmap(file, sum(_padded(tensor) for tensor in tensors))
        places, start = [], 0
        for tensor in tensors:
            count, dtype = tensor.numel(), tensor.dtype
            flat = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
                if count
                else tensor.flatten()
            )
            places.append(flat.view(tensor.shape))
            start += _padded(tensor)
        if write:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
        moved = iter(places)
        self._saved = next(moved)
        for parameter in self.state.parameters.values():
            parameter.data = next(moved)
        for name in list(self.state.buffers):
            _replace_buffer(self.state.model, name, next(moved))
        self.state.buffers = dict(self.state.model.named_buffers())
        for one in self._optimizers:
            for entries in one.values():
                entries.update({key: next(moved) for key, v in entries.items() if isinstance(v, Tensor)})

    def tell_saved(self, step: int) -> None:
        """All before a step is saved: whoever waits for that goes on."""
        self._saved.fill_(step)

    def wait_until_saved(self, step: int) -> None:
        """Until all before a step is saved; by the parent, without whom there is no worker."""
        while int(self._saved) < step:
            time.sleep(_LOOK_S)

    def adopt(self, rank: int) -> ModelState:
        """The model with the optimizer's state of one worker."""
        for parameter, entries in self._optimizers[min(rank, len(self._optimizers) - 1)].items():
            self.state.optimizer.state[parameter] = entries
        optimizer, shared = self.state.optimizer, self._task.plan.hogwild.shared_state
        if shared and not isinstance(
            optimizer, torch.optim.SGD
        ):  # the kernel frees the lock of a worker that dies
            optimizer.register_step_pre_hook(lambda *_: fcntl.lockf(self._file, fcntl.LOCK_EX))
            optimizer.register_step_post_hook(lambda *_: fcntl.lockf(self._file, fcntl.LOCK_UN))
        return self.state


def on_model_of(first: ModelState, other: ModelState, plan: Plan) -> ModelState:
    """What one more worker in this process has: the first one's model, and its own optimizer's state or the first's."""
    if plan.hogwild.shared_state:
        return first
    for name, parameter in other.parameters.items():
        parameter.data = first.parameters[name].data
    for name, buffer in first.buffers.items():
        _replace_buffer(other.model, name, buffer)
    other.buffers = dict(other.model.named_buffers())
    return other


def _padded(tensor: Tensor) -> int:
    """Bytes of a tensor in shared memory, up to where the next one may begin."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _begin(optimizer: torch.optim.Optimizer) -> bool:
    """Make the state that the optimizer would make at its first step; False where that is not known."""
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    if type(optimizer) not in _ZERO_AT_FIRST or dampened:
        return False
    kept = [{key: group.get(key) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        group |= {key: 0.0 for key in ("lr", "weight_decay") if key in group}
        for parameter in group["params"]:
            parameter.grad = _no_gradient(parameter) if sparse else torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group |= {key: value for key, value in values.items() if key in group}
    for entries in optimizer.state.values():
        if "step" in entries:
            entries["step"] = entries["step"] * 0
    return True


def _no_gradient(parameter: Tensor) -> Tensor:
    """A sparse gradient without entries."""
    shape = parameter.shape
    indices = torch.empty((1, 0), dtype=torch.int64)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, parameter.new_empty((0, *shape[1:])), shape)


def _replace_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = tensor
