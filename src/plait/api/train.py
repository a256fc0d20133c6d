"""Train a job, or go on with a run: everything that `plait run` does but show it.

In: a job, a plan or `auto`; or a run folder. Out: a `Result`, and the run folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.api.auto import choose_for_run
from plait.api.display.loggers import loggers
from plait.api.display.progress import shown
from plait.api.inputs.given import given_job, name_of
from plait.api.inputs.settings import merged, write_arguments, write_settings
from plait.api.inputs.stored import SAVED, stored_changes, stored_saving, stored_settings
from plait.api.inputs.trust import anywhere, check_remembered, fingerprint, seal
from plait.callbacks import Watching
from plait.errors import UsageError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Changes, Limits, Listener, Saving, Trial
from plait.plan.plan import Plan
from plait.run import train as running
from plait.run.parent.found import run_to_resume
from plait.run.record.result import Result
from plait.run.start.party import told_once

AUTO = "auto"
"""Instead of a plan: the one that is predicted to be fastest on this machine."""


def train(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes = Changes(),
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    saving: Saving = Saving(),
    limits: Limits = Limits(),
    trial: Trial = Trial(),
    watching: Watching = Watching(),
) -> Result:
    """Train `job` under `plan` and leave a run folder with its plan, metrics, trace and checkpoints.

    `plan` is a name, a .yaml file, a `Plan`, or `auto`; `ranks` counts every process. `out` is the run folder.
    `changes` sizes axes (mesh={"data": 2, "tensor": 2}), changes the job or the plan (settings={"batch": 128, "sync":
    {"bucket_mib": 4}}), and gives arguments to a job function that is named (args={"lr": 3e-4}). All names are those
    of `plait run --help`.

    In a terminal and in a notebook it shows how it goes; `watching` says otherwise, or whom else to tell.
    """
    with told_once():
        return _train(
            job, plan, ranks, changes=changes, steps=steps, out=out, device=device, saving=saving, limits=limits,
            trial=trial, watching=watching, resume=None,
        )  # fmt: skip


@kept_generators()
def _train(
    job: Job | str,
    plan: str | Path | Plan | None,
    ranks: int | None,
    *,
    changes: Changes,
    steps: int | None,
    device: str,
    saving: Saving,
    limits: Limits,
    watching: Watching,
    **others: Any,
) -> Result:
    with shown(watching.progress, watching.listener) as listener:
        given, of_plan = given_job(job, changes)
        if isinstance(job, str):
            saving = _remembering(saving, job, changes, steps, device)
        if plan == AUTO:
            given, plan, saving = _chosen(given, job, ranks, changes.mesh, device, limits, saving, listener)
        return running.train(
            given, plan, ranks, changes=replace(changes, settings=of_plan), steps=steps, device=device, saving=saving,
            limits=limits,
            watching=replace(watching, listener=listener, callbacks=[*watching.callbacks, *loggers(saving.log)]),
            **others,
        )  # fmt: skip


def _chosen(
    given: Job,
    job: Job | str,
    ranks: int | None,
    mesh: Mapping[str, int],
    device: str,
    limits: Limits,
    saving: Saving,
    listener: Listener | None,
) -> tuple[Job, Plan, Saving]:
    """The job as the plan wants it that is predicted to be fastest here, that plan, and what a folder remembers."""
    if mesh:
        axes = ",".join(f"{name}={size}" for name, size in mesh.items())
        raise UsageError(f"--plan auto chooses the mesh; --mesh {axes} says it.", fix="drop one of the two.")
    auto = choose_for_run(given, name_of(job), ranks, device, _stages(listener), limits.memory)
    if listener is not None:
        listener({"told": auto.told})
    before = saving.remembered.get("settings", ())
    remembered = {**saving.remembered, "settings": [*before, f"accumulate={auto.job.accumulate}"]}
    return auto.job, auto.plan, replace(saving, remembered=remembered)


def _stages(listener: Listener | None) -> Any:
    return lambda stage: listener({"stage": stage}) if listener is not None else None


def _remembering(saving: Saving, job: str, changes: Changes, steps: int | None, device: str) -> Saving:
    """With what `resume` needs to know of a run that was started from a job that is named."""
    remembered = {
        "job": anywhere(job),
        "settings": write_settings(changes.settings),
        "args": write_arguments(changes.args),
        "steps": steps,
        "device": device,
        **{name: getattr(saving, name) for name in SAVED},
        **fingerprint(job),
        **saving.remembered,
    }
    remembered |= seal(remembered)
    name = name_of(job) if saving.name == Saving().name else saving.name
    return replace(saving, name=name, remembered=remembered)


def resume(
    folder: str | Path,
    ranks: int | None = None,
    *,
    job: Job | str | None = None,
    plan: str | Path | Plan | None = None,
    changes: Changes = Changes(),
    steps: int | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    saving: Saving | Mapping[str, Any] | None = None,
    limits: Limits = Limits(),
    trial: Trial = Trial(),
    watching: Watching = Watching(),
) -> Result:
    """Go on with the run in `folder`, on any number of ranks; what is not given is as it was.

    A run that was started from a job that is named (`plait run path.py`, `plait.train("path.py", ...)`) knows its job;
    of others it must be given. What is about to be imported is told; a file that has changed since, or that is another
    user's, is refused unless `limits` say `trust_job`. Files go to `folder`, or to `out`. `saving` as a mapping changes
    single fields of what the run saved before.
    """
    tell = watching.listener or (lambda event: None)
    with told_once(), run_to_resume(Path(folder), tell, outlives=limits.elastic is not None) as known:
        stored = stored_settings(known)
        given = job if job is not None else stored.get("job")
        if given is None:
            raise UsageError(
                f"{folder} does not say which job it ran.",
                fix="name it: plait run path.py --plan ddp --ranks 2.",
            )
        if job is None:
            told = check_remembered(Path(folder), stored, trust=limits.trust_job)
            tell({"told": f"resume: {told}"})
        before = stored_changes(stored, given)
        same = ranks is None and not changes.mesh
        plan = plan or (stored["plan_file"] if "plan_file" in stored and same else stored.get("plan"))
        settings, args = merged(before.settings, changes.settings), {**before.args, **changes.args}
        return _train(
            given, plan, ranks, changes=Changes(mesh=changes.mesh, settings=settings, args=args),
            steps=steps if steps is not None else stored.get("steps"), out=out or folder,
            device=device or stored.get("device", "cpu"), resume=folder,
            saving=saving if isinstance(saving, Saving) else replace(stored_saving(stored), **(saving or {})),
            limits=limits, trial=trial, watching=watching,
        )  # fmt: skip
