"""plait beside a hand-written DDP loop, Accelerate and Lightning Fabric: same model, data, batch and ranks, in one
run.

In: which parts to measure. Out: tables of throughput ratios (over 1: plait is faster) with their quartiles beside
the bars, and with `--json FILE` every number. With `--assert` it exits 1 where a bar is missed. See bench/README.md
for what is compared.

    python -m bench.data_parallel [--parts steps start single trace buckets] [--pairs 20] [--json FILE] [--assert]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PARTS = ("steps", "start", "single", "trace", "buckets")
BUCKETS_MIB = (0, 1, 4, 8, 16, 25, 10_000)
ROOT = Path(__file__).resolve().parent.parent
RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """plait against one other."""

    part: str
    case: str
    other: str
    plait_s: float
    """Median."""
    other_s: float
    """Median."""
    ratio: float
    """Median of other's time / plait's time over pairs that were measured in turn."""
    quartiles: tuple[float, float]
    """Of the same ratios."""
    cpu_ratio: float | None
    """The same of processor time, which other load on the machine disturbs less."""
    bar: float | None
    """The ratio that is wanted at least; None: for information."""
    pairs: int
    load: float
    """Average load of the machine at the end; ranks x threads of it are the benchmark's own."""

    @property
    def holds(self) -> bool:
        """Whether the bar is met, or there is none."""
        return self.bar is None or self.ratio >= self.bar


def compare(part: str, case: str, times: dict[str, Any], base: str, other: str, bar: float | None) -> Row:
    """One row from the times of `bench.steps`: `base` is plait."""
    mine, theirs = times["seconds"][base], times["seconds"][other]
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    cpu = zip(times["cpu_seconds"][base], times["cpu_seconds"][other], strict=True)
    return Row(
        part=part,
        case=case,
        other=other,
        plait_s=statistics.median(mine),
        other_s=statistics.median(theirs),
        ratio=statistics.median(ratios),
        quartiles=_quartiles(ratios),
        cpu_ratio=statistics.median(b / a for a, b in cpu),
        bar=bar,
        pairs=len(ratios),
        load=times["load"][1],
    )


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def measure(case: str, systems: list[str], pairs: int, *, ranks: int, threads: int = 1) -> dict[str, Any]:
    """Run `bench.steps` in `ranks` processes of `threads` threads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        options = ["--case", case, "--repeats", str(pairs), "--threads", str(threads), "--out", str(out)]
        command = ["-m", "bench.steps", *options, "--systems", *systems]
        launcher = _torchrun(ranks) if ranks > 1 else [sys.executable]
        _run([*launcher, *command], threads)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def run_torchrun(command: list[str], ranks: int, threads: int = 1) -> None:
    """Run a module in `ranks` processes of `threads` threads."""
    _run([*_torchrun(ranks), *command], threads)


def _torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _environment(threads: int) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str], threads: int) -> None:
    done = subprocess.run(
        command, env=_environment(threads), cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def steps(pairs: int) -> list[Row]:
    """Throughput of a step beside the other systems, data loading included."""
    rows = []
    for case in ("gpt", "conv", "mlp"):
        systems = ["plait", "ddp", "accelerate", "fabric", "ddp:tuned", "plait:links=gloo"]
        times = measure(case, systems, pairs, ranks=RANKS)
        for other in systems[1:]:
            bar = 0.97 if other in ("ddp", "accelerate", "fabric") else None
            rows.append(compare("steps", case, times, "plait", other, bar))
    return rows


def single(pairs: int) -> list[Row]:
    """What the plan `single` costs over a plain eager loop: at most 5 %."""
    rows = []
    for threads in (1, 2):
        for case in ("mlp", "resnet", "gpt"):
            times = measure(case, ["plait", "eager"], pairs, ranks=1, threads=threads)
            rows.append(compare("single", f"{case}, {threads} threads", times, "plait", "eager", 0.95))
    return rows


def trace(pairs: int) -> list[Row]:
    """What recording every instruction costs: under 2 %."""
    rows = []
    for case in ("gpt", "mlp"):
        times = measure(case, ["plait", "plait:untraced"], pairs, ranks=RANKS)
        rows.append(compare("trace", case, times, "plait", "plait:untraced", 0.98))
    return rows


def buckets(pairs: int) -> list[Row]:
    """Sizes of buckets against the default; 0 is one tensor a bucket, 10,000 MiB one bucket for all."""
    rows = []
    for case in ("gpt", "mlp"):
        for links in ("shared", "gloo"):
            suffix = f",links={links}"
            systems = [
                f"plait:default{suffix}",
                *(f"plait:bucket_mib={size}{suffix}" for size in BUCKETS_MIB),
            ]
            times = measure(case, systems, pairs, ranks=RANKS)
            rows += [compare("buckets", case, times, systems[0], other, None) for other in systems[1:]]
    return rows


def start(pairs: int) -> list[Row]:
    """From process start to the first step done: no slower than a script under torchrun."""
    seconds: dict[str, list[float]] = {"plait": [], "torchrun": []}
    for _ in range(pairs):
        seconds["plait"].append(_plait_start_s())
        seconds["torchrun"].append(_torchrun_start_s())
    ratios = [b / a for a, b in zip(seconds["plait"], seconds["torchrun"], strict=True)]
    return [
        Row(
            part="start",
            case="small mlp",
            other="torchrun",
            plait_s=statistics.median(seconds["plait"]),
            other_s=statistics.median(seconds["torchrun"]),
            ratio=statistics.median(ratios),
            quartiles=_quartiles(ratios),
            cpu_ratio=None,
            bar=1.0,
            pairs=pairs,
            load=os.getloadavg()[0],
        )
    ]


def _plait_start_s() -> float:
    """Until `plait run` reports its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("plait")), "run", "bench/start_up.py:job"]
        command += ["--plan", "ddp", "--ranks", str(RANKS), "--steps", "1", "--out", f"{folder}/run"]
        began = time.monotonic()
        with subprocess.Popen(
            command, env=_environment(1), cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step "):
                    taken = time.monotonic() - began
                    process.stdout.read()
                    return taken
    raise SystemExit("plait run ended without a step.")


def _torchrun_start_s() -> float:
    """Until the script's first rank has made its first step."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        began = time.time()
        _run([*_torchrun(RANKS), "bench/start_up.py", str(mark)], 1)
        return mark.stat().st_mtime - began


def show(rows: list[Row], console: Console) -> None:
    """A table of one part."""
    table = Table(
        "case", "against", "plait", "other", "ratio", "quartiles", "CPU ratio", "bar", title=rows[0].part
    )
    for row in rows:
        bar = "" if row.bar is None else f">= {row.bar:.2f} {'ok' if row.holds else 'MISSED'}"
        spread = f"{row.quartiles[0]:.3f} - {row.quartiles[1]:.3f}"
        cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.3f}"
        times = [f"{seconds * 1e3:.1f} ms" for seconds in (row.plait_s, row.other_s)]
        table.add_row(row.case, row.other, *times, f"{row.ratio:.3f}", spread, cpu, bar)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--pairs", type=int, default=20, help="interleaved repetitions (start-up: a quarter of it)"
    )
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--assert", dest="strict", action="store_true", help="exit 1 where a bar is missed")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(
        f"torch {torch.__version__}, {os.cpu_count()} processors, {RANKS} ranks, load {os.getloadavg()[0]:.1f}"
    )
    measures = {"steps": steps, "start": start, "single": single, "trace": trace, "buckets": buckets}
    rows: list[Row] = []
    for part in given.parts:
        found = measures[part](max(2, given.pairs // 4) if part == "start" else given.pairs)
        show(found, console)
        rows += found
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) | {"holds": row.holds} for row in rows], indent=1))
    missed = [f"{row.part}: {row.case} against {row.other}: {row.ratio:.3f}" for row in rows if not row.holds]
    for line in missed:
        console.print(f"missed {line}")
    return 1 if missed and given.strict else 0


if __name__ == "__main__":
    sys.exit(main())
