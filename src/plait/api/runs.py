"""What is done with a run that ended.

In: a run folder. Out: the trained weights as a file, or the trained model as other tools take it.
"""

import inspect
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.api.inputs.given import given_job
from plait.api.inputs.stored import stored_changes, stored_settings
from plait.api.inputs.trust import check_remembered
from plait.errors import UsageError
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.options import Exported
from plait.run.checkpoint.state import restore_model
from plait.run.checkpoint.store import export_checkpoint, load_checkpoint

_FILES = {
    "safetensors": "weights.safetensors",
    "state_dict": "weights.pt",
    "huggingface": "huggingface",
    "onnx": "model.onnx",
}
"""What is written beside a run, by format."""
_EXAMPLES = 2
"""Samples that a graph is exported with; their number is left open."""


def export(
    folder: str | Path,
    *,
    to: Exported = "safetensors",
    out: str | Path | None = None,
    job: Job | str | None = None,
    trust_job: bool = False,
) -> Path:
    """Write the trained weights of a run, or of a checkpoint, under the model's own names; returns the file.

    `huggingface` is a folder that `from_pretrained` takes, of a model that has `save_pretrained`; `onnx` the graph of
    the model in eval mode, by torch's own exporter without TorchScript. Both need the model: a run that was started
    from a named job knows it, of others `job` must be given; a file that has changed since is refused unless
    `trust_job`.
    """
    if to not in _FILES:
        raise UsageError(f"--to {to!r} is not known.", fix=f"use one of {', '.join(_FILES)}.")
    path = Path(out) if out is not None else Path(folder) / _FILES[to]
    if to == "safetensors" or to == "state_dict":
        return export_checkpoint(Path(folder), to=to, out=path)
    given = _job_of(Path(folder), job, trust=trust_job)
    model = given.build_model()
    restore_model(model, load_checkpoint(Path(folder)))
    return _to_huggingface(model, path) if to == "huggingface" else _to_onnx(model.eval(), given, path)


def _job_of(folder: Path, job: Job | str | None, *, trust: bool) -> Job:
    """The job of a run, as it was given or as the run remembers it."""
    run = next(
        (one for one in (folder, *folder.absolute().parents[:2]) if (one / "environment.json").exists()),
        folder,
    )
    stored = stored_settings(run)
    named = job if job is not None else stored.get("job")
    if named is None:
        raise UsageError(f"{folder} does not say which job it ran.", fix="name it: --job path.py:function.")
    if job is None:
        check_remembered(run, stored, trust=trust)
    return given_job(named, stored_changes(stored, named))[0]


def _to_huggingface(model: nn.Module, path: Path) -> Path:
    save: Any = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise UsageError(
            f"{type(model).__name__} has no save_pretrained: it is no model of Hugging Face's.",
            fix="use --to safetensors, whose file any model of this class can load.",
        )
    save(path)
    return path


def _to_onnx(model: nn.Module, job: Job, path: Path) -> Path:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UsageError(f"--to onnx needs {' and '.join(missing)}.", fix="pip install 'plait[onnx]'.")
    args, kwargs = _inputs(model, job)
    batch = torch.export.Dim("batch", min=1)

    def open_(value: Any) -> Any:
        return (
            {0: batch} if isinstance(value, Tensor) and value.ndim and value.shape[0] == _EXAMPLES else None
        )

    names = list(inspect.signature(model.forward).parameters)
    shapes = {name: open_(value) for name, value in (*zip(names, args, strict=False), *kwargs.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own use of what torch deprecates
        torch.onnx.export(
            model, args, str(path), kwargs=dict(kwargs), dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    return path


def _inputs(model: nn.Module, job: Job) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What the model takes, of the first samples."""
    source = open_data(job.data, job.collate)
    if source.num_samples is None:
        raise UsageError(
            "the data is a stream, of which no samples are kept to export with.", fix="use --to safetensors."
        )
    batch: Any = source.fetch(torch.arange(_EXAMPLES))
    if isinstance(batch, Mapping):
        taken = inspect.signature(model.forward).parameters
        return (), {name: value for name, value in batch.items() if name in taken and name != "labels"}
    if job.loss is not None and isinstance(batch, (list, tuple)):
        return tuple(batch[:-1]), {}
    raise UsageError(
        "what of a batch the model takes is known to the job's objective alone.",
        fix="give Job(loss=...), or use --to safetensors.",
    )
