"""All bars of one GPU, unattended, within the half hour for which one is lent: what is right first, then what is fast.

    python -m bench.window [--list] [--first 0] [--seconds 540] [--out window.jsonl]

Calls are made in the order of `CALLS`, each in processes of its own with a limit of its own, those from `--first` on,
for as long as they end within `--seconds`; the last line names the call to go on with. Cases of one call are compiled
side by side, which takes most of the time, and then timed in turn. Every line of JSON that a call prints goes to
`--out` at once, and each number that has a bar says whether it holds. `--list` prints the calls with their limits: all
of them together are longer than a lease, most take less.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

Bar = tuple[str, float, float]
"""(field, at least, at most)."""
_ANY = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Processes that prepare side by side."""

    arguments: tuple[tuple[str, ...], ...]
    """Of Python, by process."""
    limit_s: float
    waits: bool = False
    """Whether each says that it is ready, and then waits for its turn."""


def _tests() -> Call:
    many = ("-n", "12", "-v", "-rf", "-p", "no:cacheprovider", "-p", "no:benchmark")
    return Call(arguments=(("-m", "pytest", *many, "tests/gpu"),), limit_s=290)


def _cases(limit_s: float, systems: Mapping[str, str]) -> Call:
    """Cases, each with its systems."""
    more = ("--repetitions", "5", "--profile", "--wait")
    made = tuple(
        ("-m", "bench.gpu", "--here", "--cases", case, "--systems", of, *more) for case, of in systems.items()
    )
    return Call(arguments=made, limit_s=limit_s, waits=True)


def _offload(case: str, way: str, compiled: str = "off") -> Call:
    more = ("--steps", "3", "--predict", "--compile", compiled)
    return Call(
        arguments=(("-m", "bench.offload", "--here", "--cases", case, "--ways", way, *more),), limit_s=145
    )


CALLS = (
    _tests(),
    _cases(240, {"gpt-1.4b": "compile,on", "resnet50": "compile,on", "bert-large": "compile,on"}),
    _cases(150, {"gpt-1.4b": "weights,fp8", "mlp": "eager,auto", "gpt-12x256": "eager,auto"}),
    _cases(100, {"gpt-1.4b": "eager,off"}),
    _offload("gpt-4.4b", "memory"),
    _offload("gpt-4.4b", "optimizer", "on"),
    _offload("gpt-4.4b", "least", "on"),
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


class Process:
    """One of a call: what it prints is judged line by line."""

    def __init__(self, arguments: tuple[str, ...], file: TextIO) -> None:
        self.ready = threading.Event()
        """It waits for its turn, or has ended."""
        self._file = file
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            told = json.dumps(judged(found)) if isinstance(found, dict) else line.rstrip()
            print(told, flush=True)
            if isinstance(found, dict):
                self._file.write(told + "\n")
                self._file.flush()
                if "ready" in found:
                    self.ready.set()
        self.ready.set()

    def end(self) -> int:
        """Give it its turn, and wait for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()
        self._reader.join()
        return self._process.wait()

    def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _kill(processes: list[Process]) -> None:
    for process in processes:
        process.kill()


def run(number: int, call: Call, out: Path) -> None:
    """One call."""
    began = time.perf_counter()
    with out.open("a") as file:
        processes = [Process(arguments, file) for arguments in call.arguments]
        late = threading.Timer(call.limit_s, _kill, [processes])
        late.start()
        for process in processes if call.waits else ():
            process.ready.wait()
        codes = [process.end() for process in processes]
        late.cancel()
        took = round(time.perf_counter() - began, 1)
        end = json.dumps({"call": number, "status": codes, "took_s": took, "arguments": call.arguments})
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
            for arguments in call.arguments:
                print(f"{number:3d} {call.limit_s:5.0f} s  python {' '.join(arguments)}")
        return
    ends = time.perf_counter() + options.seconds
    for number in range(options.first, len(CALLS)):
        if time.perf_counter() + CALLS[number].limit_s > ends:
            print(f"go on with: --first {number}", flush=True)
            return
        run(number, CALLS[number], options.out)


if __name__ == "__main__":
    main()
