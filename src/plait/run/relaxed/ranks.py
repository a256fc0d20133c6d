"""Which part a process plays in a run whose workers do not march in step.

In: a task and a seat. Out: what the part's own loop returns.
"""

from contextlib import ExitStack
from typing import Any

import torch

from plait.run.loop.worker import Task, timeout_s
from plait.run.prepare.programs import Programs
from plait.run.relaxed.elastic import serve_center, work_around_center
from plait.run.relaxed.hogwild import SharedModel, run_hogwild_worker
from plait.run.relaxed.serve import serve, work
from plait.run.start.allocator import keep_freed_memory
from plait.run.start.device import choose_device, exact_products
from plait.run.start.launch import Seat, connect, disconnect


def run_rank(task: Task, seat: Seat, programs: Programs, model: SharedModel | None = None) -> dict[str, Any]:
    """Be a worker or a server; returns a JSON-able summary. `model` is the one that workers of hogwild share."""
    keep_freed_memory()
    plan = task.plan
    with ExitStack() as stack:
        if plan.sync.rule == "hogwild":
            if task.record_gradients:
                stack.enter_context(exact_products())
            assert model is not None
            return run_hogwild_worker(task, seat, programs, model)
        device = choose_device(task.device, seat.rank)
        if task.record_gradients:
            stack.enter_context(exact_products())
        if seat.ranks > 1:
            nccl = (
                device.type == "cuda"
                and plan.mesh.size <= torch.cuda.device_count()
                and not plan.sync.servers
            )
            connect(seat, "nccl" if nccl else "plait", timeout_s=timeout_s(task))
            stack.callback(disconnect)
        if plan.sync.has_servers:
            return (
                serve(task, seat, programs)
                if seat.rank >= plan.mesh.size
                else work(task, seat, programs, device)
            )
        if seat.rank >= plan.mesh.size:
            return serve_center(task, seat, programs)
        return work_around_center(task, seat, programs, device)
