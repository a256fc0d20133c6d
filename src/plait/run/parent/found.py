"""Which host has a run that is to go on, and what it has of it: hosts need not share a disk.

In: the run's folder, by the name that all tasks know it by. Out: the folder, at task 0, with all that any of them has:
the newest checkpoint, and the records where they are left. A host that is not the first may hold a copy of what the
first had saved, in `.copy` at the folder's place. What is of another run is never taken.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.errors import CheckpointError, UsageError
from plait.files.scratch import scratch_folder
from plait.files.unused import COPY_NAME
from plait.files.write import write_whole
from plait.options import Listener
from plait.run.checkpoint.files import step_of
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint, save_checkpoint
from plait.run.record.folder import Begun
from plait.run.record.lock import locked
from plait.run.start.party import join, place_here, telling
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower
from plait.run.start.tasks.trunk import Trunk

_SAY_S = 60.0
"""For all tasks to say what they have, once they have met."""
_TOLD = ("environment.json", "plan.yaml")
"""What tasks need to know of a run to go on with it, wherever its folder is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one host has of a run."""

    run: str
    """Which run; empty: an older plait began it, or only a checkpoint was named."""
    step: int | None
    """Of the newest sound checkpoint."""
    has_records: bool
    """Whether its folder is here, or was when it was written."""
    keeps: bool
    """Whether what was saved would be here."""

    @classmethod
    def of(cls, folder: Path) -> "Holding | None":
        """What this host has; None: nothing."""
        copy = folder / COPY_NAME
        run, copied = Begun.of(folder).run, Begun.of(copy).run
        has_records = (folder / "metrics.jsonl").exists()
        is_own = has_records or (folder / "environment.json").exists()
        steps = [_step(folder)] + ([] if is_own and run != copied else [_step(copy)])
        found = [step for step in steps if step is not None]
        if not is_own and copied is None and not found:
            return None
        keeps = is_own or (copy / "checkpoints").is_dir()
        return cls(
            run=run or copied or "", step=max(found, default=None), has_records=has_records, keeps=keeps
        )


def _step(folder: Path) -> int | None:
    with suppress(CheckpointError):
        return step_of(locate_checkpoint(folder, on_notice=lambda text: None))
    return None


def find_run(
    folder: Path, party: First | Follower | None, tell: Listener, *, is_kept: bool
) -> dict[str, str] | None:
    """Have all that any host has of a run in its folder at task 0; returns what it says of how it was started, None:
    there is no such run. `is_kept`: hosts will have copies at that place, where no other run may be."""
    here = Holding.of(folder)
    if isinstance(party, Follower):
        said = {"folder": str(folder), "holding": None if here is None else asdict(here)}
        answer = party.consult(said, lambda trunk, what: _send(folder, trunk, what))
        told: dict[str, str] | None = answer["told"]
        return told
    found: dict[int, Holding] = {} if here is None else {0: here}
    if party is not None:
        for task, heard in party.counsel.hear(str(folder), _SAY_S).items():
            if heard["holding"] is not None:
                found[task] = Holding(**heard["holding"])
    result = None
    if found:
        others = {} if party is None else party.others
        names = {0: "this host"} | {task: f"task {task} on {other.host}" for task, other in others.items()}
        _gather(folder, found, party, names, tell, is_kept=is_kept)
        result = {name: (folder / name).read_text() for name in _TOLD if (folder / name).exists()}
    if party is not None:
        party.counsel.answer({"told": result})
    return result


def _gather(
    folder: Path,
    found: dict[int, Holding],
    party: First | None,
    names: Mapping[int, str],
    tell: Listener,
    *,
    is_kept: bool,
) -> None:
    """Fetch what others have more of."""
    most = max(found, key=lambda task: (found[task].step or -1, found[task].has_records, -task))
    run = found[0 if 0 in found else most].run
    if other := next((task for task, held in found.items() if held.run != run and is_kept), None):
        raise UsageError(
            f"{names[other]} has another run in {folder}.",
            fix="choose another --out, or remove that folder there.",
        )
    same = {task: held for task, held in found.items() if held.run == run}
    if not any(held.keeps or held.step is not None for held in same.values()):
        raise UsageError(
            f"the run in {folder} was saved on hosts that are not here: {', '.join(names[task] for task in same)} took "
            "part in it, and cannot go on alone.",
            fix=f"start it with those hosts too; or begin anew: choose another --out, or remove {folder} on all hosts.",
        )
    for task in sorted(same, key=lambda task: (task != 0, -(same[task].step or -1))):
        if same[task].has_records:
            if task > 0 and party is not None:
                tell({"notice": f"{names[task]} has the records of the run in {folder}: they are fetched."})
                folder.mkdir(parents=True, exist_ok=True)
                party.counsel.fetch(task, folder, "records")
            break
    source = max(same, key=lambda task: (same[task].step or -1, -task))
    if source > 0 and same[source].step is not None and party is not None:
        what = f"the newest checkpoint of the run in {folder}, of step {same[source].step}"
        tell({"notice": f"{names[source]} has {what}: it is fetched."})
        is_one = step_of(folder) is not None
        party.counsel.fetch(source, folder.parent if is_one else folder / COPY_NAME, "checkpoint")
    if (folder / COPY_NAME).is_dir():
        with locked(folder):
            _adopt(folder)


def _adopt(folder: Path) -> None:
    """Make a copy that was kept here the run that is in the folder."""
    copy = folder / COPY_NAME
    with suppress(CheckpointError):
        kept = locate_checkpoint(copy, on_notice=lambda text: None)
        if (step_of(kept) or -1) > (_step(folder) or -1):
            save_checkpoint(folder / "checkpoints", load_checkpoint(kept))
    if not (folder / "environment.json").exists():
        with suppress(
            OSError, ValueError, AttributeError, RecursionError
        ):  # one that is not as it was written
            known = json.loads((copy / "environment.json").read_text())
            known.pop("first_step", None)  # its records are lost
            write_whole(folder / "environment.json", json.dumps(known, indent=2) + "\n")
            write_whole(folder / "plan.yaml", (copy / "plan.yaml").read_text())
    shutil.rmtree(copy, ignore_errors=True)


def _send(folder: Path, trunk: Trunk, what: str) -> None:
    """What task 0 wants of the folder here."""
    if what == "records":
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if (
                path.is_file()
                and parts[0] != "checkpoints"
                and not any(name.startswith(".") for name in parts)
            ):
                trunk.send_tree(folder, path)
        return
    found = [path for path in (folder, folder / COPY_NAME) if _step(path) is not None]
    newest = locate_checkpoint(max(found, key=lambda path: _step(path) or -1), on_notice=lambda text: None)
    trunk.send_tree(newest.parent if newest == folder else newest.parents[1], newest)


@contextmanager
def run_to_resume(folder: Path, tell: Listener, *, outlives: bool) -> Iterator[Path]:
    """The folder of a run that is to go on, as this task can read it: the folder itself, or, of a task that is not the
    first, one with what task 0 says of it."""
    place = place_here()
    party = None if place is None else join(place, None, outlives=outlives)
    if party is None and not (folder / COPY_NAME).is_dir():
        yield folder
        return
    if isinstance(party, Follower):
        told = find_run(folder, party, tell, is_kept=outlives)
        party.found[str(folder)] = told
        with scratch_folder() as written:
            for name, text in (told or {}).items():
                (written / name).write_text(text)
            yield written
        return
    with telling(party):
        told = find_run(folder, party, tell, is_kept=outlives)
        if party is not None:
            party.found[str(folder)] = told
        yield folder
