"""A long run of a small job: memory, files, threads and the folder do not grow.

    python -m bench.long_run [--steps 20000] [--plan ddp] [--ranks 2]

A job with ragged shapes, evaluation and frequent saves is trained by `plait run`; meanwhile every process of the run is
looked at in /proc. What the last quarter of the run shows is held against what the second quarter showed: bounds are
printed with the numbers, and the exit code is 1 where one is passed. Records grow with the steps, so many bytes each.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from plait import Job

MEMORY_SHARE, MEMORY_MIB = 0.05, 24.0
"""Memory of a process may grow by this share, plus this: allocators keep what was freed."""
HANDLES, THREADS = 2, 1
"""Files and threads of a process may be more by this, for a save that is under way."""
RECORD_BYTES = 400
"""Of metrics, a step: about 230 as seen, and evaluations."""
FIXED_MIB = 8.0
"""Of the folder beside records: checkpoints of 100 KiB, at most 3, and a trace that keeps its ends."""


class Bag(nn.Module):
    """A tiny model of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of classes."""
        return self.head(self.embed(tokens).mean(1))


def samples() -> list[tuple[Tensor, Tensor]]:
    """Sequences of 3 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 7, (256,), generator=generator).tolist()
    return [
        (torch.randint(1, 50, (length,), generator=generator), torch.tensor(index % 5))
        for index, length in enumerate(lengths)
    ]


def pad(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences padded to the longest of the batch."""
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    return tokens, torch.stack([label for _, label in batch])


def job() -> Job:
    """What is trained."""
    return Job(
        model=Bag, data=samples, collate=pad, loss=nn.CrossEntropyLoss(), batch=8, steps=1000, evaluate_every=500,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), evaluate=lambda: samples()[:32],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one process showed at one moment."""

    at_s: float
    memory_mib: float
    handles: int
    threads: int


def processes(root: int) -> list[int]:
    """A process and all that it has started."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split() if int(word) not in found]
            except OSError:
                continue
    return found


def look(pid: int, at_s: float) -> Look | None:
    """What a process shows now; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return Look(
            at_s=at_s,
            memory_mib=int(facts["RssAnon"].split()[0]) / 1024,
            handles=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(facts["Threads"]),
        )
    except (OSError, KeyError, ValueError):
        return None


def grown(looks: list[Look], began_s: float, ended_s: float) -> list[str]:
    """What a process has passed its bounds by, between the second and the last quarter of training."""
    span = ended_s - began_s
    early = [one for one in looks if 0.25 <= (one.at_s - began_s) / span < 0.5]
    late = [one for one in looks if 0.75 <= (one.at_s - began_s) / span <= 1.0]
    if not early or not late:
        return []
    problems = []
    for what, slack in (("memory_mib", None), ("handles", HANDLES), ("threads", THREADS)):
        before = statistics.median(getattr(one, what) for one in early)
        after = statistics.median(getattr(one, what) for one in late)
        allowed = before * (1 + MEMORY_SHARE) + MEMORY_MIB if slack is None else before + slack
        print(f"  {what}: {before:.1f} -> {after:.1f} (at most {allowed:.1f})")
        if after > allowed:
            problems.append(f"{what} grew from {before:.1f} to {after:.1f}")
    return problems


def main() -> None:
    """Run, look, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--ranks", default="2")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plait-long-") as place:
        folder = Path(place) / "run"
        command = [
            str(Path(sys.executable).parent / "plait"), "run", f"{__file__}:job", "--plan", given.plan, "--ranks",
            given.ranks, "--steps", str(given.steps), "--out", str(folder), "--checkpoint-every", "100",
        ]  # fmt: skip
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        looks: dict[int, list[Look]] = {}
        began_s = ended_s = 0.0
        size = 0
        while run.poll() is None:
            time.sleep(0.5)
            now = time.monotonic()
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size > size:  # steps are being made
                began_s, ended_s, size = began_s or now, now, metrics.stat().st_size
            for pid in processes(run.pid):
                found = look(pid, now)
                if found is not None:
                    looks.setdefault(pid, []).append(found)
        problems = [f"the run ended with status {run.returncode}"] if run.returncode else []
        for pid, entries in looks.items():
            print(f"process {pid}: {len(entries)} looks")
            problems += [
                f"process {pid}: {text}" for text in grown(entries, began_s, max(ended_s, began_s + 1e-9))
            ]
        records = (folder / "metrics.jsonl").stat().st_size
        fixed_mib = (sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) - records) / 2**20
        print(f"folder: {records / given.steps:.0f} B of records a step (at most {RECORD_BYTES}), "
              f"{fixed_mib:.1f} MiB beside (at most {FIXED_MIB})")  # fmt: skip
        if records > RECORD_BYTES * given.steps or fixed_mib > FIXED_MIB:
            problems.append("the folder grew beyond its bounds")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(
        f"{given.steps} steps of {given.plan} in {ended_s - began_s:.0f} s: {'bad' if problems else 'nothing grew'}"
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
