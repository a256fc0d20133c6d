"""A run that goes on with the ranks that are left.

In: what was lost, and the ranks that there are now. Out: a plan for those, its programs, and the task to start them
with: from what a rank that is left has handed over, or from the last checkpoint. What it took is told and kept in the
run folder, in `outlived.json`.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from plait.cluster.parse import parse_cluster
from plait.errors import CheckpointError, LostError, PlaitError, PlanError, RunError
from plait.files.records import read_records
from plait.files.unused import COPY_NAME
from plait.files.write import write_whole
from plait.job.job import Job
from plait.options import Listener
from plait.plan.ddp import ddp
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan, read_plan
from plait.plan.single import single
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint, save_checkpoint
from plait.run.loop.task import Task
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.record.ledger import write_left_shares
from plait.run.record.lock import locked
from plait.run.start.tasks.first import First
from plait.search.choose.choose import Request, choose, simplest
from plait.search.choose.explain import describe
from plait.search.choose.subject import subject_of_job
from plait.units import format_seconds

SAVE_EVERY = 200
"""Steps between two checkpoints of a run that outlives ranks, where the user names none."""
_SEARCH_S = 5.0
"""For a new plan to be found in: ranks wait for it."""
NAME = "outlived.json"
"""The file of a run folder that says what the run has outlived."""


@dataclass(kw_only=True, slots=True)
class Event:
    """One change of the ranks of a run."""

    what: str
    """What was lost, or who came back."""
    before: str
    """The plan until then."""
    plan: str
    """The plan from then on."""
    step: int
    """With which it went on."""
    repeated_steps: int
    """That had been done before, and were done again."""
    source: str
    """Where the state came from: `memory`, a checkpoint's name, or `the start`."""
    took_s: float | None = None
    """From the moment at which the loss was seen to the end of the first step after it; where an engine has started the
    run again, from the last step before it that was told."""


@dataclass(kw_only=True, slots=True)
class Outlive:
    """Remembers what was lost before."""

    least: int
    """Ranks without which the run ends."""
    most: int
    """Ranks that are used at most."""
    tell: Listener
    limit_bytes: int | None
    """Memory of a device."""
    wanted: Plan
    """The plan with which the run began: used again once there are enough ranks."""
    events: list[Event] = field(default_factory=list)
    _since_s: float = 0.0
    """When the last loss was seen."""

    def hear(self, event: dict[str, Any]) -> None:
        """Pass on what is told of the run; the first step after a loss says how long it took."""
        self.tell(event)
        if self.events and self.events[-1].took_s is None and "loss" in event.get("metrics", {}):
            last = self.events[-1]
            last.took_s = time.monotonic() - self._since_s
            self.tell({"notice": f"going on took {format_seconds(last.took_s)}, {_told(last)}."})

    def begun_again(self, task: Task, start_step: int) -> None:
        """An engine has started the tasks of this run once more, in the folder that it had."""
        path, done = task.folder / NAME, _steps_told(task.folder)
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            self.events = msgspec.json.decode(path.read_bytes(), type=list[Event])
        before = "plan.yaml"
        with suppress(PlaitError):
            before = describe(read_plan(task.folder / "plan.yaml"))
        source = task.resume.name if task.resume is not None else "the start"
        what, last_s = "The run was started again.", time.time()
        try:
            last_s = (task.folder / "metrics.jsonl").stat().st_mtime
        except OSError:
            what += " Its records are lost with their host, and how many steps are repeated is not known."
        self._since_s = time.monotonic() - max(0.0, time.time() - last_s)
        self._add(task, what, before, start_step, done, source)

    def _add(self, task: Task, what: str, before: str, step: int, done: int, source: str) -> None:
        after, repeated = describe(task.plan), max(0, done - step)
        self.events.append(
            Event(what=what, before=before, plan=after, step=step, repeated_steps=repeated, source=source)
        )
        self.tell(
            {
                "notice": f"{what} It goes on with step {step + 1}, from {source}: {after}"
                + (f" instead of {before}" if after != before else "")
                + f"; {repeated} step(s) are repeated."
            }
        )

    def after_loss(
        self, task: Task, programs: Programs, error: LostError, left: int
    ) -> tuple[Task, Programs]:
        """How to go on with the `left` ranks; the loss itself where they are too few."""
        if left < self.least:
            what = f"{error.cause.what} {left} of {task.plan.ranks} ranks are left, --elastic wants {self.least}."
            error.cause.what = what
            raise error.cause
        handed = None if error.handed is None else task.folder / "checkpoints" / Path(error.handed).name
        handed = handed if handed is not None and handed.is_dir() else None
        return self.change(task, programs, min(left, self.most), error.what, handed, error.seen_s)

    def change(
        self, task: Task, programs: Programs, ranks: int, what: str, handed: Path | None, since_s: float
    ) -> tuple[Task, Programs]:
        """The task and programs for another number of ranks."""
        self._since_s = since_s
        plans = _candidates(task.job, self.wanted, ranks, self.least, self.limit_bytes)
        found = _programs_for(task, programs, plans, self.limit_bytes)
        checkpoint = handed if handed is not None else self._last(task.folder)
        step = load_checkpoint(checkpoint).step if checkpoint is not None else 0
        seen = _steps_told(task.folder)
        order = found.whole.order(found.captures.source.num_samples)
        write_left_shares(
            task.folder, step, samples=task.record_samples, order=order,
            tell=lambda text: self.tell({"notice": text}),
            trained=handed is not None and task.plan.agreement.weights == "server",
        )  # fmt: skip
        source = (
            "memory" if handed is not None else checkpoint.name if checkpoint is not None else "the start"
        )
        write_whole(task.folder / "plan.yaml", found.plan.to_yaml())
        for name in ("failure.txt", *(path.name for path in task.folder.glob("failed-rank-*.txt"))):
            (task.folder / name).unlink(missing_ok=True)
        following = replace(
            task, plan=found.plan, job=found.whole, resume=checkpoint, attempt=task.attempt + 1
        )
        self._add(following, what, describe(task.plan), step, seen, source)
        return following, found

    def write(self, folder: Path) -> None:
        """Keep what was outlived in the run folder."""
        if self.events:
            write_whole(folder / NAME, json.dumps([asdict(event) for event in self.events], indent=2) + "\n")

    def _last(self, folder: Path) -> Path | None:
        try:
            return locate_checkpoint(folder, on_notice=lambda text: self.tell({"notice": text}))
        except CheckpointError:
            return None


def hand_on(run: Path, written: Path, write: Callable[[int], str | None]) -> None:
    """Task 0 is lost: keep what ranks here hold in the run folder, or as a copy at its place on this host, for whoever
    starts the run again. `write` has one of them write to the folder `written`, of a step beyond one that is saved."""
    kept = run if run == written else run / COPY_NAME
    with suppress(PlaitError, OSError):
        run.mkdir(parents=True, exist_ok=True)
        with locked(
            run
        ):  # one at a time; and nobody while task 0 lives, which others have only lost sight of
            try:
                known = load_checkpoint(locate_checkpoint(kept, on_notice=lambda text: None)).step
            except CheckpointError:
                known = -1
            handed = write(known)
            if handed is not None and kept != written:
                save_checkpoint(kept / "checkpoints", load_checkpoint(Path(handed)))


def plan_on(plan: Plan, ranks: int) -> Plan:
    """A plan like this one for exactly so many ranks; the same on all hosts, whatever is known of their speed."""
    for found in _candidates(None, plan, ranks, ranks, None):
        if found.ranks == ranks:
            return found
    raise PlanError(
        f"plan {plan.name} cannot be cut down to {ranks} ranks.", fix="start another number of tasks."
    )


def plan_for_those_here(plan: Plan, party: First | None, elastic: tuple[int, int] | None) -> Plan:
    """The plan for the tasks with which the run begins, where an engine has started it without some."""
    if party is None or not party.place.absent:
        return plan
    ranks, least = party.members.begin_without(plan.ranks), plan.ranks if elastic is None else elastic[0]
    if ranks < least:
        raise RunError(
            f"{party.place.absent} of {party.place.tasks} hosts are lost: {ranks} of {plan.ranks} ranks are left, "
            f"--elastic wants {least}.",
            fix="start it again with --resume once they are back.",
        )
    found = plan_on(plan, ranks)
    party.members.spread(found.ranks)
    return found


def _told(event: Event) -> str:
    steps = event.repeated_steps
    return f"{steps} step{'' if steps == 1 else 's'} repeated"


def _steps_told(folder: Path) -> int:
    """Steps of which the journal tells."""
    path = folder / "metrics.jsonl"
    entries = read_records(path).entries if path.exists() else ()
    return 1 + max((entry["step"] for entry in entries if "loss" in entry), default=-1)


def _programs_for(task: Task, programs: Programs, plans: Iterator[Plan], limit_bytes: int | None) -> Programs:
    """Programs of the first plan that compiles and fits."""
    job, refused = programs.whole, []
    captures = None if job.objectives else programs.captures
    for plan in plans:
        try:
            return prepare(job, plan, task.device, task.dtype, lambda event: None, captures, limit_bytes)
        except PlanError as error:
            refused.append(f"{describe(plan)}: {error.what}")
    raise PlanError(
        f"no plan for the ranks that are left can be used: {'; '.join(refused)}.",
        fix="go on by hand: plait run --resume with another --plan.",
    )


def _candidates(
    job: Job | None, plan: Plan, ranks: int, least: int, limit_bytes: int | None
) -> Iterator[Plan]:
    """Plans for so many ranks, the best first: the same one with another `data`, where that is its only axis; else
    those that are predicted to be fastest; else those that keep most of its ranks and axes."""
    inner = {name: size for name, size in plan.mesh.axes if name != DATA and size > 1}
    if ranks == plan.ranks:
        yield plan
    if not plan.agreement.sums:
        yield replace(plan, mesh=Mesh(axes=((DATA, ranks - plan.sync.servers),)))
        return
    if not inner:
        yield _on(plan, {DATA: ranks})
        return
    if job is not None:
        yield from _predicted(job, ranks, least, limit_bytes)
    cuts = [[n for n in range(1, size + 1) if size % n == 0] for size in inner.values()]
    sizes = [dict(zip(inner, found, strict=True)) for found in product(*cuts)]
    meshes = [{DATA: ranks // prod(found.values()), **found} for found in sizes]
    usable = [found for found in meshes if least <= prod(found.values())]
    for found in sorted(usable, key=lambda axes: (-prod(axes.values()), axes[DATA])):
        yield _on(plan, found)


def _on(plan: Plan, sizes: dict[str, int]) -> Plan:
    if all(size == 1 for name, size in sizes.items() if name != DATA) and not plan.memory.zero:
        return replace(ddp(sizes[DATA]), sync=plan.sync) if sizes[DATA] > 1 else single(1)
    named = dict(plan.mesh.axes)
    axes = tuple((name, sizes.get(name, 1)) for name in named if name in sizes or named[name] == 1)
    if DATA not in named:
        axes = ((DATA, sizes[DATA]), *axes)
    return replace(plan, mesh=Mesh(axes=axes), placements=())


def _predicted(job: Job, ranks: int, least: int, limit_bytes: int | None) -> Sequence[Plan]:
    """By the sketch of each plan on a cluster like this machine, where that was measured."""
    found = []
    try:
        cluster, subject = parse_cluster("this"), subject_of_job(job, "job")
        for count in range(ranks, least - 1, -1):
            devices = replace(cluster, hosts=1, devices_per_host=count)
            request = Request(ranks=count, limit_bytes=limit_bytes, top=4, seconds=_SEARCH_S)
            ranking = choose(subject, devices, request)
            found += [p for p in ranking.predictions if p.num_micro_batches == job.accumulate]
    except PlaitError:  # not measured, not captured, or nothing fits
        pass
    found.sort(key=lambda one: one.step_s)
    return [one.plan for one in ([simplest(found)] if found else []) + found]
