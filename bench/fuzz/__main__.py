"""Many broken files of each kind.

    python -m bench.fuzz [--cases 2000] [--seed 0] [plan cluster case run checkpoint environment weights try]

Real files are mutated. A reader may raise a `PlaitError`, and must do so within seconds. The seed of every failure is
printed.
"""

import argparse
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench.fuzz.targets import TARGETS, attempt


def main() -> None:
    """Try many cases of each kind of file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed = 0
    for target in given.targets or TARGETS:
        counts = {"read": 0, "refused": 0, "failed": 0}
        began = time.monotonic()
        for seed in range(given.seed, given.seed + given.cases):
            folder = Path(tempfile.mkdtemp(prefix="plait-fuzz-"))
            try:
                counts[attempt(target, seed, folder)] += 1
            except Exception:
                counts["failed"] += 1
                last = traceback.format_exc().strip().splitlines()
                print(
                    f"{target} seed {seed}: {last[-1][:200]}  <- {last[-3].strip()[:160] if len(last) > 3 else ''}"
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        failed += counts["failed"]
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"{target}: {told} of {given.cases} in {time.monotonic() - began:.0f} s; peak {peak_mib:.0f} MiB",
            flush=True,
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
