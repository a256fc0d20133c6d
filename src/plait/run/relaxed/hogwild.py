"""Hogwild: processes of one host that write to one model without locks (Niu et al. 2011).

In: a task. Out: a model in memory that forked workers share, the loop of a worker on it, and checkpoints. The parent
shares that memory too, and so it is the parent who saves: no death of a worker loses anything but the share of a step
that it was at. Updates may overwrite each other; where gradients are sparse they seldom meet.
"""

import mmap
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.errors import CheckpointError, PlanError
from plait.job.loader import LoadedStep
from plait.plan.plan import Plan
from plait.run.checkpoint import load_checkpoint
from plait.run.checkpoint_saver import Saver
from plait.run.launch import Interrupted, Seat
from plait.run.links import NoLinks
from plait.run.machine import Machine
from plait.run.prepare import Listener
from plait.run.programs import Programs
from plait.run.relaxed.loop import FreeWorker, Watch
from plait.run.relaxed.start import OnEvent, StartRanks
from plait.run.relaxed.tickets import shared_count, tickets
from plait.run.state import ModelState
from plait.run.worker import Task

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


def check_hogwild(plan: Plan, device: str) -> None:
    """Refuse where processes cannot share one model."""
    if plan.sync.rule == "hogwild" and device != "cpu":
        raise PlanError(
            f"plan hogwild shares one model in the memory of a host; its workers cannot write to it from {device}.",
            fix="use --device cpu, or the plan server-async.",
        )


class SharedModel:
    """One model for all workers of a host, and their optimizers' state. Made before they are forked."""

    def __init__(self, task: Task) -> None:
        plan = task.plan
        self.state = ModelState(task.job, torch.device("cpu"), task.dtype)
        self.start_step = 0
        self.progress: dict[str, Any] = {}
        if task.resume is not None:
            before = load_checkpoint(task.resume)
            self.state.load(before)
            self.start_step, self.progress = before.step, before.extra.get("progress", {})
        with torch.no_grad():
            for parameter in self.state.parameters.values():
                parameter.data = _shared(parameter.data)
            for name, buffer in self.state.buffers.items():
                _replace_buffer(self.state.model, name, _shared(buffer))
            self.state.buffers = dict(self.state.model.named_buffers())
        optimizer = self.state.optimizer
        self.knows_state = bool(optimizer.state) or _begin(optimizer)
        """Whether the parent sees the state of optimizers."""
        if plan.hogwild.shared_state and not self.knows_state:
            raise PlanError(
                f"hogwild.shared_state: how the state of {type(optimizer).__name__} begins is not known.",
                fix=f"drop it, or use one of {', '.join(kind.__name__ for kind in _ZERO_AT_FIRST)}.",
            )
        count = 1 if plan.hogwild.shared_state or not self.knows_state else plan.mesh.size
        self._optimizers = [_shared_state(optimizer) for _ in range(count)]

    def adopt(self, rank: int) -> ModelState:
        """The model with the optimizer's state of one worker."""
        for parameter, entries in self._optimizers[min(rank, len(self._optimizers) - 1)].items():
            self.state.optimizer.state[parameter] = entries
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


class _InPlace:
    """`Weights` that are where everybody reads and writes them."""

    def refresh(self) -> None:
        """They are always up to date."""

    def restore(self) -> None:
        """They are what it trains."""

    def skip(self, step: int) -> None:
        """Nothing to do."""

    def after(self, loaded: LoadedStep) -> None:
        """Nothing to do: the update has written to them."""

    def close(self) -> dict[str, Any]:
        """Nothing was counted."""
        return {}


def run_hogwild_worker(
    task: Task, seat: Seat, programs: Programs, model: SharedModel | None
) -> dict[str, Any]:
    """Take shares of steps until none is left, and write every update to the shared model."""
    if model is None:
        raise PlanError(
            "plan hogwild needs workers that are forked; this process must start fresh interpreters, which do not "
            "inherit its memory.",
            fix="use Linux, do not touch CUDA before, set OMP_NUM_THREADS=1; or use the plan server-async.",
        )
    watch = Watch.of(task, seat, torch.device("cpu"))
    machine = Machine(seat.rank, model.adopt(seat.rank), NoLinks(), watch.observer)
    machine.slowdown = task.slow.get(seat.rank, 1.0)
    places = tickets(shared_count(seat), task.plan.mesh.size, model.start_step)
    stops = seat.board.stop_requested
    seen: list[dict[str, Tensor]] = []
    if task.record_gradients:
        machine.store.on_ready = lambda found: seen.append({n: g.clone() for n, g in found.items()})
    counted = FreeWorker(
        task, seat, programs, machine, watch, _InPlace(), start_step=model.start_step, places=places,
        stops=lambda step: stops(),
    ).run()  # fmt: skip
    for step, entry in enumerate(seen):
        save_file(entry, task.folder / f"gradients-{step:06d}.safetensors")
    return counted


class ParentSaver:
    """Saves the shared model while workers run: on the way, and at the end."""

    def __init__(self, task: Task, model: SharedModel, tell: Listener) -> None:
        self.task, self.model, self.tell = task, model, tell
        self._done: Counter[int] = Counter()
        """Shares done, by step."""
        self._saver = Saver(task.folder / "checkpoints", time_limit_s=task.checkpoint_timeout_s)
        self._saved = -1

    def start(
        self,
        run: StartRanks,
        on_event: OnEvent,
        dispensable: Collection[int],
    ) -> list[Any]:
        """Run all ranks, and save what they have reached, also where they were interrupted."""

        def hear(rank: int, event: dict[str, Any]) -> bool:
            if "share" in event:
                self._take(int(event["share"]["step"]))
            return on_event(rank, event)

        try:
            results = run(hear, dispensable)
        except Interrupted as stop:
            if stop.returned:
                self._close(self._steps_done())
            raise
        self._close(max(self._done, default=self.model.start_step - 1) + 1)
        return results

    def _take(self, step: int) -> None:
        self._done[step] += 1
        every = self.task.checkpoint_every
        if every is not None and self._done[step] == self.task.plan.mesh.size and (step + 1) % every == 0:
            self._save(self._steps_done())

    def _steps_done(self) -> int:
        """Whole steps that as many shares make as were done; of later ones, what was done is done again on resume."""
        return self.model.start_step + self._done.total() // self.task.plan.mesh.size

    def _save(self, steps_done: int) -> None:
        state, job = self.model.adopt(0), self.task.job
        state.steps_done = steps_done
        extra = {
            "seed": job.seed,
            "batch": job.batch,
            "plan": self.task.plan.name,
            "progress": self.model.progress,
        }
        self._saver.submit(state.to_checkpoint(extra))
        self._saved = steps_done
        self._told(self._saver.poll())

    def _close(self, steps_done: int) -> None:
        if self._saved != steps_done:
            self._save(steps_done)
        notices = self._saver.close()
        self._told(notices)
        lost = [notice for notice in notices if notice.kind != "saved" and notice.step == steps_done]
        if lost:
            raise CheckpointError(f"the last checkpoint was not saved: {lost[-1].message}")
        if not self.model.knows_state:
            name = type(self.model.state.optimizer).__name__
            self.tell({"notice": f"the checkpoint has no state of {name}: it was in the workers alone."})

    def _told(self, notices: list[Any]) -> None:
        for notice in notices:
            if notice.kind != "saved":
                self.tell({"notice": notice.message})


def on_shared_model(task: Task, tell: Listener, run: Callable[..., list[Any]]) -> StartRanks:
    """Make the model that workers share; what starts them then gives it to them, and saves it."""
    model = SharedModel(task)
    saver = ParentSaver(task, model, tell)
    return lambda on_event, dispensable: saver.start(partial(run, model=model), on_event, dispensable)


def _shared(tensor: Tensor) -> Tensor:
    """A copy in memory that processes share which are forked from this one."""
    count = tensor.numel()
    if count == 0:
        return tensor
    room = torch.frombuffer(mmap.mmap(-1, count * tensor.element_size()), dtype=tensor.dtype)
    return room.view(tensor.shape).copy_(tensor)


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {
        parameter: {key: _shared(v) if isinstance(v, Tensor) else v for key, v in entries.items()}
        for parameter, entries in optimizer.state.items()
    }


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
    return torch.sparse_coo_tensor(indices, parameter.new_empty((0, *shape[1:])), shape)


def _replace_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = tensor
