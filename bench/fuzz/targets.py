"""One broken file of each kind, by a seed: read or refused, within seconds."""

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.fuzz.handed import fuzz_case, fuzz_cluster, fuzz_environment, fuzz_plan, fuzz_weights
from bench.fuzz.kept import fuzz_checkpoint, fuzz_run, fuzz_try
from plait.errors import PlaitError

SECONDS = 20.0
"""No file may take longer, on a busy machine."""
TARGETS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "plan": fuzz_plan,
    "cluster": fuzz_cluster,
    "case": fuzz_case,
    "run": fuzz_run,
    "checkpoint": fuzz_checkpoint,
    "environment": fuzz_environment,
    "weights": fuzz_weights,
    "try": fuzz_try,
}


def attempt(target: str, seed: int, folder: Path) -> str:
    """`read` or `refused`; any other outcome is an exception, and a defect."""
    rng = random.Random(f"{target}-{seed}")
    began = time.monotonic()
    try:
        TARGETS[target](folder, rng)
        outcome = "read"
    except PlaitError as error:
        outcome = "refused" if error.what.strip() else "refused without a word"
    assert time.monotonic() - began < SECONDS, f"it took {time.monotonic() - began:.0f} s"
    return outcome
