"""Fit a `Cluster` to this machine.

In: which devices, how many ranks. Out: a cluster of one host, and what a person should know about how it was measured:
residuals of the fits, foreign load, start-up. Ranks are measured while all of them are busy, as they are in a run.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.calibration import Calibration
from plait.cluster.cluster import Cluster, Device, Link
from plait.cluster.devices import DEVICES
from plait.cluster.presets import preset_called
from plait.options import Listener
from plait.program.instructions import Collective
from plait.program.value import Value
from plait.run.measure.fit import Fit, fit_line, fit_saturating, socket_link
from plait.run.measure.links.transfer_times import TimedTransfer, mean_of_ranks, time_transfers
from plait.run.measure.load import complaint, foreign_cores, spread
from plait.run.measure.progress_times import time_progress
from plait.run.measure.rates import Rates, measure_host_bandwidth, measure_rates
from plait.run.measure.tiny import measure_overhead
from plait.run.setup.allocator import keep_freed_memory
from plait.run.start.launch import GroupKind, Seat, connect, disconnect, launch

_MOST_RANKS = 16
"""Processes that are started to measure links: more tell nothing new of one host."""
_SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Bytes of the all-reduces to which latency and bandwidth are fitted: from one page to what a bucket is."""
_PAYS = 0.95
"""Of the time that ranks need which sum where they wait: a thread that needs less than this is used."""
_TIMEOUT_S = 120.0
"""After which a measurement counts as hanging: it takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """This machine."""

    cluster: Cluster
    notes: Mapping[str, Any]
    """For people: when, under which load, how well the fits hold."""


def processor_name() -> str:
    """A core of this machine, by the number and the model of all: what is measured of it is called so, here and on any
    machine like it."""
    model = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        model = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), model
        )
    return f"cpu core, 1 of {os.cpu_count()} ({model})"


def measure_machine(device: str, tell: Listener) -> Measured:
    """Measure the processors of this host, or its CUDA devices."""
    foreign = foreign_cores()
    if device == "cuda":
        return _accelerators(tell, foreign)
    return _processors(tell, foreign)


def _processors(tell: Listener, foreign: float) -> Measured:
    ranks = min(os.cpu_count() or 1, _MOST_RANKS)
    tell({"stage": f"measuring {ranks} ranks of one thread"})
    found = launch(_Main("plait"), ranks=ranks, hang_s=_TIMEOUT_S)
    tell({"stage": "measuring one rank of all threads"})
    alone = launch(_Main("plait"), ranks=1, threads_per_rank=os.cpu_count() or 1, hang_s=_TIMEOUT_S)[0][
        "rates"
    ]
    tell({"stage": "measuring a run of nothing"})
    overhead = measure_overhead(min(ranks, 2))
    rates = [Rates(**entry["rates"]) for entry in found]
    transfers = mean_of_ranks([entry["transfers"] for entry in found])
    best, half, residuals = _products(rates, "float32")
    calibration = replace(
        DEVICES["cpu"].device.calibration,
        matmul_share=1.0,
        matmul_tiles=0.0,
        matmul_depth=half,
        attention_share=min(1.0, mean(r.attention_rate for r in rates) / best),
        memory_share=1.0,
        kernel_s=mean(r.small_op_s for r in rates),
        host_s=0.0,
        link_share=1.0,
        step_s=overhead.step_s,
        reserve_bytes=float(overhead.memory_bytes),
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    chip = Device(
        name=processor_name(), memory_bytes=memory_bytes,
        peak_flops={"float32": best, "float64": _products(rates, "float64")[0]},
        memory_bandwidth=mean(r.copy_rate for r in rates), calibration=calibration,
    )  # fmt: skip
    host, told_host = _link(transfers, "shared", ranks, calibration)
    between, told_between = _link(transfers, "plait", ranks, calibration)
    progress = mean_of_ranks([entry["progress"] for entry in found])
    on_thread = bool(progress) and progress["thread"] < _PAYS * progress["inline"]
    memory = replace(host, shared=True, background=on_thread)
    cluster = Cluster(
        name="this", device=chip, hosts=1, devices_per_host=ranks, pair=memory, host=memory,
        between=replace(between, direct=True),
    )  # fmt: skip
    notes = _notes(foreign, rates, overhead.start_s) | {
        "sums_beside_computation_s": {way: round(seconds, 6) for way, seconds in progress.items()},
        "float32_rate_of_all_threads": max(alone["products"]["float32"].values()),
        "residuals": {
            "matrix products": residuals,
            "all-reduce in shared memory": told_host,
            "sockets": told_between,
        },
    }
    return Measured(cluster=cluster, notes=notes)


def _accelerators(tell: Listener, foreign: float) -> Measured:
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    tell({"stage": f"measuring {properties.name}"})
    rates = measure_rates(torch.device("cuda", 0))
    overhead = measure_overhead(1, "cuda")
    known = preset_called(properties.name)
    peaks = {dtype: max(found.values()) for dtype, found in rates.products.items()}
    base = dict(known.device.peak_flops) if known else peaks
    bandwidth = known.device.memory_bandwidth if known else rates.copy_rate
    calibration = replace(
        known.device.calibration if known else Calibration(),
        matmul_share=min(1.0, peaks["bfloat16"] / base["bfloat16"]),
        attention_share=rates.attention_rate / base["bfloat16"],
        memory_share=min(1.0, rates.copy_rate / bandwidth),
        kernel_s=rates.small_op_s,
        host_s=rates.host_s,
        step_s=0.0,  # the host prepares a step while the device is busy with the one before
        reserve_bytes=float(total - free),
    )
    chip = Device(
        name=known.device.name if known else properties.name, memory_bytes=int(total), peak_flops=base,
        memory_bandwidth=bandwidth, host_bandwidth=measure_host_bandwidth(), calibration=calibration,
    )  # fmt: skip
    template = known or DEVICES["A100-80"]
    host = template.host
    told: dict[int, float] = {}
    if count > 1:
        tell({"stage": f"measuring all-reduce on {count} devices"})
        found = launch(_Main("nccl"), ranks=count, hang_s=_TIMEOUT_S, start="spawn")
        transfers = mean_of_ranks([entry["transfers"] for entry in found])
        host, told = _link(transfers, "nccl", count, calibration)
    cluster = Cluster(
        name="this",
        device=chip,
        hosts=1,
        devices_per_host=count,
        pair=host,
        host=host,
        between=template.between,
    )
    residuals: dict[str, Any] = {
        f"{dtype} products": _products([rates], dtype)[2] for dtype in rates.products
    }
    notes = _notes(foreign, [rates], overhead.start_s) | {"residuals": residuals | {"all-reduce": told}}
    return Measured(cluster=cluster, notes=notes)


class _Main:
    """What every process measures, all at once."""

    def __init__(self, backend: GroupKind) -> None:
        self._backend = backend

    def __call__(self, seat: Seat) -> dict[str, Any]:
        keep_freed_memory()
        on_gpu = self._backend == "nccl"
        device = torch.device("cuda", seat.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if seat.ranks == 1:
            return {"rates": asdict(measure_rates(device)), "transfers": {}, "progress": {}}
        connect(seat, self._backend, timeout_s=2 * _TIMEOUT_S)
        try:
            transfers = _all_reduce_times(self._backend, device)
            if on_gpu:
                return {"transfers": transfers}
            rates = measure_rates(device, dist.barrier)
            transfers |= time_transfers(_shared_all_reduces(seat.ranks), seat.rank, seat.ranks)
            progress = time_progress(seat.rank, seat.ranks)
            return {"rates": asdict(rates), "transfers": transfers, "progress": progress}
        finally:
            disconnect()


def _shared_all_reduces(ranks: int) -> list[TimedTransfer]:
    return [
        TimedTransfer(
            key=f"shared {size}", size=ranks, shape=(size // 4,), dtype=torch.float32, placed=True,
            instruction=Collective(
                name="all_reduce", op="all_reduce", axis="data", reads=(Value.bucket(0),), num_bytes=size
            ),
        )
        for size in _SIZES
    ]  # fmt: skip


def _all_reduce_times(backend: str, device: torch.device) -> dict[str, float]:
    """Seconds of an all-reduce through torch.distributed, by size; and of the processor, for it."""
    found = {}
    for size in _SIZES:
        tensor = torch.zeros(size // 4, device=device)
        repeats = 5

        def call(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        call()
        times = [_timed(call) for _ in range(repeats)]
        found[f"{backend} {size}"] = mean(wall_s for wall_s, _ in times)
        found[f"work {size}"] = median(work_s for _, work_s in times)
    return found


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of this process's processor time, all threads together."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - worked


def _link(
    transfers: Mapping[str, float], kind: str, ranks: int, calibration: Calibration
) -> tuple[Link, dict[int, float]]:
    """The link with which `collective_seconds` gives the times of an all-reduce among `ranks` ranks."""
    points = [(float(size), transfers[f"{kind} {size}"]) for size in _SIZES if f"{kind} {size}" in transfers]
    if not points:
        preset = DEVICES["cpu"]
        return (preset.host if kind == "shared" else preset.between), {}
    line: Fit = fit_line(points)
    residuals = {int(size): round(error, 3) for size, error in line.residuals.items()}
    if kind == "plait":
        work = fit_line([(float(size), transfers[f"work {size}"]) for size in _SIZES])
        link = socket_link(line, ranks, calibration)
        return replace(link, work_s=work.start_s, work_s_per_byte=work.per_unit_s), residuals
    part = (ranks - 1) / ranks
    latency_s = max(0.0, line.start_s - calibration.kernel_s) / (2 * (ranks - 1))
    bandwidth = 2 * part / line.per_unit_s / calibration.link_share
    if kind == "shared":  # all ranks of the host use one memory
        bandwidth *= max(1, ranks - 1)
    return Link(latency_s=latency_s, bandwidth=bandwidth), residuals


def _products(rates: Sequence[Rates], dtype: str) -> tuple[float, float, dict[int, float]]:
    """(best rate, depth at half of it, residuals) of square products."""
    extents = rates[0].products[dtype]
    points = [(float(extent), mean(r.products[dtype][extent] for r in rates)) for extent in extents]
    best, half, residuals = fit_saturating(points)
    return best, half, {int(extent): round(error, 3) for extent, error in residuals.items()}


def _notes(foreign: float, rates: Sequence[Rates], start_s: float) -> dict[str, Any]:
    varies = max(spread(r.probe_s) for r in rates)
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": str(torch.__version__),
        "foreign_cores": round(foreign, 2),
        "spread": round(varies, 3),
        "notice": complaint(foreign, varies),
        "start_s": round(start_s, 3),
    }
