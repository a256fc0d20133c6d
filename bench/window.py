"""All bars of one GPU, unattended, within the half hour for which one is lent: what is right first, then what is fast.

    python -m bench.window [--list] [--first 0] [--seconds 540] [--out window.jsonl]

Calls are made in the order of `CALLS`, each in a process of its own with a limit of its own, those from `--first` on,
for as long as they end within `--seconds`; the last line names the call to go on with. Every line of JSON that a call
prints goes to `--out` at once, and each number that has a bar says whether it holds. Tests are named as they end, file
by file. `--list` prints the calls with their limits: all of them together are longer than a lease, most take less.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Bar = tuple[str, float, float]
"""(field, at least, at most)."""
_ANY = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One process."""

    arguments: tuple[str, ...]
    """Of Python."""
    limit_s: float


def _test(name: str, limit_s: float) -> Call:
    return Call(
        arguments=("-m", "pytest", "-v", "-rf", "-p", "no:cacheprovider", f"tests/gpu/{name}.py"),
        limit_s=limit_s,
    )


def _case(case: str, systems: str, limit_s: float = 145) -> Call:
    return Call(
        arguments=("-m", "bench.gpu", "--here", "--cases", case, "--systems", systems, "--repetitions", "3"),
        limit_s=limit_s,
    )


def _offload(case: str, way: str) -> Call:
    more = ("--steps", "3", "--predict")
    return Call(
        arguments=("-m", "bench.offload", "--here", "--cases", case, "--ways", way, *more), limit_s=145
    )


CALLS = (
    _test("test_attention_gpu", 60),
    _test("test_random_gpu", 40),
    _test("test_offload_gpu", 80),
    _test("test_graphs_gpu", 80),
    _test("test_within_gpu", 80),
    _test("test_nccl", 145),
    _test("test_train_gpu", 145),
    _case("gpt-1.4b", "compile,on"),
    _case("gpt-1.4b", "half,weights,fp8"),
    _case("gpt-1.4b", "eager,off", 100),
    _case("resnet50", "compile,on", 120),
    _case("bert-large", "compile,on", 120),
    _case("mlp", "eager,auto", 60),
    _case("gpt-12x256", "eager,auto", 60),
    _offload("gpt-4.4b", "memory"),
    _offload("gpt-4.4b", "optimizer"),
    _offload("gpt-4.4b", "least"),
    _offload("gpt-4.4b", "host"),
    _offload("gpt-4.4b", "both"),
    _offload("gpt-16b", "largest"),
)
"""The most telling first: a window that ends early has the answers that others build on."""
BARS: dict[tuple[str, str], tuple[Bar, ...]] = {
    ("gpt-1.4b", "on"): (("ratio", 1.05, _ANY),),
    ("gpt-1.4b", "weights"): (("tflops", 560, _ANY),),
    ("gpt-1.4b", "fp8"): (("tflops", 700, _ANY),),
    ("gpt-1.4b", "off"): (("ratio", 1.0, _ANY),),
    ("resnet50", "on"): (("ratio", 1.0, _ANY),),
    ("bert-large", "on"): (("ratio", 1.0, _ANY),),
    ("mlp", "auto"): (("ratio", 3.0, _ANY),),
    ("gpt-12x256", "auto"): (("ratio", 3.0, _ANY),),
    ("gpt-4.4b", "optimizer"): (("step_ms", 0, 1000), ("off_by", 0, 0.10), ("memory_off_by", 0, 0.05)),
    ("gpt-4.4b", "least"): (("step_ms", 0, 1.15 * 816), ("off_by", 0, 0.10), ("memory_off_by", 0, 0.05)),
    ("gpt-16b", "largest"): (("tflops", 300, _ANY), ("off_by", 0, 0.10), ("memory_off_by", 0, 0.05)),
}
"""By case, and system or way; ratios are to the first system of the call, or to torch.compile where it takes part."""


def judged(line: dict[str, Any]) -> dict[str, Any]:
    """The line with how far predictions were off, and by field whether its bar holds."""
    made = dict(line)
    for told, predicted, seen in (
        ("off_by", "predicted_ms", "step_ms"),
        ("memory_off_by", "predicted_gib", "peak_gib"),
    ):
        if predicted in line and seen in line:
            made[told] = round(abs(line[predicted] / line[seen] - 1), 3)
    bars = BARS.get((str(line.get("case")), str(line.get("system", line.get("way")))), ())
    held = {field: least <= made[field] <= most for field, least, most in bars if field in made}
    return made | ({"holds": held} if held else {})


def run(number: int, call: Call, out: Path) -> None:
    """One call; what it prints is judged line by line."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *call.arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    late = threading.Timer(call.limit_s, lambda: os.killpg(process.pid, signal.SIGKILL))
    late.start()
    assert process.stdout is not None
    with out.open("a") as file:
        for line in process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            told = json.dumps(judged(found)) if isinstance(found, dict) else line.rstrip()
            print(told, flush=True)
            if isinstance(found, dict):
                file.write(told + "\n")
                file.flush()
        code = process.wait()
        late.cancel()
        took = round(time.perf_counter() - began, 1)
        end = json.dumps({"call": number, "status": code, "took_s": took, "arguments": call.arguments[1:]})
        print(end, flush=True)
        file.write(end + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("window.jsonl"))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for number, call in enumerate(CALLS):
            print(f"{number:3d} {call.limit_s:5.0f} s  python {' '.join(call.arguments)}")
        return
    ends = time.perf_counter() + options.seconds
    for number in range(options.first, len(CALLS)):
        if time.perf_counter() + CALLS[number].limit_s > ends:
            print(f"go on with: --first {number}", flush=True)
            return
        run(number, CALLS[number], options.out)


if __name__ == "__main__":
    main()
