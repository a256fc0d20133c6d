"""Segments that are compiled beside the steps: all ranks take them with one step, and nobody is waited for or left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import jobs
from tests.zoo import ZOO

import plait
from plait.callbacks import Callback, StepDone, Stop, Watching
from plait.program.segment import behind as behind_module
from plait.program.segment import compiled as compiled_module
from plait.program.segment.behind import Behind, Wanted
from plait.program.segment.compiled import CompiledSegments
from plait.run.loop import compiling
from plait.torch_private.inductor import Like

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Compilers that are ready after two steps on the first rank and after five on the second; what each rank took in
    which step is written down."""
    looks = {"hear": 0}

    def hear(self: Behind) -> list[tuple[Wanted, float]]:
        looks["hear"] += 1
        if looks["hear"] < 2 + 3 * rank_here():
            return []
        found = [(wanted, 0.5) for wanted in self._open]
        for wanted, _ in found:
            wanted.is_kept = True
        self._open.clear()
        return found

    def take(self: CompiledSegments, step: int) -> int:
        taken = exact(self, step)
        if taken:
            (folder / f"taken-{rank_here()}").write_text(f"{self.step} {taken}")
        return taken

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Like], *_: object) -> Any:
        def run(args: list[Any]) -> Any:
            assert [Like.of(tensor) for tensor in args] == inputs
            (folder / f"ran-{rank_here()}").touch()
            return graph(*args)

        return run

    exact = CompiledSegments.take
    monkeypatch.setattr(Behind, "hear", hear)
    monkeypatch.setattr(CompiledSegments, "take", take)
    monkeypatch.setattr(compiled_module, "compile_graph", compile_graph)
    monkeypatch.setattr(compiling, "_PAUSE_S", 0.0)
    monkeypatch.setattr(compiling, "_HEAR_S", 0.0)


@pytest.mark.parametrize("plan", ["ddp", "zero3", "megatron", "1f1b"])
def test_all_ranks_take_them_with_one_step(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is ready sooner waits; numbers stay those of the run that is not compiled."""
    job = ZOO["gpt_dropout"].job(batch=8, steps=9, optimizer="adamw", num_samples=16)
    runs = {}
    for how in ("off", "on"):
        if how == "on":
            stand_in(monkeypatch, tmp_path)
        runs[how] = plait.train(
            job, plan, 2, out=tmp_path / how, saving=plait.Saving(trace=False),
            changes=plait.Changes(settings={"compile": how}), limits=plait.Limits(compare_every=1),
        )  # fmt: skip
    assert runs["on"].losses == pytest.approx(runs["off"].losses, rel=1e-5)
    steps = [(tmp_path / f"taken-{rank}").read_text().split()[0] for rank in range(2)]
    assert steps == ["5", "5"], "the second rank is ready after five steps"
    assert all((tmp_path / f"ran-{rank}").exists() for rank in range(2))
    counted = json.loads((tmp_path / "on" / "totals.json").read_text())["compiled"]
    assert counted["first_step"] == 5 and counted["waiting"] == 0 and not counted["as_written"], counted


NEVER = """
import json, os, subprocess, sys, time
sys.path[:], parent, requests = json.loads(sys.argv[1])
from plait.processes import end_group_with_parent
end_group_with_parent(parent)
compiler = subprocess.Popen(["sleep", "1000"])
with open(os.environ["COMPILERS"] + f"/{os.getpid()}.new", "w") as file:
    file.write(f"{os.getpid()} {compiler.pid}")
os.rename(file.name, file.name.removesuffix(".new") + ".pids")
time.sleep(1000)
"""
"""A process that never answers, and has started another one as Inductor starts compilers."""


PATCHED = """
import sys
from plait.program.segment import behind
behind._CODE = sys.argv.pop(1)
from plait.cli.main import main
main()
"""
"""A command of plait that starts such processes; an interpreter of its own, which knows nothing of earlier tests."""
KNOWN = ("PATH", "HOME", "COMPILERS", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def compilers(folder: Path, patience_s: float = 60) -> list[int]:
    deadline = time.monotonic() + patience_s
    while not (found := list(folder.glob("*.pids"))):
        assert time.monotonic() < deadline, "no process was started"
        time.sleep(0.05)
    return [int(pid) for path in found for pid in path.read_text().split()]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process that compiles outlived the run"
        time.sleep(0.05)


@pytest.fixture
def never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compilers that never end, and where they say that they are."""
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.setenv("COMPILERS", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(behind_module, "_CODE", NEVER)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_without_its_compiler(ranks: int, never: Path, tmp_path: Path) -> None:
    job = replace(jobs.slow(), epochs=None, steps=60)
    found = plait.train(
        job, "ddp" if ranks > 1 else "single", ranks, out=tmp_path / "run", saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"compile": "on"}),
    )  # fmt: skip
    assert len(found.losses) == 60
    assert_gone(compilers(never))
    counted = json.loads((tmp_path / "run" / "totals.json").read_text())["compiled"]
    assert counted["first_step"] is None and counted["waiting"] and not counted["segments"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_of_a_run_that_is_ended_are_gone(
    number: signal.Signals, never: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-c", PATCHED, NEVER, "run", jobs.reference("slow"), "--plan", "ddp", "--ranks", "2",
            "--set", "compile=on", "--set", "epochs=1000", "--out", tmp_path / "run", "--no-trace",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in KNOWN if name in os.environ},
    )  # fmt: skip
    pids = compilers(never)
    assert all(map(is_running, pids))
    process.send_signal(number)
    process.wait(timeout=60)
    assert_gone(pids)


def test_a_compiler_that_is_killed_leaves_the_run_as_it_is(never: Path, tmp_path: Path) -> None:
    """Whichever rank it was that lost it, all go on as written, and it is told once."""
    told: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        told.append(str(event.get("notice", "")))
        if "step" in event.get("metrics", {}) and list(never.glob("*.pids")):
            for pid in compilers(never):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)

    found = plait.train(
        replace(jobs.slow(), epochs=None, steps=600), "ddp", 2, out=tmp_path / "run", saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"compile": "on"}), watching=Watching(listener=listen),
    )  # fmt: skip
    assert len(found.losses) == 600
    lost = [text for text in told if "runs as written from here on" in text]
    assert len(lost) == 1 and "the process that compiles has ended (status -9" in lost[0]


class UntilTaken(Callback):
    """Ends a run five steps after its segments were taken, or where that never comes."""

    def __init__(self) -> None:
        self.taken = False
        self.left = 5
        self.deadline = time.monotonic() + 200

    def hear(self, event: dict[str, Any]) -> None:
        self.taken = self.taken or "segments run compiled" in str(event.get("notice"))

    def on_step(self, event: StepDone) -> Stop | None:
        self.left -= self.taken
        return Stop(reason="taken") if self.left < 0 or time.monotonic() > self.deadline else None


@pytest.mark.timeout(280)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler (Debian: g++)")
def test_ranks_change_to_compiled_segments_while_they_run(tmp_path: Path) -> None:
    """With Inductor itself; and who goes on from there is compiled from its first step."""
    until = UntilTaken()
    job = replace(jobs.plain(), epochs=None, steps=10**6)
    found = plait.train(
        job, "ddp", 2, out=tmp_path / "on", saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"compile": "on"}), limits=plait.Limits(compare_every=1),
        watching=Watching(listener=until.hear, callbacks=[until]),
    )  # fmt: skip
    counted = json.loads((tmp_path / "on" / "totals.json").read_text())["compiled"]
    assert counted["first_step"] is not None and 0 < counted["first_step"] < len(found.losses)
    assert counted["segments"] >= 2 and not counted["as_written"] and not counted["waiting"]
    plain = plait.train(
        replace(job, steps=len(found.losses)), "ddp", 2, out=tmp_path / "off", saving=plait.Saving(trace=False),
        changes=plait.Changes(settings={"compile": "off"}),
    )  # fmt: skip
    assert found.losses == pytest.approx(plain.losses, rel=1e-3)
    before = counted["first_step"]
    assert found.losses[:before] == plain.losses[:before], "until then it runs as written"
    more = replace(job, steps=len(found.losses) + 3)
    plait.resume(tmp_path / "on", job=more, saving=plait.Saving(trace=False))
    again = json.loads((tmp_path / "on" / "totals.json").read_text())["compiled"]
    assert again["first_step"] == before and again["segments"] >= 2 and not again["waiting"]
