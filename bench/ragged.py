"""Batches padded to their longest sample: plait's whole loop beside a plain PyTorch loop, and memory over many batches.

In: nothing (or the numbers of batches). Out: seconds of `--batches` batches of random lengths by both, in turn,
`--rounds` times, their medians and the ratio beside the bar of 1.15; then the resident memory of plait's loop at
several of `--long` batches. Exits 1 where a bar is broken. Loading, padding and reading the loss are part of both
loops; starting (what `prepare` does) is told apart.

    python -m bench.ragged [--batches 200] [--rounds 3] [--long 2000]
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.capture import Block
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.interpret.serial import Unobserved
from plait.run.link.links import NoLinks
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs

WORDS, WIDTH, LAYERS, BATCH = 256, 64, 2, 8
SHORTEST, LONGEST = 8, 160
BAR = 1.15
GROWTH_BYTES = 32 * 2**20
"""Allowed between the first tenth and the end of the long run: what the allocator holds moves by some MiB."""


class Model(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 4) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(self.words(x) + places)))
        return out


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next word; padding does not count."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Padded to the longest of the batch."""
    pad = nn.utils.rnn.pad_sequence
    inputs = pad([sample[:-1] for sample in samples], batch_first=True)
    return inputs, pad([sample[1:] for sample in samples], batch_first=True, padding_value=-100)


def job_of(batches: int) -> Job:
    """Samples of random lengths, enough for so many batches."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (batches * BATCH,), generator=generator).tolist()
    return Job(
        model=Model,
        data=[torch.randint(WORDS, (length,), generator=generator) for length in lengths],
        collate=collate,
        objective=objective,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=BATCH,
        steps=batches,
    )


def plain(job: Job) -> list[float]:
    """The loop that people write."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = open_data(job.data, job.collate)
    order = job.order(source.num_samples)
    assert order is not None and job.steps is not None
    losses = []
    for step in range(job.steps):
        optimizer.zero_grad()
        loss = objective(model, source.fetch(order.at(step).ids))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ours(job: Job, programs: Programs) -> Iterator[float]:
    """What a worker of the plan `single` does, step by step."""
    source, device = programs.captures.source, torch.device("cpu")
    machine = Machine(0, ModelState(job, device), NoLinks(), Unobserved())
    with Loader(
        source=source, order=job.order(source.num_samples), batch=job.batch, stop_step=job.steps
    ) as loader:
        for loaded in loader:
            shares = programs.own_shares(loaded.micro_batches)
            program = programs.for_step(shares)
            with torch.no_grad():
                for _ in machine.execute(program, loaded.step, shares):
                    pass
            assert machine.outcome is not None
            yield machine.outcome.loss


def prepared(job: Job) -> tuple[Programs, float]:
    """The programs, and how long they took."""
    began = time.perf_counter()
    programs = prepare(job, resolve("single", 1), "cpu", torch.float32, lambda event: None)
    return programs, time.perf_counter() - began


def resident_bytes() -> int:
    """Of this process, now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def compare(batches: int, rounds: int) -> bool:
    """Both loops in turn; whether the bar holds."""
    job = job_of(batches)
    plain(job_of(10))
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "plait": []}
    for number in range(rounds):
        began = _clocks()
        plain(job)
        found["plain"].append(_since(began))
        programs, start_s = prepared(job)
        began = _clocks()
        losses = list(ours(job, programs))
        found["plait"].append(_since(began))
        (a, a_cpu), (b, b_cpu) = found["plain"][-1], found["plait"][-1]
        print(
            f"round {number}: plain {a:.2f} s ({a_cpu:.2f} of processor), plait {b:.2f} s ({b_cpu:.2f}); "
            f"before the first step {start_s:.2f} s, last loss {losses[-1]:.4f}",
            flush=True,
        )
    middle = {
        name: [statistics.median(entry[at] for entry in entries) for at in (0, 1)]
        for name, entries in found.items()
    }
    wall, processor = (middle["plait"][at] / middle["plain"][at] for at in (0, 1))
    print(
        f"{batches} batches of {SHORTEST} to {LONGEST} tokens: {wall:.2f}x of the plain loop's time (bar {BAR}), "
        f"{processor:.2f}x of its processor time"
    )
    return wall <= BAR


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    """Seconds, and those of a processor: on a machine with other work the second is the one to believe."""
    now = _clocks()
    return now[0] - began[0], now[1] - began[1]


def grow(batches: int) -> bool:
    """Memory of plait's loop over many batches; whether it stays."""
    job = job_of(batches)
    programs, _ = prepared(job)
    seen = {}
    for step, _ in enumerate(ours(job, programs)):
        if (step + 1) % max(batches // 10, 1) == 0:
            seen[step + 1] = resident_bytes()
    first, *_, last = seen.values()
    told = ", ".join(f"{step}: {size / 2**20:.0f}" for step, size in seen.items())
    print(f"resident MiB after batches {told}")
    return last - first <= GROWTH_BYTES


def main() -> int:
    """Measure; 1 where a bar is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = [compare(options.batches, options.rounds)] if options.rounds else []
    held += [grow(options.long)] if options.long else []
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
