"""Whether a checkpoint is one that this job can have left.

In: a checkpoint whose sums are right, and the job that is to go on from it. Out: what it says of its run, and sentences
on what is odd about it and may still be so; or an error that names what cannot be. Numbers that a run may have
left are believed: whoever can write to a checkpoint can change its weights.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from torch import Tensor

from plait.errors import CheckpointError
from plait.files.document import Document
from plait.files.shape import shaped
from plait.job.job import Job
from plait.job.updates.optimizer_state import Updated, kept_by_name
from plait.run.checkpoint.files import FORMAT
from plait.run.checkpoint.state import TrainingState
from plait.run.hold.worker_states import Workers, workers_of

_Count = Annotated[int, msgspec.Meta(ge=0)]
_FIX = "resume with the job and the checkpoint that were saved."


class Said(msgspec.Struct):
    """What a checkpoint says of the run that wrote it (`Task.kept`)."""

    seed: _Count
    batch: _Count
    epochs: _Count | None
    steps: _Count | None
    shuffle: bool
    drop_last: bool
    num_samples: _Count | None
    progress: dict[str, Any]
    plan: str
    loss_scale: dict[str, Any] | None = None
    workers: Workers | None = None


def said_by(state: TrainingState, where: Path) -> Said:
    """What it says, all of it there and of its type."""
    said = shaped(Document(values=state.extra, where=f"{where}: extra"), Said, FORMAT)
    workers_of(state)
    return said


def check_sound(state: TrainingState, job: Job, where: Path) -> list[str]:
    """Refuse what the job cannot have left; what is odd, a sentence each."""
    odd = []
    expected = _expected(state, job)
    without: set[str] = set()
    for whose, tensors, values in _optimizers(state):
        for name, kept in expected.items():
            found = {**tensors.get(name, {}), **values.get(name, {})}
            if found:
                _check_kept(kept, found, f"{where}: {whose}", name, state.step * job.batch)
            elif kept:
                without.add(name)
    without -= job.frozen_in(0, list(expected)) & job.frozen_in(state.step - 1, list(expected))
    if without and state.step:
        odd.append(
            f"the checkpoint holds nothing of what the optimizer keeps of {_some(without)}, as if they had not been"
            " updated before: that starts anew."
        )
    if spoiled := _not_finite(state):
        odd.append(f"the checkpoint holds numbers that are not finite, of {_some(spoiled)}.")
    if job.average is not None:
        due = sum(job.average.is_due(step) for step in range(state.step))
        if due != state.averaged:
            odd.append(
                f"averages were taken {state.averaged} times; the job would have taken them {due} times."
            )
    if job.precision == "fp16" and "loss_scale" not in state.extra:
        odd.append("the checkpoint holds no loss scale: it is looked for anew.")
    return odd


def _expected(state: TrainingState, job: Job) -> Mapping[str, Mapping[str, Any]]:
    """What the job's optimizer keeps, by parameter, as fake tensors and numbers."""
    names = [name for group in state.optimizer.groups for name in group["names"] if name in state.parameters]
    updated = [
        Updated(name=name, shape=tuple(state.parameters[name].shape), dtype=state.parameters[name].dtype)
        for name in names
    ]
    try:
        return kept_by_name(job.build_optimizer, updated)
    except Exception:  # the job has another optimizer, or other parameters: told where it is built
        return {}


def _optimizers(state: TrainingState) -> Iterator[tuple[str, dict[str, dict[str, Tensor]], dict[str, Any]]]:
    """(whose, tensors, numbers) of the run's, and of those that workers have of their own."""
    yield "the optimizer", state.optimizer.tensors, state.optimizer.values
    workers = workers_of(state)
    for rank, numbers in enumerate(workers.numbers if workers is not None else ()):
        prefix, tensors = f"worker {rank}/optimizer/", dict[str, dict[str, Tensor]]()
        for joined, tensor in state.beside.items():
            if joined.startswith(prefix):
                name, _, key = joined.removeprefix(prefix).rpartition("/")
                tensors.setdefault(name, {})[key] = tensor
        yield f"the optimizer of worker {rank}", tensors, numbers


def _check_kept(kept: Mapping[str, Any], found: Mapping[str, Any], whose: str, name: str, most: int) -> None:
    """`most`: updates that there can have been."""
    for key, own in kept.items():
        there = found.get(key)
        if key not in found or _form(there) != _form(own):
            raise CheckpointError(
                f"{whose} keeps {key!r} of {name!r} as {_told(own)}; the checkpoint has"
                f" {_told(there) if key in found else 'nothing'}",
                fix=_FIX,
            )
        count = float(there) if key == "step" and there is not None else 0.0
        if not (0 <= count <= most and count == int(count)):
            raise CheckpointError(
                f"{whose} has updated {name!r} {count:g} times, of {most} at most", fix=_FIX
            )


def _form(value: Any) -> Any:
    """What must be alike; counters may be of any type of numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.is_floating_point() or value.dim() == 0
    return None if value is None else "a number"


def _told(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else str(value)


def _not_finite(state: TrainingState) -> list[str]:
    """Names of tensors that hold NaN; or infinity, which of all only a mask may hold, and that is a buffer."""
    optimizer = {
        f"{name}/{key}": t for name, held in state.optimizer.tensors.items() for key, t in held.items()
    }
    spoiled = []
    for held in (state.parameters, state.buffers, state.average, state.beside, optimizer):
        for name, tensor in held.items():
            is_buffer = name in state.buffers or "/buffer/" in name
            if bool((tensor.isnan() if is_buffer else ~tensor.isfinite()).any()):
                spoiled.append(name)
    return spoiled


def _some(names: Collection[str]) -> str:
    first, count = min(names), len(names)
    return repr(first) if count == 1 else f"{first!r} and {count - 1} more"
