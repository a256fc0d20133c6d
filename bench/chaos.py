"""Faults at random moments of real runs, over plans: what is saved stays, nobody is left, nobody hangs, ids are right.

    python -m bench.chaos --faults 1000 --seed 7

Each fault: a small run is started in a process of its own, something happens to it at a random moment, and once it has
ended it is resumed without harm. Then: it ended in time; no process of it is left; the newest checkpoint that was there
before is readable; after the resume every step's samples are those of an undisturbed run, once each, and where the plan
promises it the losses too, bit for bit. The last line of a failure says how to repeat it alone. Clock jumps, slow disks
and lost links are not tried here: they need rights that a user does not have.
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import plait
from plait.errors import CheckpointError, PlaitError
from plait.run.checkpoint.store import locate_checkpoint

STEPS, BATCH, SAVE_EVERY, HANG_S = 24, 8, 5, 5.0
_NO_MEMORY = b'{"error": "MemoryError", "text": ""}'
"""What a process tells that has none to say more."""
LIMIT_S = 60.0
"""From a fault to the end of the run: what is promised at most, which is far more than it takes. A thread that cannot
begin 10 s, or a hang 2 x HANG_S and its stacks 2 s, or a signal and what is saved then 30 s; the rest of the run; an
echo 2 s; workers that are asked, then killed, 8 s."""


@dataclass(frozen=True)
class Case:
    """One way to run."""

    plan: str
    ranks: int
    exact: bool = True
    """Whether a resumed run has the losses of an undisturbed one, bit for bit."""
    free: bool = False
    """Whether a dead worker's shares are lost, and the others go on."""
    mesh: dict[str, int] | None = None


CASES = (
    Case("single", 1), Case("ddp", 2), Case("zero1", 2), Case("zero3", 2), Case("local-sgd", 2),
    Case("megatron", 2, mesh={"tensor": 2}), Case("1f1b", 2, mesh={"pipe": 2}), Case("server-sync", 3),
    Case("server-async", 3, exact=False, free=True), Case("easgd", 3, exact=False, free=True),
    Case("hogwild", 2, exact=False, free=True),
)  # fmt: skip


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Takes a little time, so that there are moments to hit."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(STEPS * BATCH, 16, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return self._inputs[index], self._inputs[index, :4].argmax()


def job() -> plait.Job:
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        data=Samples, loss=nn.CrossEntropyLoss(), batch=BATCH, epochs=1, evaluate=lambda: Samples(), evaluate_every=9,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )  # fmt: skip


@dataclass
class Ended:
    """How a run ended."""

    code: int | None
    """None: it had to be killed."""
    seconds: float
    told: dict[str, Any] = field(default_factory=dict)


class Run:
    """A run in a process and session of its own."""

    def __init__(self, case: Case, folder: Path, *, resume: bool) -> None:
        read_end, write_end = os.pipe()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            _be_the_run(case, folder, resume, write_end)
        os.close(write_end)
        self._pipe = read_end
        self.code: int | None = None

    def members(self) -> list[int]:
        """All living processes of its session."""
        return [pid for pid, stat in _everybody() if stat[3] == str(self.pid) and stat[0] not in "ZX"]

    def ranks(self) -> list[int]:
        return [pid for pid in self.members() if pid != self.pid]

    def is_over(self) -> bool:
        if self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, limit_s: float) -> Ended:
        began = time.monotonic()
        while not self.is_over() and time.monotonic() - began < limit_s:
            time.sleep(0.01)
        seconds, code = time.monotonic() - began, self.code
        if code is None:
            self._show()
            self.end()
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        return Ended(code=code, seconds=seconds, told=json.loads(text) if text else {})

    def _show(self) -> None:
        """The parent's stack, on standard error, and where its ranks are: it has not ended."""
        print(
            f"process {self.pid} and {self.ranks()} have not ended; the stack of the first:",
            file=sys.stderr,
            flush=True,
        )
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def end(self) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.code is None:
            os.waitpid(self.pid, 0)
            self.code = -9


def _everybody() -> list[tuple[int, list[str]]]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                found.append((int(path.name), (path / "stat").read_text().rpartition(")")[2].split()))
    return found


def _be_the_run(case: Case, folder: Path, resume: bool, pipe: int) -> None:
    os.setsid()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    told: dict[str, Any] = {}
    code = 1
    try:
        result = plait.train(
            job(), case.plan, case.ranks if case.mesh is None else None, mesh=case.mesh, out=folder, trace=False,
            resume=folder if resume else None, limits=plait.Limits(hang_s=HANG_S),
            saving=plait.Saving(checkpoint_every=SAVE_EVERY, record_samples=True),
        )  # fmt: skip
        told = {"losses": result.losses, "stopped": result.stopped}
        code = 0
    except PlaitError as error:
        told = {"error": type(error).__name__, "text": str(error)[:2000]}
    except KeyboardInterrupt as error:
        told = {"error": "interrupted", "text": str(error)}
    except MemoryError:
        os.write(pipe, _NO_MEMORY)
        os._exit(1)
    except BaseException:
        told = {"error": "TRACEBACK", "text": traceback.format_exc()[-3000:]}
    try:
        os.write(pipe, json.dumps(told).encode())
    finally:  # whatever happens: this process must not go on as its parent
        os._exit(code)


Fault = Callable[[Run, random.Random], None]


def _signal(number: int, of_parent: bool) -> Fault:
    def hit(run: Run, choice: random.Random) -> None:
        ranks = run.ranks()
        pid = run.pid if of_parent or not ranks else choice.choice(ranks)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    return hit


def _pause(of_parent: bool) -> Fault:
    def hit(run: Run, choice: random.Random) -> None:
        ranks = run.ranks()
        pid = run.pid if of_parent or not ranks else choice.choice(ranks)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(choice.uniform(0.1, 0.8))
            os.kill(pid, signal.SIGCONT)

    return hit


def _stop_a_rank(run: Run, choice: random.Random) -> None:
    """Of a run that has no ranks (yet), the only process: then it goes on, for nobody is there who could tell."""
    ranks = run.ranks()
    if not ranks:
        _pause(True)(run, choice)
        return
    with suppress(ProcessLookupError):
        os.kill(choice.choice(ranks), signal.SIGSTOP)


def _interrupt_twice(run: Run, choice: random.Random) -> None:
    for _ in range(2):
        with suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGINT)
        time.sleep(choice.uniform(0.0, 0.2))


def _no_more_files(run: Run, choice: random.Random) -> None:
    """No file may grow: as on a full disk, every write fails."""
    for pid in run.members():
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _no_more_memory(run: Run, choice: random.Random) -> None:
    ranks = run.ranks() or [run.pid]
    with suppress(ProcessLookupError, PermissionError):
        resource.prlimit(choice.choice(ranks), resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))


FAULTS: dict[str, Fault] = {
    "kill a rank": _signal(signal.SIGKILL, False),
    "kill the parent": _signal(signal.SIGKILL, True),
    "crash a rank": _signal(signal.SIGSEGV, False),
    "stop a rank": _stop_a_rank,
    "pause a rank": _pause(False),
    "pause the parent": _pause(True),
    "SIGTERM": _signal(signal.SIGTERM, True),
    "Ctrl-C": _signal(signal.SIGINT, True),
    "Ctrl-C twice": _interrupt_twice,
    "full disk": _no_more_files,
    "no memory": _no_more_memory,
}
LOSES_A_RANK = ("kill a rank", "crash a rank", "stop a rank", "no memory")
"""Where the plan can spare it the run goes on, without the share that it held."""
HARMLESS = ("pause a rank", "pause the parent")


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    losses: list[float]
    ids: dict[int, list[int]]
    seconds: float


def _ids(folder: Path) -> tuple[dict[int, list[int]], list[int]]:
    """(sorted ids by step, steps that stand there twice)."""
    found: dict[int, list[int]] = {}
    twice = []
    path = folder / "samples.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            if entry["step"] in found:
                twice.append(entry["step"])
            found[entry["step"]] = sorted(found.get(entry["step"], []) + entry["ids"])
    return found, twice


def _losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in sorted(entries, key=lambda e: e["step"]) if "loss" in entry]


def reference(case: Case, folder: Path) -> Reference:
    run = Run(case, folder, resume=False)
    ended = run.wait(120)
    assert ended.code == 0, (case, ended)
    return Reference(losses=_losses(folder), ids=_ids(folder)[0], seconds=ended.seconds)


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint that can be read; -1: there is none."""
    try:
        return int(locate_checkpoint(folder, on_notice=lambda text: None).name.rpartition("-")[2])
    except CheckpointError:
        return -1


def try_fault(
    case: Case, name: str, undisturbed: Reference, folder: Path, choice: random.Random
) -> tuple[list[str], float]:
    """(what did not hold, seconds from the fault to the end)."""
    wrong: list[str] = []
    run = Run(case, folder, resume=False)
    time.sleep(choice.uniform(0.05, 0.95) * undisturbed.seconds)
    before = _newest(folder)
    hit = not run.is_over()
    if hit:
        FAULTS[name](run, choice)
    ended = run.wait(LIMIT_S)
    if ended.code is None:
        wrong.append(f"it did not end within {LIMIT_S:g} s")
    deadline = time.monotonic() + 5
    while (left := run.members()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left and ended.code is not None:
        wrong.append(f"{len(left)} processes were left")
    run.end()
    if ended.told.get("error") == "TRACEBACK" and not _tells_of_memory(name, ended.told["text"]):
        wrong.append(f"an error that is not ours: {ended.told['text']}")
    if name in HARMLESS and ended.code != 0:
        wrong.append(f"a pause ended it: {ended.told}")
    if _newest(folder) < before:
        wrong.append(f"the checkpoint of step {before} is gone")
    was_killed = ended.code != 0 or name in LOSES_A_RANK
    if ended.code != 0 or ended.told.get("stopped") == "interrupted":
        resumable = _newest(folder) >= 0
        again = Run(case, folder if resumable else folder / "new", resume=resumable)
        folder = folder if resumable else folder / "new"
        resumed = again.wait(120)
        if resumed.code != 0:
            wrong.append(f"the resume failed: {resumed.told}")
            return wrong, ended.seconds
    wrong += _check_result(case, name, undisturbed, folder, was_killed)
    return wrong, ended.seconds


def _tells_of_memory(name: str, text: str) -> bool:
    """The parent itself had none left: that is the cause, and it is told."""
    return name == "no memory" and ("MemoryError" in text or "Cannot allocate memory" in text)


def _check_result(case: Case, name: str, undisturbed: Reference, folder: Path, was_killed: bool) -> list[str]:
    wrong: list[str] = []
    found, twice = _ids(folder)
    if twice and not case.free:  # shares of one step may have been taken before and after
        wrong.append(f"steps {twice[:5]} stand twice")
    taken = Counter(number for ids in found.values() for number in ids)
    repeated = [number for number, count in taken.items() if count > 1]
    if repeated:
        wrong.append(f"{len(repeated)} samples were used twice")
    expected = {number for ids in undisturbed.ids.values() for number in ids}
    missing = expected - taken.keys()
    if missing and not (case.free and was_killed):
        wrong.append(f"{len(missing)} samples were not used")
    if not case.free and found != undisturbed.ids:
        different = [step for step, ids in undisturbed.ids.items() if found.get(step) != ids]
        wrong.append(f"steps {different[:5]} have other samples")
    if case.exact and _losses(folder) != undisturbed.losses:
        wrong.append("losses differ from an undisturbed run")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="The number of the first fault, to repeat one.")
    parser.add_argument("--plans", default="", help="Only these, joined by commas.")
    parser.add_argument("--kinds", default="", help="Only faults whose name holds this.")
    parser.add_argument("--verbose", action="store_true", help="A line for each fault.")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.plans or case.plan in given.plans.split(",")]
    kinds = [name for name in FAULTS if given.kinds in name]
    only = (f" --plans {given.plans}" if given.plans else "") + (
        f" --kinds '{given.kinds}'" if given.kinds else ""
    )
    print(f"seed {given.seed}: {given.faults} faults of {len(kinds)} kinds over {len(cases)} plans")
    held: Counter[tuple[str, str]] = Counter()
    broken: Counter[tuple[str, str]] = Counter()
    longest: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        root = Path(place)
        for plan in ("single", "ddp"):  # what they import is inherited by all that follow
            plait.train(job(), plan, 1, steps=1, out=root / f"warm-{plan}", trace=False)
        references: dict[str, Reference] = {}
        for number in range(given.first, given.first + given.faults):
            choice = random.Random(f"{given.seed} {number}")
            case, name = cases[number % len(cases)], choice.choice(kinds)
            if case.plan not in references:
                references[case.plan] = reference(case, root / f"reference-{case.plan}")
            wrong, seconds = try_fault(case, name, references[case.plan], root / f"{number}", choice)
            longest[name] = max(longest.get(name, 0.0), seconds)
            (broken if wrong else held)[case.plan, name] += 1
            if given.verbose:
                print(
                    f"{number:4} {case.plan:13} {name:17} {seconds:5.1f} s {'held' if not wrong else 'WRONG'}",
                    flush=True,
                )
            if wrong:
                print(f"fault {number}, {case.plan}, {name}: {'; '.join(wrong)}")
                print(
                    f"  again: python -m bench.chaos --seed {given.seed} --first {number} --faults 1{only}",
                    flush=True,
                )
    _print_table(kinds, [case.plan for case in cases], held, broken, longest)
    return 1 if broken else 0


def _print_table(
    kinds: list[str], plans: list[str], held: Counter[tuple[str, str]], broken: Counter[tuple[str, str]],
    longest: dict[str, float],
) -> None:  # fmt: skip
    print(f"\n{'held / tried':18}" + "".join(f"{plan[:12]:>13}" for plan in plans) + f"{'longest end':>14}")
    for name in kinds:
        cells = ""
        for plan in plans:
            good, bad = held[plan, name], broken[plan, name]
            cells += f"{f'{good}/{good + bad}' if good + bad else '-':>13}"
        print(f"{name:18}{cells}{longest.get(name, 0.0):>12.1f} s")
    print(f"{sum(held.values())} of {sum(held.values()) + sum(broken.values())} held")


if __name__ == "__main__":
    sys.exit(main())
