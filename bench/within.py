"""Sharded and tensor-parallel plans beside torch's own: zero3 beside FSDP2, megatron beside parallelize_module.

In: how many pairs to measure. Out: a table of throughput ratios (over 1: plait is faster) with their quartiles; with
`--assert` it exits 1 where a bar is missed. The bar of 1 / 0.9 says: at most 0.9 of the other's time. See
bench/README.md for how systems are measured in turn.

    python -m bench.within [--pairs 10] [--json FILE] [--assert]
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.data_parallel import RANKS, Row, compare, measure, show

BAR = 1 / 0.9
CASE = "block_gpt"
"""20 M parameters: 80 MB to gather twice and to sum once a step, beside about as much time of computation."""


def rows(pairs: int) -> list[Row]:
    """Every system set up in the same processes, timed in turn."""
    found = []
    plait = {"zero3": "plait:plan=zero3", "megatron": "plait:plan=megatron", "ddp": "plait:plan=ddp"}
    extra = [
        "plait:plan=zero1",
        "plait:plan=zero2",
        "plait:plan=zero3,links=gloo",
        "plait:plan=megatron,links=gloo",
    ]
    systems = [*plait.values(), "fsdp2", "dtensor", "ddp", *extra]
    times = measure(CASE, systems, pairs, ranks=RANKS)
    for name, other, bar in (("zero3", "fsdp2", BAR), ("megatron", "dtensor", BAR), ("ddp", "ddp", 0.97)):
        found.append(compare("within", name, times, plait[name], other, bar))
    for name, other in zip(extra, ("ddp", "ddp", "fsdp2", "dtensor"), strict=True):
        found.append(compare("within", name.removeprefix("plait:plan="), times, name, other, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--assert", dest="assert_", action="store_true")
    given = parser.parse_args()
    found = rows(given.pairs)
    show(found, Console(width=None if sys.stdout.isatty() else 130))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    if given.assert_ and not all(row.holds for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
