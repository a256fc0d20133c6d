"""plait on one CUDA device beside eager PyTorch and torch.compile, interleaved in one process a case.

    python -m bench.gpu [--cases gpt-1.4b,resnet50] [--repetitions 5] [--systems eager,compile,off,on]

Of plait: `off` launches op by op, `graphs` segments as CUDA graphs, `on` is compiled, with graphs
where they pay, `both` is both, `auto` decides.
`weights` is `on` with weights in bfloat16, `fp8` with products in 8 bits; `half` is torch.compile of a model whose
weights are bfloat16.
Prints a line of JSON as soon as it knows a number: per case and system what the first steps took and a step alone, then
the median step in ms, its ratio to torch.compile's (or the first system's) with quartiles, TFLOP/s of matrix products
where the case counts them, and peak memory. With `--wait` it tells when all is compiled, and times after a line on
standard input: several may compile side by side. `bench.window` runs all of it within a GPU's 30 minutes.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from bench.single_gpu import Gpt, eager_step, flat_loss, seconds
from plait.job.job import Job
from plait.run.parallelize import parallelize

OURS = {
    "off": {"compile": "off", "graphs": "off"},
    "graphs": {"compile": "off", "graphs": "on"},
    "on": {"compile": "on"},
    "both": {"compile": "on", "graphs": "on"},
    "weights": {"compile": "on", "precision": "bf16-weights"},
    "fp8": {"compile": "on", "precision": "fp8"},
    "auto": {},
}
"""Settings of plait's plan `single`, by what the table calls them; `precision` is the job's."""
SYSTEMS = ("eager", "compile", "half", *OURS)
Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job, a batch for it, and what a step multiplies."""

    job: Callable[[], Job]
    steps: int
    """Steps that are timed together."""
    flops: float = 0.0
    """Of the model's forward and backward, without recomputation."""


def fused(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)  # type: ignore[arg-type]


def gpt(layers: int, width: int, heads: int, length: int, batch: int, vocab: int = 50304) -> Case:
    def job() -> Job:
        tokens = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(0))
        return Job(
            model=lambda: Gpt(width, layers, heads, vocab, length),
            data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
            loss=flat_loss, optimizer=fused, batch=batch, steps=1, precision="bf16",
        )  # fmt: skip

    weights = 12 * layers * width**2 + width * vocab
    products = 6 * weights + 6 * layers * width * length  # causal attention counts half
    return Case(job=job, steps=3 if width > 1000 else 10, flops=products * batch * length)


def resnet50() -> Job:
    from torchvision.models import resnet50 as model

    g = torch.Generator().manual_seed(0)
    data = (torch.randn(256, 3, 224, 224, generator=g), torch.randint(0, 1000, (256,), generator=g))
    return Job(
        model=model, data=data, loss=nn.CrossEntropyLoss(), batch=256, steps=1, precision="bf16",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )  # fmt: skip


def bert_large() -> Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokens = torch.randint(0, 30522, (16, 512), generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: BertForMaskedLM(config), data=(tokens, tokens.clone()), batch=16, steps=1, precision="bf16",
        objective=lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss, optimizer=fused,
    )  # fmt: skip


def mlp() -> Job:
    g = torch.Generator().manual_seed(0)
    data = (torch.randn(1024, 784, generator=g), torch.randint(0, 10, (1024,), generator=g))

    def model() -> nn.Module:
        layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), *layers, nn.Linear(1024, 10))

    return Job(
        model=model, data=data,
        loss=nn.CrossEntropyLoss(), batch=1024, steps=1, precision="bf16", optimizer=fused,
    )  # fmt: skip


CASES = {
    "gpt-1.4b": gpt(24, 2048, 16, 2048, 8),
    "gpt-125m": gpt(12, 768, 12, 1024, 16),
    "resnet50": Case(job=resnet50, steps=5),
    "bert-large": Case(job=bert_large, steps=5),
    "mlp": Case(job=mlp, steps=50),
    "gpt-12x256": gpt(12, 256, 4, 256, 8, 8192),
}


def plait_step(job: Job, batch: Batch, settings: dict[str, str]) -> Callable[[], None]:
    plan = dict(settings)
    job = replace(job, precision=plan.pop("precision", job.precision))  # type: ignore[arg-type]
    step = parallelize(job, "single", device="cuda", settings=plan, listener=tell)

    def run() -> None:
        step(batch)

    return run


def tell(event: dict[str, object]) -> None:
    if "notice" in event:
        print(f"             {event['notice']}", flush=True)


def profile(step: Callable[[], None], steps: int = 2, most: int = 70) -> None:
    """Print what the device did in a step, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / steps / 1e3
    print(f"{'':13s}{total:9.2f} ms of kernels in {sum(row.count for row in rows) // steps} launches")
    for row in rows[:most]:
        print(
            f"{'':13s}{row.self_device_time_total / steps / 1e3:9.3f} ms {row.count // steps:5d} x {row.key[:110]}"
        )


def run_case(name: str, systems: list[str], repetitions: int, profiled: bool, waits: bool) -> None:
    """Make and warm up all systems, then time them in turn."""
    case = CASES[name]
    job = case.job()
    batch: Batch = tuple(tensor.cuda() for tensor in job.data)
    made: dict[str, Callable[[], Callable[[], None]]] = {
        "eager": lambda: eager_step(job, batch),
        "compile": lambda: eager_step(job, batch, compiled=True),
        "half": lambda: eager_step(job, batch, compiled=True, short=True),
        **{system: partial(plait_step, job, batch, settings) for system, settings in OURS.items()},
    }
    steps: dict[str, Callable[[], None]] = {}
    peaks: dict[str, float] = {}
    for system in systems:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            steps[system] = made[system]()
            for _ in range(5):  # graphs are captured in the fourth
                steps[system]()
        except Exception as error:  # a system that fails is told, the others go on
            say(case=name, system=system, failed=f"{type(error).__name__}: {str(error)[:300]}")
            steps.pop(system, None)
            continue
        torch.cuda.synchronize()
        peaks[system] = (torch.cuda.max_memory_allocated() - before) / 2**30
        took = time.perf_counter() - start
        say(case=name, system=system, first_s=took)
    if waits:
        gc.collect()
        torch.cuda.empty_cache()
        say(ready=name)
        sys.stdin.readline()
    for system in steps if profiled else ():
        say(case=name, system=system, alone_ms=1e3 * seconds(steps[system], case.steps))
        profile(steps[system])
    _time(name, steps, peaks, repetitions)


def _time(name: str, steps: dict[str, Callable[[], None]], peaks: dict[str, float], repetitions: int) -> None:
    case = CASES[name]
    times: dict[str, list[float]] = {system: [] for system in steps}
    for _ in range(repetitions):
        for system, step in steps.items():
            times[system].append(seconds(step, case.steps))
    base = "compile" if "compile" in times else next(iter(times), "")
    for system, taken in times.items():
        ratio = [b / t for b, t in zip(times[base], taken, strict=True)]
        low, middle, high = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else [ratio[0]] * 3
        median = statistics.median(taken)
        rate = {"tflops": case.flops / median / 1e12} if case.flops else {}
        say(
            case=name, system=system, step_ms=1e3 * median, ratio=middle, ratio_low=low, ratio_high=high, to=base,
            peak_gib=peaks[system], **rate,
        )  # fmt: skip


def say(**numbers: object) -> None:
    """A line of JSON, at once."""
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--limit", type=float, default=None, help="seconds for a case")
    parser.add_argument("--profile", action="store_true", help="list kernels, too")
    parser.add_argument("--wait", action="store_true", help="time after a line on standard input")
    parser.add_argument("--here", action="store_true", help="in this process; else one process a case")
    options = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, "repetitions": options.repetitions}), flush=True)
    for name in options.cases.split(","):
        if options.here:
            run_case(name, options.systems.split(","), options.repetitions, options.profile, options.wait)
        else:
            again = ["--cases", name, "--systems", options.systems, "--repetitions", str(options.repetitions)]
            again += ["--profile"] if options.profile else []
            try:
                subprocess.run(
                    [sys.executable, "-m", "bench.gpu", "--here", *again], check=False, timeout=options.limit
                )
            except subprocess.TimeoutExpired:
                say(case=name, failed=f"not done after {options.limit:g} s")


if __name__ == "__main__":
    main()
