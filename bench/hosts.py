"""Two hosts on a slow network: ddp with sums in two levels beside torch's DDP on gloo, what pays there, predictions.

In: a rate. Out: a table, and the bars that must be reached; with `--assert` it exits 1 where one is missed. The hosts
are network namespaces of this machine, joined by veth pairs and a bridge that `tc tbf` limits, with two ranks each;
`plait measure` measures them as an engine's tasks, and `plait predict` predicts with the file that it leaves. Runs take
turns, so that other load falls on all. Where `ip` or `tc` cannot be used (it takes root and iproute2), it says which,
and the network is emulated, without torch's DDP.

    python -m bench.hosts [--rate 1gbit] [--turns 2] [--steps 26] [--assert] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.ranks.hosts.hosts import PLAIT, ROOT, Namespace, environment, namespaces
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plait.job.job import Job
from plait.units import format_seconds

HOSTS, EACH = 2, 2
TORCH = "torch DDP, gloo"
WAYS = {
    "ddp": ("ddp", ()),
    "ddp, one level": ("ddp", ("links.transport=sockets",)),
    "local-sgd, every 8": ("local-sgd", ("average.every=8",)),
    "ddp, powersgd": ("ddp", ("sync.compress=powersgd",)),
    "ddp, topk": ("ddp", ("sync.compress=topk",)),
}
"""Ways to train, by what people call them: a plan and its settings."""
WARM_UP, ROUND = 8, 8
"""Steps that are not counted; steps over which workers that average now and then are."""
BAR, WORST = 1.5, 0.15
"""Of torch's throughput, where communication decides; what a prediction may be off by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its batch."""

    width: int
    layers: int
    batch: int

    def model(self) -> nn.Module:
        """A chain of equal layers."""
        width = self.width
        layers = [layer for _ in range(self.layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Four batches."""
        generator = torch.Generator().manual_seed(0)
        count = 4 * self.batch
        return torch.randn(count, self.width, generator=generator), torch.arange(count) % 10

    def job(self) -> Job:
        """As plait takes it."""
        return Job(
            model=self.model, data=self.data(), loss=nn.CrossEntropyLoss(), batch=self.batch, epochs=None, steps=8,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )  # fmt: skip


CASES = {"wide": Case(width=1024, layers=6, batch=64), "busy": Case(width=512, layers=4, batch=4096)}
"""24 MiB of weights and next to nothing to compute; 4 MiB of weights and much to compute."""


def wide() -> Job:
    """Bound by communication."""
    return CASES["wide"].job()


def busy() -> Job:
    """Bound by computation."""
    return CASES["busy"].job()


@dataclass(kw_only=True, slots=True)
class Row:
    """One way to train one case."""

    case: str
    name: str
    seconds: list[float] = field(default_factory=list)
    """A step, by turn."""
    predicted_s: float | None = None

    @property
    def step_s(self) -> float:
        """The best turn: other load only ever adds."""
        return min(self.seconds)

    @property
    def error(self) -> float:
        """Of the prediction."""
        assert self.predicted_s is not None
        return self.predicted_s / self.step_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where tasks run: namespaces, or, where there are none, an emulated network."""

    spaces: Sequence[Namespace]
    emulate: str | None

    def plait(self, *words: str) -> str:
        """What task 0 of a command says, on all hosts at once."""
        if self.emulate is not None:
            more = ("--emulate", self.emulate) if words[0] == "run" else ()
            return _said([subprocess.Popen([*PLAIT, *words, *more], **_pipes(environment()))])
        shared = {
            "PLAIT_TASKS": str(HOSTS), "PLAIT_FIRST_ADDRESS": self.spaces[0].address,
            "PLAIT_RUN_ID": uuid.uuid4().hex, "PLAIT_TOKEN": uuid.uuid4().hex,
        }  # fmt: skip
        return _said(
            [
                subprocess.Popen(
                    space.command([*PLAIT, *words]),
                    **_pipes(environment(**shared, PLAIT_TASK=str(task), PLAIT_HOST=space.name)),
                )
                for task, space in enumerate(self.spaces)
            ]
        )

    def torch_ddp(self, case: str, steps: int) -> float:
        """Seconds a step of torch's own."""
        tasks = []
        for rank in range(HOSTS * EACH):
            space = self.spaces[rank // EACH]
            more = {
                "RANK": str(rank), "WORLD_SIZE": str(HOSTS * EACH), "MASTER_ADDR": self.spaces[0].address,
                "MASTER_PORT": "29512", "GLOO_SOCKET_IFNAME": space.interface,
            }  # fmt: skip
            command = [sys.executable, "-m", "bench.hosts", "--rank-of", case, "--steps", str(steps)]
            tasks.append(subprocess.Popen(space.command(command), **_pipes(environment(**more))))
        return float(_said(tasks).strip().splitlines()[-1])


def _pipes(env: dict[str, str]) -> dict[str, Any]:
    return {"cwd": ROOT, "env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def _said(tasks: "Sequence[subprocess.Popen[str]]") -> str:
    try:
        found = [task.communicate(timeout=300) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    for task, (out, err) in zip(tasks, found, strict=True):
        if task.returncode:
            raise SystemExit(f"{task.args!r} ended with {task.returncode}:\n{out}{err}")
    return found[0][0]


def torch_rank(case: Case, steps: int) -> None:
    """One rank of torch's DDP, as its documentation shows it; the first prints the median step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    inputs, labels = case.data()
    share, times = case.batch // ranks, []
    for step in range(steps):
        start = step * case.batch % len(inputs) + rank * share
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(model(inputs[start : start + share]), labels[start : start + share]).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    dist.barrier()
    if rank == 0:
        print(median(times[WARM_UP:]))
    dist.destroy_process_group()


def plait_s(place: Place, case: str, name: str, steps: int) -> float:
    """Seconds a step of `plait run`, over whole rounds of workers that average now and then."""
    plan, settings = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        place.plait(
            "run", f"bench/hosts.py:{case}", "--plan", plan, "--ranks", str(HOSTS * EACH), "--steps", str(steps),
            "--no-trace", "--no-check", "--out", str(out), *(f"--set={entry}" for entry in settings),
        )  # fmt: skip
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_s"] for line in lines if "step_s" in line][WARM_UP:]
    if plan != "local-sgd":
        return median(seconds)
    rounds = [sum(seconds[at : at + ROUND]) / ROUND for at in range(0, len(seconds) - ROUND + 1, ROUND)]
    return median(rounds)


def predicted_s(case: str, name: str, cluster: Path, emulate: str | None) -> float:
    """By `plait predict`, with the file that was measured."""
    plan, settings = WAYS[name]
    where = ["--emulate", emulate] if emulate is not None else ["--cluster", str(cluster)]
    said = subprocess.run(
        [*PLAIT, "predict", f"bench/hosts.py:{case}", "--plan", plan, "--ranks", str(HOSTS * EACH), "--json", *where,
         *(f"--set={entry}" for entry in settings)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if said.returncode:
        raise SystemExit(said.stdout + said.stderr)
    return float(json.loads(said.stdout)["step_s"])


def measured(
    place: Place, cases: Sequence[str], names: Sequence[str], given: argparse.Namespace
) -> list[Row]:
    """All rows; turns alternate between them."""
    rows = [Row(case=case, name=name) for case in cases for name in (TORCH, *names)]
    if place.emulate is not None:
        rows = [row for row in rows if row.name != TORCH]
    rows = [row for row in rows if row.case == "wide" or row.name in (TORCH, "ddp")]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "hosts.yaml"
        if place.emulate is None:
            place.plait("measure", "--out", str(cluster))
        for turn in range(given.turns):
            for row in rows:
                if row.name == TORCH:
                    row.seconds.append(place.torch_ddp(row.case, given.steps))
                else:
                    row.seconds.append(plait_s(place, row.case, row.name, given.steps))
                print(f"turn {turn + 1}: {row.case}, {row.name}: {row.seconds[-1]:.4f} s", flush=True)
        for row in rows:
            if row.name != TORCH:
                row.predicted_s = predicted_s(row.case, row.name, cluster, place.emulate)
    return rows


def bars(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """What must hold."""
    by = {(row.case, row.name): row for row in rows}
    found = []
    for case, least in (("wide", BAR), ("busy", 1.0)):
        if (case, TORCH) in by and (case, "ddp") in by:
            ratio = by[case, TORCH].step_s / by[case, "ddp"].step_s
            found.append((f"{case}: ddp is {ratio:.2f}x as fast as {TORCH}, bar {least}x", ratio >= least))
    for name in ("local-sgd, every 8", "ddp, powersgd", "ddp, topk"):
        if ("wide", name) in by and ("wide", "ddp") in by:
            ratio = by["wide", "ddp"].step_s / by["wide", name].step_s
            found.append((f"{name} is {ratio:.2f}x as fast as ddp", ratio > 1))
    for row in rows:
        if row.predicted_s is not None:
            told = f"{row.case}, {row.name}: predicted {100 * row.error:+.0f} %, at most {100 * WORST:.0f} %"
            found.append((told, abs(row.error) <= WORST))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=WARM_UP + 2 * ROUND)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--assert", action="store_true", dest="strict")
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        torch_rank(CASES[given.rank_of], given.steps)
        return
    console = Console(width=120)
    network = f"bandwidth={given.rate[:-3].replace('g', 'G').replace('m', 'M')}bit,latency=0.1ms,hosts={HOSTS}x{EACH}"
    with ExitStack() as stack:
        try:
            spaces = [] if given.emulate else stack.enter_context(namespaces(HOSTS, given.rate))
        except OSError as error:
            console.print(f"no namespaces ({error}): the network is emulated, without torch's DDP")
            spaces = []
        place = Place(spaces=spaces, emulate=None if spaces else network)
        rows = measured(place, given.cases, given.ways, given)
    title = f"{HOSTS} hosts of {EACH} ranks, {given.rate}; load {os.getloadavg()[0]:.1f}"
    table = Table("case", "way", "measured", "predicted", "error", title=title, title_justify="left")
    for row in rows:
        known = row.predicted_s is not None
        table.add_row(
            row.case, row.name, format_seconds(row.step_s), format_seconds(row.predicted_s or 0.0) if known else "",
            f"{100 * row.error:+.0f} %" if known else "",
        )  # fmt: skip
    console.print(table)
    found = bars(rows)
    for what, holds in found:
        console.print(f"{what}: {'ok' if holds else 'MISSED'}", highlight=False)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if given.strict and not all(holds for _, holds in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
