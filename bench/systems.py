"""The systems under comparison, each set up once in this process as its own documentation shows, then asked for k
steps.

In: a specification such as `plait`, `plait:bucket_mib=1`, `plait:untraced`, `plait:plan=zero3`, `ddp`, `accelerate`,
`fabric`, `eager`, `fsdp2`, `dtensor`.
Out: a function that does k steps, data loading included. All share the process group of torchrun and the number of
threads.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.data.share import LoadedStep
from plait.job.job import Job
from plait.job.order import SampleOrder
from plait.plan.named import resolve
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.interpret.observer import WorkerObserver
from plait.run.link.between import links_between
from plait.run.prepare.programs import Programs
from plait.run.setup.allocator import keep_freed_memory
from plait.run.start.board import Board
from plait.trace.recorder import Recorder

Steps = Callable[[int], None]
CPU = torch.device("cpu")


def make_system(specification: str, job: Job, rank: int, ranks: int, stack: ExitStack) -> Steps:
    """Set one system up; `stack` ends what it started."""
    name, _, options = specification.partition(":")
    given = dict(entry.partition("=")[::2] for entry in options.split(",") if entry)
    if name == "plait":
        return _plait(job, rank, ranks, given, stack)
    makers = {
        "ddp": _ddp, "accelerate": _accelerate, "fabric": _fabric, "eager": _eager, "fsdp2": _fsdp2,
        "dtensor": _dtensor,
    }  # fmt: skip
    return makers[name](job, rank, ranks, given)


def _plait(job: Job, rank: int, ranks: int, options: dict[str, str], stack: ExitStack) -> Steps:
    """What `run/worker.py` does in a step, trace and board included."""
    keep_freed_memory()
    sync: dict[str, Any] = {}
    if "bucket_mib" in options:
        sync["bucket_mib"] = float(options["bucket_mib"])
    if "blocking" in options:
        sync["overlap"] = False
    name = options.get("plan", "ddp" if ranks > 1 else "single")
    plan = resolve(name, ranks, {"sync": sync} if sync else None)
    source = open_data(job.data, job.collate)
    programs = Programs(job, source, plan, CPU)
    programs.full_step()
    recorder = None if "untraced" in options else Recorder(rank)
    board = None if "untraced" in options else Board.create(ranks).slot_of(rank)
    observer = WorkerObserver(board, recorder)
    links = links_between(plan.mesh, rank, CPU, timeout_s=60.0, share=options.get("links") != "gloo")
    state = ModelState(job, CPU, holding=programs.holding(rank, links, CPU))
    machine = Machine(rank, state, links, observer)
    assert source.num_samples is not None
    order = SampleOrder(
        num_samples=source.num_samples, batch=job.batch, accumulate=1, seed=job.seed, shuffle=True
    )
    loader = Loader(
        source=source, order=order, batch=job.batch, rank=plan.data_coordinate(rank), ranks=plan.data_ranks,
        epochs=job.epochs,
    )  # fmt: skip
    loaded: Iterator[LoadedStep] = iter(stack.enter_context(loader))

    def steps(count: int) -> None:
        for _ in range(count):
            step = next(loaded)
            program = programs.for_step(step.micro_batches)
            observer.use(program, rank)
            with torch.no_grad():
                for _ in machine.execute(program, step.step, step.micro_batches):
                    raise AssertionError("a process waits inside its links")

    return steps


def _batches(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _built(job: Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = job.build_model().train()
    return model, job.build_optimizer(list(model.named_parameters()))


def _loop(batches: Iterator[Any], forward: Any, job: Job, optimizer: Any, backward: Any) -> Steps:
    def steps(count: int) -> None:
        for _ in range(count):
            *inputs, target = next(batches)
            optimizer.zero_grad(set_to_none=True)
            assert job.loss is not None
            backward(job.loss(forward(*inputs), target))
            optimizer.step()

    return steps


def _loader(job: Job, rank: int, ranks: int) -> DataLoader:
    data: Any = job.data
    sampler: DistributedSampler = DistributedSampler(
        data, num_replicas=ranks, rank=rank, shuffle=True, seed=job.seed
    )
    return DataLoader(data, batch_size=job.batch // ranks, sampler=sampler)


def _eager(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    data: Any = job.data
    model, optimizer = _built(job)
    batches = _batches(DataLoader(data, batch_size=job.batch, shuffle=True))
    return _loop(batches, model, job, optimizer, lambda loss: loss.backward())


def _ddp(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    model, optimizer = _built(job)
    tuned = "tuned" in options
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=tuned, static_graph=tuned)
    batches = _batches(_loader(job, rank, ranks))
    return _loop(batches, wrapped, job, optimizer, lambda loss: loss.backward())


def _accelerate(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    import accelerate  # optional: the `bench` extra

    data: Any = job.data
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == ranks
    model, optimizer = _built(job)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=job.batch // ranks, shuffle=True)
    )
    return _loop(_batches(loader), model, job, optimizer, accelerator.backward)


def _fabric(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    import lightning_fabric  # optional: the `bench` extra

    data: Any = job.data
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    assert fabric.world_size == ranks
    model, optimizer = _built(job)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=job.batch // ranks, shuffle=True))
    return _loop(_batches(loader), model, job, optimizer, fabric.backward)


def _fsdp2(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    """As the tutorial of FSDP2 shows: every block, then the rest; gathered again in the backward."""
    model = job.build_model().train()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = job.build_optimizer(list(model.named_parameters()))
    batches = _batches(_loader(job, rank, ranks))
    return _loop(batches, model, job, optimizer, lambda loss: loss.backward())


def _dtensor(job: Job, rank: int, ranks: int, options: dict[str, str]) -> Steps:
    """As the tutorial of tensor parallelism shows, with the loss on sharded logits."""
    model = job.build_model().train()
    mesh = init_device_mesh("cpu", (ranks,))
    column, row = ColwiseParallel(), RowwiseParallel()
    block = {"query": column, "key": column, "value": column, "out": row, "up": column, "down": row}
    for layer in model.blocks:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, block)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups: list[dict[str, Any]] = [{"params": cut}, {"params": whole}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    data: Any = job.data
    batches = _batches(DataLoader(data, batch_size=job.batch))

    def steps(count: int) -> None:
        with loss_parallel():
            for _ in range(count):
                tokens, target = next(batches)
                optimizer.zero_grad(set_to_none=True)
                assert job.loss is not None
                job.loss(model(tokens), target).backward()
                optimizer.step()

    return steps


def join() -> tuple[int, int]:
    """Join the process group that torchrun describes; (rank, ranks), or (0, 1) where there is none."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return 0, 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    return dist.get_rank(), ranks
