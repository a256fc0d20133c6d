"""What it costs that ranks compare digests of their weights: time in it, over the time of the steps in between.

    python -m bench.digests [--steps 500] [--case mlp gpt]

Both times are taken in one run of `ddp` on two ranks, by rank 0, so that other load slows both. The comparison waits
for the other rank, as the next step's sum would; it counts in full. The bar is 1 %; the exit status is 1 where it is
missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist

import plait
from bench.models import CASES
from plait.run.hold.replicas import compare_replicas
from plait.run.loop import guard

EVERY = plait.Limits().compare_every
BAR = 0.01
"""Of the time of the steps between two comparisons."""


def measure(name: str, steps: int) -> float:
    """The median share of an interval between two comparisons that one of them takes."""
    with tempfile.TemporaryDirectory() as place:
        times = Path(place) / "times"

        def timed(*given: Any) -> None:
            began = time.perf_counter()
            compare_replicas(*given)
            if dist.get_rank() == 0:
                with times.open("a") as file:
                    file.write(json.dumps([began, time.perf_counter()]) + "\n")

        with mock.patch.object(guard, "compare_replicas", timed):  # ranks are forked, and inherit it
            plait.train(
                CASES[name].job(),
                "ddp",
                2,
                steps=steps,
                out=Path(place) / "run",
                saving=plait.Saving(trace=False),
            )
        seen = [json.loads(line) for line in times.read_text().splitlines()]
    pairs = [(one[1] - one[0], one[0] - before[1]) for before, one in pairwise(seen)]
    share = statistics.median(took / between for took, between in pairs)
    took, between = (statistics.median(pair[index] for pair in pairs) for index in (0, 1))
    print(f"{name}: {took * 1e3:.2f} ms every {EVERY} steps of {between * 1e3 / EVERY:.2f} ms: {share:.3%}")
    return share


def main() -> int:
    """Of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--case", nargs="+", default=["mlp", "gpt"])
    given = parser.parse_args()
    return int(any(measure(name, given.steps) >= BAR for name in given.case))


if __name__ == "__main__":
    sys.exit(main())
