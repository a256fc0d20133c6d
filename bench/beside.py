"""What compiling segments beside the steps does to a run: `python -m bench.beside [--device cuda] [--steps 4000]`.

In: a case of `bench.gpu`, and settings of `compile`. Out: for each, a line: seconds from the first step until compiled
segments are in use, for how long steps waited, medians of a step before and after, the last loss. Each is a run of its
own, of the whole loop; with `--fresh` the first finds nothing compiled on disk.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import plait
from bench.gpu import CASES
from plait.options import Changes, Saving


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="gpt-12x256", choices=sorted(CASES))
    parser.add_argument("--ways", default="off,on,on,before")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, of the plan")
    parser.add_argument("--fresh", action="store_true", help="with an empty folder for compiled code")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.fresh:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        for number, way in enumerate(given.ways.split(",")):
            settings = {"compile": way} | dict(entry.split("=", 1) for entry in given.set)
            print(json.dumps(measured(given, settings, Path(folder, str(number)))), flush=True)


def measured(given: argparse.Namespace, settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """One run."""
    plait.train(
        CASES[given.case].job(), "single", steps=given.steps, device=given.device, out=out,
        changes=Changes(settings=settings), saving=Saving(trace=False),
    )  # fmt: skip
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in steps if "loss" in entry]
    compiled = json.loads((out / "totals.json").read_text()).get("compiled") or {}
    first = compiled.get("first_step")
    found: dict[str, Any] = {"case": given.case, **settings, "loss": steps[-1]["loss"], "compiled": compiled}
    times = [entry["step_s"] for entry in steps]
    if first is not None:
        found |= {
            "in_use_after_s": sum(times[:first]),
            "before_ms": 1e3 * median(times[first // 2 : first - 1]),
        }
    found["after_ms"] = 1e3 * median(times[-len(times) // 4 :])
    return found


if __name__ == "__main__":
    main()
