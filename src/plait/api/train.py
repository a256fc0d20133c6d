"""Train a job, or go on with a run: everything that `plait run` does but show it.

In: a job, a plan or `auto`; or a run folder. Out: a `Result`, and the run folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.api.auto import choose_for_run
from plait.api.display.loggers import loggers
from plait.api.display.progress import shown
from plait.api.inputs.given import given_job, name_of
from plait.api.inputs.settings import (
    merged,
    parse_arguments,
    parse_settings,
    write_arguments,
    write_settings,
)
from plait.api.inputs.stored import SAVED, stored_saving, stored_settings
from plait.api.inputs.trust import anywhere, check_remembered, fingerprint
from plait.callbacks import Callback
from plait.errors import UsageError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Limits, Listener, Saving, Trial
from plait.plan.plan import Plan
from plait.run import train as running
from plait.run.parent.found import run_to_resume
from plait.run.record.result import Result
from plait.run.start.party import told_once

AUTO = "auto"
"""Instead of a plan: the one that is predicted to be fastest on this machine."""


@kept_generators()
def train(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    resume: str | Path | None = None,
    trace: bool = True,
    listener: Listener | None = None,
    saving: Saving = Saving(),
    limits: Limits = Limits(),
    trial: Trial = Trial(),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Train `job` under `plan` and leave a run folder with its plan, metrics, trace and checkpoints.

    `plan` is a name, a .yaml file, a `Plan`, or `auto`; `ranks` counts every process. `mesh` sizes axes ({"data": 2,
    "tensor": 2}), `settings` change the plan ({"sync": {"bucket_mib": 4}}), `args` are those of a job function that is
    named ({"lr": 3e-4}). `out` is the run folder, `resume` one to
    go on with, and `listener` is told what happens meanwhile. All names are those of `plait run --help`.

    In a terminal and in a notebook it shows how it goes; `progress=False` does not, True does everywhere. `callbacks`
    are called in this process, see `plait.Callback`.
    """
    with told_once(), shown(progress, listener) as hears:
        return _train(
            job, plan, ranks, mesh=mesh, settings=settings, args=args, steps=steps, out=out, device=device,
            resume=resume, trace=trace, listener=hears, saving=saving, limits=limits, trial=trial, callbacks=callbacks,
        )  # fmt: skip


def _train(
    job: Job | str,
    plan: str | Path | Plan | None,
    ranks: int | None,
    *,
    settings: Mapping[str, Any] | None,
    args: Mapping[str, Any] | None,
    mesh: Mapping[str, int] | None,
    steps: int | None,
    device: str,
    listener: Listener | None,
    saving: Saving,
    limits: Limits,
    callbacks: Sequence[Callback],
    **others: Any,
) -> Result:
    given, of_plan = given_job(job, settings, args)
    if isinstance(job, str):
        saving = _remembering(saving, job, settings or {}, args or {}, steps, device)
    if plan == AUTO:
        if mesh:
            axes = ",".join(f"{name}={size}" for name, size in mesh.items())
            raise UsageError(
                f"--plan auto chooses the mesh; --mesh {axes} says it.", fix="drop one of the two."
            )
        auto = choose_for_run(given, name_of(job), ranks, device, _stages(listener), limits.memory)
        given, plan = auto.job, auto.plan
        if listener is not None:
            listener({"told": auto.told})
        before = saving.remembered.get("settings", ())
        remembered = {**saving.remembered, "settings": [*before, f"accumulate={given.accumulate}"]}
        saving = replace(saving, remembered=remembered)
    return running.train(
        given, plan, ranks, mesh=mesh, settings=of_plan, steps=steps, device=device, listener=listener, saving=saving,
        limits=limits, callbacks=[*callbacks, *loggers(saving.log)], **others,
    )  # fmt: skip


def _stages(listener: Listener | None) -> Any:
    return lambda stage: listener({"stage": stage}) if listener is not None else None


def _remembering(
    saving: Saving,
    job: str,
    settings: Mapping[str, Any],
    args: Mapping[str, Any],
    steps: int | None,
    device: str,
) -> Saving:
    """With what `resume` needs to know of a run that was started from a job that is named."""
    remembered = {
        "job": anywhere(job),
        "settings": write_settings(settings),
        "args": write_arguments(args),
        "steps": steps,
        "device": device,
        **{name: getattr(saving, name) for name in SAVED},
        **fingerprint(job),
        **saving.remembered,
    }
    name = name_of(job) if saving.name == Saving().name else saving.name
    return replace(saving, name=name, remembered=remembered)


def resume(
    folder: str | Path,
    ranks: int | None = None,
    *,
    job: Job | str | None = None,
    plan: str | Path | Plan | None = None,
    mesh: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    trace: bool = True,
    listener: Listener | None = None,
    saving: Saving | Mapping[str, Any] | None = None,
    limits: Limits = Limits(),
    trial: Trial = Trial(),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    trust_job: bool = False,
) -> Result:
    """Go on with the run in `folder`, on any number of ranks; what is not given is as it was.

    A run that was started from a job that is named (`plait run path.py`, `plait.train("path.py", ...)`) knows its job;
    of others it must be given. What is about to be imported is told; a file that has changed since, or that is another
    user's, is refused unless `trust_job`. `saving` as a mapping changes single fields of what the run saved before.
    """
    hears = listener if listener is not None else (lambda event: None)
    with told_once(), run_to_resume(Path(folder), hears, outlives=limits.elastic is not None) as known:
        stored = stored_settings(known)
        return _resume(
            Path(folder), stored, ranks, job=job, plan=plan, mesh=mesh, settings=settings, args=args, steps=steps,
            out=out, device=device, trace=trace, listener=listener, saving=saving, limits=limits, trial=trial,
            callbacks=callbacks, progress=progress, trust_job=trust_job,
        )  # fmt: skip


def _resume(
    folder: Path,
    stored: dict[str, Any],
    ranks: int | None,
    *,
    job: Job | str | None,
    plan: str | Path | Plan | None,
    mesh: Mapping[str, int] | None,
    settings: Mapping[str, Any] | None,
    args: Mapping[str, Any] | None,
    steps: int | None,
    out: str | Path | None,
    device: str | None,
    listener: Listener | None,
    saving: Saving | Mapping[str, Any] | None,
    trust_job: bool,
    **others: Any,
) -> Result:
    """Go on with a run of which this is `stored`."""
    given = job if job is not None else stored.get("job")
    if given is None:
        raise UsageError(
            f"{folder} does not say which job it ran.", fix="name it: plait run path.py --plan ddp --ranks 2."
        )
    if job is None:
        told = check_remembered(folder, stored, trust=trust_job)
        if listener is not None:
            listener({"told": f"resume: {told}"})
    before = parse_settings(stored.get("settings", []))
    before.pop("weights", None)  # the checkpoint's count
    same = ranks is None and not mesh
    plan = plan or (stored["plan_file"] if "plan_file" in stored and same else stored.get("plan"))
    kept = parse_arguments(stored.get("args", [])) if isinstance(given, str) else {}
    return train(
        given, plan, ranks, mesh=mesh, args={**kept, **(args or {})},
        settings=merged(before, settings or {}),
        steps=steps if steps is not None else stored.get("steps"), out=out or folder,
        device=device or stored.get("device", "cpu"), resume=folder, listener=listener,
        saving=saving if isinstance(saving, Saving) else replace(stored_saving(stored), **(saving or {})), **others,
    )  # fmt: skip
