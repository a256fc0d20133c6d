"""What must hold after a fault, and after the resume that follows it."""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.cases import BATCH, Case
from bench.chaos.runs import Run
from plait.errors import CheckpointError
from plait.run.checkpoint.store import locate_checkpoint

_HELD = 3
"""Shares that a worker who takes what is next has at most: the one that it computes, one that is loaded, one that is
being loaded."""


@dataclass(frozen=True)
class Samples:
    """What a run says of its samples."""

    ids: dict[int, list[int]]
    """Sorted, by step."""
    lost: dict[int, list[int]]
    """Those that it says were not trained on, by step."""
    twice: list[int]
    """Steps with two lines."""


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    losses: list[float]
    samples: Samples
    seconds: float


def samples_of(folder: Path) -> Samples:
    """Read a run's record of samples."""
    ids: dict[int, list[int]] = {}
    lost: dict[int, list[int]] = {}
    twice = []
    path = folder / "samples.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            step = entry["step"]
            if step in ids:
                twice.append(step)
            ids[step] = sorted(ids.get(step, []) + entry["ids"])
            if entry.get("lost"):
                lost[step] = entry["lost"]
    return Samples(ids=ids, lost=lost, twice=twice)


def losses_of(folder: Path) -> list[float]:
    """The loss of every step."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in sorted(entries, key=lambda e: e["step"]) if "loss" in entry]


def reference(run: Run) -> Reference:
    """Of a run that nothing happens to."""
    ended, folder = run.wait(180), run.folder
    assert ended.code == 0, ended
    return Reference(losses=losses_of(folder), samples=samples_of(folder), seconds=ended.seconds)


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint that can be read; -1: there is none."""
    try:
        return int(locate_checkpoint(folder, on_notice=lambda text: None).name.rpartition("-")[2])
    except CheckpointError:
        return -1


def check_result(case: Case, undisturbed: Reference, folder: Path, *, lost_ranks: int) -> list[str]:
    """What does not hold of a run that has come to its end, after whatever happened to it."""
    found, wrong = samples_of(folder), []
    if found.twice:
        wrong.append(f"steps {found.twice[:5]} stand twice")
    taken = Counter(number for ids in found.ids.values() for number in ids)
    repeated = [number for number, count in taken.items() if count > 1]
    if repeated:
        wrong.append(f"{len(repeated)} samples were used twice: {repeated[:8]}")
    missing = {number for ids in undisturbed.samples.ids.values() for number in ids} - taken.keys()
    named = {number for ids in found.lost.values() for number in ids}
    if missing != named:
        wrong.append(
            f"{len(missing)} samples were not used, and {len(named)} are named as lost:"
            f" {sorted(missing - named)[:8]} are not named, {sorted(named - missing)[:8]} were used"
        )
    allowed = lost_ranks * _samples_of_a_rank(case, found) if case.is_free else 0
    if len(missing) > allowed:
        wrong.append(f"{len(missing)} samples were lost, {allowed} may be")
    if not case.is_free and found.ids != undisturbed.samples.ids:
        different = [step for step, ids in undisturbed.samples.ids.items() if found.ids.get(step) != ids]
        wrong.append(f"steps {different[:5]} have other samples")
    if case.exact and losses_of(folder) != undisturbed.losses:
        wrong.append("losses differ from an undisturbed run")
    return wrong


def _samples_of_a_rank(case: Case, found: Samples) -> int:
    """At most what a dead worker held; where each has its own share of every step, that share from some step on."""
    plan = case.resolved()
    share = -(-BATCH // plan.mesh.size)
    return share * (_HELD if plan.agreement.takes_next else len(found.lost))
