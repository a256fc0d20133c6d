"""How far plait reaches: models of other libraries, made small by rule, under five plans, against their own eager loop.

    python -m bench.coverage [transformers torchvision timm torch_geometric] [--only PATTERN] [--sample N --seed S]
        [--jobs N] [--cache FILE] [--again PATTERN] [--strict]

Every architecture is tried in a process of its own with a limit of time and memory, and adds a line to the cache; what
the cache has is not tried again. With --strict the exit status is 1 where a case differs from eager under single or
ddp, or ends in an exception that is none of plait's.

See docs/coverage.md for what came out, and `coverage_trial.py` for what equal means.
"""

import argparse
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.coverage_models.case import Case, UnbuildableError
from bench.coverage_trial import as_json, attempt, short

LIBRARIES: Mapping[str, str] = {
    "transformers": "bench.coverage_models.hugging_face",
    "torchvision": "bench.coverage_models.vision",
    "timm": "bench.coverage_models.image_models",
    "torch_geometric": "bench.coverage_models.graph_layers",
    "transformers_others": "bench.coverage_models.hugging_face_others",
}
"""By name: the module that lists its models (`names()`) and makes one small (`case_of(name)`)."""
USUAL = tuple(name for name in LIBRARIES if name != "transformers_others")
"""What a sweep takes that names none: other heads and configs are thousands of cases, of which one draws a sample."""
CACHE = Path("runs/coverage.jsonl")
SECONDS = 120
"""Processor time that a case may take."""
PATIENCE = 10
"""It may take so many times as long on a machine that has other work."""
BYTES = 8 * 2**30
"""Memory that a case may ask for beyond what the process has when it begins."""


def all_names(libraries: Sequence[str]) -> list[str]:
    """Every model, as `library/name`."""
    return [
        f"{library}/{name}"
        for library in libraries
        for name in importlib.import_module(LIBRARIES[library]).names()
    ]


def case_of(name: str) -> Case:
    """The small version of a model."""
    library, _, own = name.partition("/")
    case: Case = importlib.import_module(LIBRARIES[library]).case_of(own)
    return case


def try_one(name: str) -> dict[str, Any]:
    """One line of the cache."""
    line: dict[str, Any] = {"name": name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            case = case_of(name)
            line |= {"note": case.note, "build_s": round(time.perf_counter() - began, 1)}
            line |= as_json(attempt(case))
    except UnbuildableError as error:
        line["unbuildable"] = str(error)[:400]
    except MemoryError:
        line["broken"] = f"more than {BYTES / 2**30:.0f} GiB"
    except Exception as error:
        line["broken"] = short(error)
    return line


def in_child(name: str) -> tuple[int, int]:
    """Start a case; returns its process and the pipe that its line comes from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    code = 1
    try:
        os.setsid()
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, held + BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        torch.set_num_threads(1)
        data = json.dumps(try_one(name)).encode()
        while data:
            data = data[os.write(writer, data) :]
        code = 0
    finally:
        os._exit(code)


def sweep(names: Sequence[str], jobs: int) -> Iterator[dict[str, Any]]:
    """The lines of all cases, as they come."""
    waiting, running = list(names), dict[int, tuple[str, int, float, bytearray]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            pid, reader = in_child(name)
            os.set_blocking(reader, False)
            running[pid] = (name, reader, time.monotonic(), bytearray())
        time.sleep(0.05)
        for pid, (name, reader, began, content) in list(running.items()):
            _drain(reader, content)
            done, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - began > PATIENCE * SECONDS
            if not done and not late:
                continue
            if not done:
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            _drain(reader, content)
            os.close(reader)
            del running[pid]
            slow = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
            reason = f"longer than {SECONDS} s" if slow else f"the process died ({status})"
            yield json.loads(content) if content and not late else {"name": name, "broken": reason}


def _drain(reader: int, content: bytearray) -> None:
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            return
        content += part


def read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of every case."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="*", help=", ".join(LIBRARIES))
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--again", help="try those of the cache again whose line matches this pattern")
    parser.add_argument("--sample", type=int, help="so many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--strict", action="store_true", help="fail where a case is wrong")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in all_names(given.libraries or USUAL) if re.search(given.only, name)]
    random.Random(given.seed).shuffle(names)
    names = names[: given.sample]
    given.cache.parent.mkdir(parents=True, exist_ok=True)
    known = read_cache(given.cache)
    if given.again:
        known = {name: line for name, line in known.items() if not re.search(given.again, json.dumps(line))}
    todo = [name for name in names if name not in known]
    with given.cache.open("a") as out:
        for number, line in enumerate(sweep(todo, given.jobs)):
            out.write(json.dumps(line) + "\n")
            out.flush()
            told = (
                line.get("broken")
                or line.get("unbuildable")
                or f"captured {line['captured']} {line['plans']}"
            )
            print(f"[{number + 1}/{len(todo)}] {line['name']}: {told}"[:400], flush=True)
    tried = [line for name, line in read_cache(given.cache).items() if name in set(names)]
    return int(given.strict and any(is_wrong(line) for line in tried))


def is_wrong(line: Mapping[str, Any]) -> bool:
    """Whether a case is not equal under single or ddp, or any plan ends in an exception that is not for people."""
    plans: Mapping[str, str] = line.get("plans", {})
    return any(
        outcome.startswith("failed") or (plan in ("single", "ddp") and outcome != "equal")
        for plan, outcome in plans.items()
    )


if __name__ == "__main__":
    sys.exit(main())
