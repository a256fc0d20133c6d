"""Refuse a plan that cannot fit, before any process is started.

In: a compiled program and the memory of a device. Out: nothing, or a `PlanError` with the numbers. Only tensors are
counted, which a step certainly needs: a plan that is let through may still fail for what an allocator and a driver use
beside them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from plait.errors import MisfitError, UsageError
from plait.program.cost.memory import step_memory
from plait.program.cost.update import update_work
from plait.program.program import Program
from plait.run.prepare.programs import Programs
from plait.search.predict.exact import memory_use
from plait.units import format_bytes, parse_bytes


def memory_limit(device: str, told: str | None) -> int | None:
    """Bytes that a rank may use: as told, else what a CUDA device has; None: nobody knows."""
    if told is not None:
        return parse_memory(told)
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return None


def parse_memory(told: str | None) -> int | None:
    """`70GiB` as bytes."""
    try:
        return parse_bytes(told) if told is not None else None
    except ValueError as error:
        raise UsageError(f"--memory {told}: {error}.", fix="write it like 70GiB.") from error


def check_fits(programs: Programs, steps: Sequence[Program], limit_bytes: int | None) -> None:
    """Raise where the tensors of a rank need more than `limit_bytes`; `steps` has one of every objective."""
    for part, program in zip(programs.parts, steps, strict=True):
        if limit_bytes is not None and part.capture_error is None:
            others = [(p, s) for p, s in zip(programs.parts, steps, strict=True) if p is not part]
            _check_step(part, program, limit_bytes, others)


def _check_step(
    programs: Programs, program: Program, limit_bytes: int, others: Sequence[tuple[Programs, Program]]
) -> None:
    for entry in range(len(program.classes)):
        rank = program.members.index(entry)
        update = update_work(program, rank, programs.job.build_optimizer)
        beside = [update_work(step, rank, other.job.build_optimizer) for other, step in others]
        use = memory_use(program, rank, update, at_once=programs.device.type == "cuda")
        kept = sum(other.state_bytes for other in beside)
        if programs.whole.average is not None:  # one more of what is updated, kept like the optimizer's state
            kept += sum(work.parameter_bytes for work in (update, *beside))
        use = replace(use, optimizer=use.optimizer + kept)
        if use.total > limit_bytes:
            raise MisfitError(
                f"plan {program.plan.name} does not fit: rank {rank} needs {format_bytes(use.total)} of"
                f" {format_bytes(limit_bytes)}: parameters {format_bytes(use.parameters)}, gradients"
                f" {format_bytes(use.gradients)}, optimizer {format_bytes(use.optimizer)}, activations"
                f" {format_bytes(use.activations)}, buffers {format_bytes(use.buffers)}.",
                fix="use a plan that cuts more (zero3, tensor, pipe), memory.recompute=full, memory.offload=auto, or a"
                " smaller micro-batch.",
            )


def check_host(steps: Sequence[Program]) -> None:
    """Raise where what ranks keep on the host needs more memory than it has left, all of them on one host."""
    free = free_host_bytes()
    for program in steps:
        uses = [step_memory(program, rank) for rank in range(program.plan.mesh.size)]
        away = sum(use.state_away + use.parameters_away + use.gradients_away for use in uses)
        if away > free:
            raise MisfitError(
                f"memory.offload keeps {format_bytes(away)} on the host, which has {format_bytes(free)} left.",
                fix="keep less there, such as memory.offload=optimizer:0.5; or cut state over more hosts.",
            )


def free_host_bytes() -> int:
    """What the machine has left, or the group of processes that this one belongs to."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
