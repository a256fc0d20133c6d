"""Models larger than a GPU's memory: step time, memory on both sides, and what was predicted, one process a way.

    python -m bench.offload [--cases gpt-4.4b,gpt-16b] [--ways memory,optimizer,least] [--steps 5]

`memory` keeps everything on the device, `optimizer` forces the optimizer's state to the host, `host` has the host make
the update, `both` a part of it; `least` also computes again what is cheap, to do with 60 % of the memory that `memory`
needs, `largest` is about the most that both hold.
Prints the median step in ms, TFLOP/s of the model's matrix products, peak memory of the device, memory on the host, and
how far the prediction was off.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu import fused
from bench.single_gpu import Gpt, flat_loss
from plait.cluster.presets import preset
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.measure.predict import predict_job
from plait.run.measure.rates import measure_host_bandwidth
from plait.run.parallelize import parallelize

VOCAB, LENGTH = 50304, 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A GPT, trained on 8 sequences a step."""

    layers: int
    width: int
    precision: str
    ways: Mapping[str, Mapping[str, Any]]
    """Settings of `memory`, by name."""
    batch: int = 8

    @property
    def parameters(self) -> float:
        return 12 * self.layers * self.width**2 + (2 * VOCAB + LENGTH) * self.width

    @property
    def flops(self) -> float:
        """Of forward and backward, without what is computed again; causal attention counts half."""
        products = 6 * (12 * self.layers * self.width**2 + self.width * VOCAB)
        return (products + 6 * self.layers * self.width * LENGTH) * self.batch * LENGTH

    def job(self) -> Job:
        tokens = torch.randint(0, VOCAB, (self.batch, LENGTH + 1), generator=torch.Generator().manual_seed(0))

        def model() -> Gpt:
            """Weights are the same million of random numbers again and again: billions of them take minutes."""
            with torch.device("meta"):
                made = Gpt(self.width, self.layers, self.width // 128, VOCAB, LENGTH)
            made = made.bfloat16() if self.precision == "bf16-weights" else made
            made = made.to_empty(device="cpu")
            some = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
            for parameter in made.parameters():
                flat = parameter.data.view(-1)
                whole = len(flat) // len(some) * len(some)
                flat[:whole].view(-1, len(some)).copy_(some)
                flat[whole:].copy_(some[: len(flat) - whole])
            return made

        return Job(
            model=model, data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), loss=flat_loss,
            optimizer=fused, batch=self.batch, steps=1, precision=self.precision,  # type: ignore[arg-type]
        )  # fmt: skip


CASES = {
    "gpt-4.4b": Case(
        layers=36, width=3072, precision="bf16",
        ways={
            "memory": {}, "optimizer": {"offload": ["optimizer"]},
            "least": {"offload": ["optimizer:0.9"], "recompute": "selective"},
            "host": {"offload": ["gradients"]}, "both": {"offload": ["optimizer", "gradients:0.4"]},
        },
    ),
    "gpt-16b": Case(
        layers=50, width=5120, precision="bf16-weights",
        ways={"largest": {"offload": ["optimizer:0.62"], "recompute": "full"}},
    ),
}  # fmt: skip


def measure(name: str, way: str, steps: int, compiled: str, predicted: bool) -> None:
    case = CASES[name]
    job = case.job()
    settings = {"memory": dict(case.ways[way]), "compile": compiled, "graphs": "off"}
    told: dict[str, Any] = {"case": name, "way": way, "parameters": case.parameters, "compile": compiled}
    if predicted:
        cluster = preset("H200").cluster("H200", 1, 1)
        cluster = replace(cluster, device=replace(cluster.device, host_bandwidth=measure_host_bandwidth()))
        told["host_gb_per_s"] = cluster.device.host_bandwidth / 1e9
        began = time.perf_counter()
        found = predict_job(job, resolve("single", 1, settings), cluster, time_on="cuda").prediction
        told |= {"predicted_ms": 1e3 * found.step_s, "predicted_gib": found.memory.total / 2**30}
        told["predicted_in_s"] = time.perf_counter() - began
        _progress(f"predicted {found.step_s:.3f} s a step, {told['predicted_gib']:.1f} GiB")
        gc.collect()
        torch.cuda.empty_cache()
    _progress("begins")
    batch = tuple(tensor.cuda() for tensor in job.data)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = parallelize(job, "single", device="cuda", settings=settings, listener=_tell)
    _progress("model made and placed")
    for number in range(3):
        step(batch)
        torch.cuda.synchronize()
        _progress(f"step {number}")
    told["first_steps_s"] = time.perf_counter() - began
    times = [_seconds(lambda: step(batch)) for _ in range(steps)]
    median = statistics.median(times)
    told |= {
        "step_ms": 1e3 * median, "steps_ms": [round(1e3 * taken, 1) for taken in times],
        "tflops": case.flops / median / 1e12, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip
    print(
        json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in told.items()}), flush=True
    )


def _seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 2


def _progress(what: str) -> None:
    """Steps of the largest models take seconds, their start a minute: who waits sees how far it came."""
    print(f"             {time.strftime('%T')} {what}", file=sys.stderr, flush=True)


def _tell(event: dict[str, object]) -> None:
    if "notice" in event:
        print(f"             {event['notice']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--ways", default=None, help="all of a case, where not given")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", default="off")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process; else one process a way")
    options = parser.parse_args()
    for name in options.cases.split(","):
        for way in options.ways.split(",") if options.ways else CASES[name].ways:
            if options.here:
                measure(name, way, options.steps, options.compile, options.predict)
                continue
            more = [
                "--cases",
                name,
                "--ways",
                way,
                "--steps",
                str(options.steps),
                "--compile",
                options.compile,
            ]
            more += ["--predict"] if options.predict else []
            subprocess.run([sys.executable, "-m", "bench.offload", "--here", *more], check=False)


if __name__ == "__main__":
    main()
