"""Every value in a real checkpoint is taken away or replaced, and sums computed anew: that is told, or harmless."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.run.checkpoint.checkpoint_states import remake_manifest
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import plait
from plait.errors import PlaitError
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.checkpoint.files import step_folders
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.averaging import Averaging
from plait.run.hold.state import ModelState
from plait.run.hold.worker_states import restore_workers
from plait.run.parent.resume import continued_from
from plait.run.record.evaluate import Kept, Progress

NASTY: tuple[Any, ...] = (None, True, -1, 10**25, math.nan, -math.inf, "x", [], {})
BELIEVED = (
    "best",
    "kept",
    "kept_step",
    "since_best",
    "num_bad_epochs",
    "last_epoch",
    "rates",
    "good",
    "skipped",
    "factor",
)
"""Numbers that a run may have left: of another one, that is not told."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def make_job(**changes: Any) -> plait.Job:
    torch.manual_seed(0)
    data = [(torch.randn(3), torch.randn(3)) for _ in range(8)]
    job = plait.Job(
        model=Tied, data=data, loss=nn.MSELoss(), batch=4, steps=3, seed=3, evaluate=data, evaluate_every=1,
        until=plait.Until(patience=9), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )  # fmt: skip
    return replace(job, **changes)


RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 2, {
        "average": plait.Average(kind="swa"), "follow": "train_loss",
        "schedule": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    }),
    "zero3": ("zero3", 2, {"precision": "fp16", "schedule": lambda step: 0.01}),
    "diloco": ("diloco", 2, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}),
    "easgd": ("easgd", 2, {"evaluate": None, "evaluate_every": None, "until": None}),
    "server-async": ("server-async", 3, {"evaluate": None, "evaluate_every": None, "until": None}),
}  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values, tables and lists included."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from leaves(value[key], (*path, key))


def edited(data: Any, path: tuple[Any, ...], *new: Any) -> Any:
    """A copy with another value at the path, or none."""
    copy = json.loads(json.dumps(data))
    around = copy
    for key in path[:-1]:
        around = around[key]
    del around[path[-1]]
    if new and isinstance(around, list):
        around.insert(path[-1], new[0])
    elif new:
        around[path[-1]] = new[0]
    return copy


def taken_over(folder: Path, job: plait.Job, plan: Plan) -> tuple[list[str], list[Any]]:
    """What is told to who resumes, and everything that the next step depends on."""
    continued = continued_from(folder, job)
    told = continued.changes(job, plan, len(job.data))
    saved = load_checkpoint(folder)
    state = ModelState(job, torch.device("cpu"), torch.float32)
    state.load(saved)
    averaging = Averaging(state, None)  # type: ignore[arg-type]  # nothing is sent
    if plan.agreement.averages:
        averaging.anchor(center=plan.agreement.mix in ("outer", "elastic"))
        restore_workers(saved, state, averaging, plan, 1)
    state.schedule.apply(state.optimizer, saved.step)
    progress, kept = Progress(job.until), Kept(None)
    progress.load(saved.extra["progress"])
    kept.load(saved.extra["progress"])
    averages = (state.averages.count, state.averages.tensors) if state.averages is not None else None
    scale = vars(state.loss_scale) if state.loss_scale is not None else None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    held = [
        list(state.optimizer.state[p].items())
        for p in state.parameters.values()
        if p in state.optimizer.state
    ]
    plateau = state.schedule.state_dict()
    exported = (saved.aliases, sorted(saved.transient), saved.averaged)
    found = [state.steps_done, dict(state.parameters), state.buffers, held, groups, averages, scale, plateau]
    return told, [*found, exported, averaging.center, averaging.velocity, vars(progress), vars(kept)]


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine is theirs or bool(mine == theirs)


def is_silent(folder: Path, job: plait.Job, plan: Plan, whole: tuple[list[str], list[Any]]) -> bool:
    """Whether something else is trained from here on, and nobody was told; any other error than ours is a defect."""
    remake_manifest(folder)
    try:
        told, found = taken_over(folder, job, plan)
    except PlaitError as error:
        return not error.what.strip()
    return told == whole[0] and not same(found, whole[1])


@pytest.mark.parametrize("name", RUNS)
def test_every_leaf_of_a_checkpoint_is_told_or_harmless(name: str, tmp_path: Path) -> None:
    plan_name, ranks, changes = RUNS[name]
    job, plan = make_job(**changes), resolve(plan_name, ranks)
    plait.train(job, plan_name, ranks, out=tmp_path / "run", saving=plait.Saving(trace=False))
    folder = step_folders(tmp_path / "run" / "checkpoints")[-1]
    whole = taken_over(folder, job, plan)
    assert bool(whole[0]) == (name == "easgd"), "workers of easgd alone keep what no checkpoint holds"
    state = folder / "state.json"
    data = json.loads(state.read_text())
    silent = []
    for path in leaves(data):
        for new in ((), *((value,) for value in NASTY)):
            state.write_text(json.dumps(edited(data, path, *new)))
            believed = bool(new) and any(key in BELIEVED for key in path) and isinstance(new[0], int | float)
            believed |= "progress" in path and new in ((None,), ({},))  # nothing was measured yet
            if not believed and is_silent(folder, job, plan, whole):
                silent.append((path, *new))
    state.write_text(json.dumps(data))
    for file in ("optimizer.safetensors", "model.safetensors"):
        tensors = load_file(folder / file)
        for key, tensor in tensors.items():
            forms = [None, tensor.reshape(-1)[:0], tensor.unsqueeze(0).repeat(2, *[1] * tensor.dim())]
            spoiled = [torch.full_like(tensor, math.nan)] if tensor.is_floating_point() else []
            for new_tensor in [*forms, *spoiled]:
                changed = {k: t for k, t in tensors.items() if k != key or new_tensor is not None}
                save_file(changed | ({key: new_tensor} if new_tensor is not None else {}), folder / file)
                if is_silent(folder, job, plan, whole):
                    silent.append((key, new_tensor))
        for parameter in {key.rpartition("/")[0] for key in tensors if "/" in key}:  # all of one parameter's
            save_file({k: t for k, t in tensors.items() if k.rpartition("/")[0] != parameter}, folder / file)
            if is_silent(folder, job, plan, whole):
                silent.append((parameter, "wholly missing"))
        save_file(tensors, folder / file)
    assert silent == []
