"""plait inside a loop of the user's own: one optimizer step on this rank's share of the batch.

In: a job, a plan, and processes that torchrun (or anything that sets RANK and WORLD_SIZE) started. Out: a
`Step` to call with this rank's share, which may be empty. The ranks' shares may differ in size from call to
call.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import PlanError, UsageError
from plait.job.data.share import Share
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.order import split
from plait.job.updates.follow import TRAIN_LOSS
from plait.options import Listener
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.program.cost.layouts import prefers_channels_last
from plait.program.segment.compiled import compiled_where_it_pays
from plait.rewrite.choose import settled_for
from plait.run.checkpoint.state import TrainingState, snapshot
from plait.run.hold.state import ModelState
from plait.run.hold.worker_states import with_workers
from plait.run.interpret.captured import captured_where_it_pays
from plait.run.interpret.machine import Machine
from plait.run.interpret.outcome import StepOutcome
from plait.run.interpret.serial import Unobserved
from plait.run.link.between import links_of_plan
from plait.run.link.fetch import ProcessShardFetcher, add_up
from plait.run.link.process_links import ProcessLinks
from plait.run.prepare.fits import memory_limit
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.setup.agreement import check_agreement
from plait.run.setup.device import check_device, check_suits_device, choose_device
from plait.run.start.party import TIMEOUT_S, agree, facts_of, has_met, meet, place_here, told_once


class Step:
    """Callable: trains one step on this rank's share and returns the loss of the whole batch.

    Where workers train on their own between two averages, it is the loss of this rank's share; NaN where that is empty.
    """

    def __init__(
        self,
        job: Job,
        programs: Programs,
        rank: int,
        device: torch.device,
        tell: Listener,
        *,
        alike: bool = False,
    ) -> None:
        """`alike`: all ranks run one script that an engine started, so that one of them tells for all."""
        self._rank = rank
        self._plan = plan = programs.plan
        self._job = job
        self._device = device
        self._source = programs.captures.source
        self._programs = programs
        self._began = False
        """Whether gradients were made since the last update."""
        links = links_of_plan(plan, rank, device, timeout_s=TIMEOUT_S)
        if isinstance(links, ProcessLinks):
            for part in programs.parts:
                links.meet(part.full_step().pairs(), device)
        self._state = ModelState(
            job, device, holding=self._programs.holding(rank, links, device),
            channels_last=prefers_channels_last(plan, programs.full_step(), device),
        )  # fmt: skip
        self._state.lay_beside(programs.full_step().beside)
        compiled = compiled_where_it_pays(plan, programs.full_step(), device)
        self._machine = Machine(rank, self._state, links, Unobserved(), compiled)
        self._machine.segments.captured = captured_where_it_pays(
            plan, device, lambda text: tell({"notice": text})
        )
        for what, digest in (
            ("program", programs.full_step().digest),
            ("initial weights", self._state.digest),
        ):
            check_agreement(what, digest, plan.ranks, lambda: rank == 0 or not alike)
        with torch.no_grad():
            self._machine.begin(programs.full_step())

    def __call__(self, share: Any) -> float:
        """One optimizer step; `share` is this rank's part of the batch, None or zero rows where it has none."""
        layout = self._programs.captures.layout
        batch = share if share is not None else self._source.fetch(torch.zeros(0, dtype=torch.int64))
        count = next(
            tensor.shape[0]
            for tensor, counts in zip(layout.tensors(batch), layout.has_samples, strict=True)
            if counts
        )
        sizes = self._counts(count)
        if sum(sizes) == 0:
            raise UsageError("all ranks gave an empty share.", fix="end the loop when the data ends.")
        shares = self._programs.own_shares(self._split(self._programs, batch, sizes))
        step = self._state.steps_done
        programs = self._programs.at(step)
        fragments = self._plan.agreement.due(step, False)
        if not shares and not fragments:
            self._machine.skip(step)
            return math.nan
        program = programs.for_step(shares, fragments)
        self._state.narrow = bool(programs.captures.narrow)
        with torch.no_grad():
            for _ in self._machine.execute(program, step, shares):
                raise AssertionError("a process waits inside its links, never outside")
        if not shares:
            return math.nan
        loss = self.outcome.loss
        self._state.observe({TRAIN_LOSS: loss})
        return loss

    def gradients(
        self, batch: Any, sizes: tuple[int, ...], programs: Programs, number: int
    ) -> tuple[dict[str, Tensor], float]:
        """A step up to its update: this rank's part of the gradients, by name, and the loss.

        `batch` is this rank's share, `sizes` are those of all; `number` decides what is drawn at random. The gradients
        lie in memory that the next call uses again.
        """
        shares = programs.own_shares(self._split(programs, batch, sizes))
        if not shares:
            return {}, math.nan
        program = programs.for_step(shares, self._plan.agreement.due(self._state.steps_done, False))
        self._state.narrow, self._began = bool(programs.captures.narrow), True
        with torch.no_grad():
            for _ in self._machine.gradients(program, number, shares):
                raise AssertionError("a process waits inside its links, never outside")
        return self._machine.store.gradients(program.of(self._rank).buckets), self.outcome.loss

    def after_update(self) -> None:
        """What follows the optimizer's step: where workers average, that."""
        began, self._began = self._began, False
        step = self._state.steps_done
        fragments = self._plan.agreement.due(step, False)
        if not began and not fragments:
            self._machine.skip(step)
            return
        with torch.no_grad():
            if not began:  # this rank had no samples, but averages with the others
                for _ in self._machine.gradients(self._programs.for_step([], fragments), step, []):
                    raise AssertionError("a process waits inside its links, never outside")
            for _ in self._machine.after_update():
                raise AssertionError("a process waits inside its links, never outside")

    def _counts(self, count: int) -> tuple[int, ...]:
        if self._plan.mesh.size == 1:
            return (count,)
        own = torch.tensor([count], device=self._device if dist.get_backend() == "nccl" else None)
        found = [torch.empty_like(own) for _ in range(self._plan.mesh.size)]
        dist.all_gather(found, own)
        counts: dict[int, int] = {}
        for rank, tensor in enumerate(found):
            share = self._plan.data_coordinate(rank)
            if counts.setdefault(share, int(tensor)) != int(tensor):
                raise UsageError(
                    f"rank {rank} gave {int(tensor)} samples where another rank of share {share} gave {counts[share]}.",
                    fix="give the same samples to all ranks that differ in other axes than data.",
                )
        return tuple(counts[share] for share in range(self._plan.data_ranks))

    def _split(self, programs: Programs, batch: Any, sizes: tuple[int, ...]) -> list[Share]:
        """The job's micro-batches: every rank cuts its share into as many pieces."""
        pieces = min(self._job.accumulate, max(sizes))
        by_rank = [split(size, pieces) for size in sizes]
        share = self._plan.data_coordinate(self._rank)
        own = by_rank[share]
        shares = []
        for number in range(pieces):
            start = sum(own[:number])
            piece = programs.captures.layout.rows(batch, start, own[number])
            units = tuple(parts[number] for parts in by_rank)
            shares.append(
                Share(
                    batch=piece,
                    ids=tuple(range(own[number])),
                    sizes=units,
                    offset=sum(units[:share]),
                    global_offset=0,
                )
            )
        return shares

    @property
    def outcome(self) -> StepOutcome:
        """Total, weight and gradient norm of the last step."""
        if self._machine.outcome is None:
            raise UsageError("no step has been made yet.", fix="call step(share) first.")
        return self._machine.outcome

    @property
    def state(self) -> ModelState:
        """What this rank holds."""
        return self._state

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Gradients that are made within it leave no trace in the model's buffers."""
        self._machine.commits.keeps_undo = True
        try:
            yield
            self._machine.commits.undo()
        finally:
            self._machine.commits.keeps_undo = False

    @property
    def model(self) -> nn.Module:
        """The module that is trained, with the user's own names; for evaluation."""
        if self._state.holding is not None:
            raise UsageError(
                f"under plan {self._plan.name} no rank holds the whole model.",
                fix="use `with step.whole_model() as model:` on all ranks.",
            )
        return self._state.model

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The module with all of its parameters, for evaluation; all ranks must enter it.

        Of workers that train on their own, what they have together: their mean, or their center.
        """
        with (
            self._machine.averaging.shown(self._plan, self._add_up),
            self._state.whole_model(self._fetch) as model,
        ):
            yield model

    def _add_up(self, tensor: Tensor) -> Tensor:
        return add_up(tensor, self._plan.mesh.size, self._device)

    @property
    def _fetch(self) -> ProcessShardFetcher | None:
        holding = self._state.holding
        return ProcessShardFetcher(holding.layout) if holding is not None else None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer on this rank."""
        return self._state.optimizer

    def checkpoint(self) -> TrainingState:
        """What `plait.run.checkpoint.store.save_checkpoint` takes; all ranks must call it."""
        state, averaging = self._state, self._machine.averaging
        with averaging.shown(self._plan, self._add_up):
            saved = state.to_checkpoint({"seed": self._job.seed}, self._fetch)
            saved = (
                snapshot(saved) if self._plan.agreement.averages else saved
            )  # before each has its own back
        return with_workers(saved, state, averaging, self._plan, self._rank)


def refuse_what_is_no_loop_of_steps(plan: Plan) -> None:
    """A loop of the user's own makes its steps on all ranks together, and does not say when an epoch ends."""
    agreement = plan.agreement
    if not agreement.marches:
        beside = "a rank that makes no steps" if plan.sync.servers else "memory that only a parent can share"
        raise PlanError(
            f"plan {plan.name} needs {beside}, and workers that are not all at one step; a loop of your own is none.",
            fix="use plait.train, or a plan whose workers march, such as ddp or local-sgd.",
        )
    if agreement.threads:
        raise PlanError(
            f"plan {plan.name} has all its ranks in one process, which makes their steps.",
            fix="use plait.train, or the plan ddp with a process for each rank.",
        )
    if agreement.round is None:
        raise PlanError(
            f"plan {plan.name} averages at the end of an epoch, of which a loop of your own says nothing.",
            fix="set average.every to a number of steps.",
        )


@kept_generators()
def parallelize(
    job: Job,
    plan: str | Path | Plan = "ddp",
    *,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: str | None = None,
    listener: Listener | None = None,
) -> Step:
    """Prepare `job` under `plan` in this process, which is one of those that torchrun started (or the only one).

    All that `train` refuses before it starts is refused here too; `listener` is told the notices.
    """
    place = None if dist.is_initialized() else place_here()
    rank, ranks = (0, 1) if place is None else (place.task, place.tasks)
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    agrees = (
        place is not None or has_met()
    )  # not in a process group of the user's own, whose ranks others may be
    with told_once() if agrees else nullcontext():
        chosen = _chosen(plan, ranks, device, settings, mesh)
        if agrees:
            agree(facts_of(job, chosen, device=device))
    tell = listener if listener is not None else (lambda event: None)
    programs = prepare(job, chosen, device, torch.float32, tell, limit_bytes=memory_limit(device, memory))
    placed = choose_device(device, rank)
    if place is not None:
        own_gpus = placed.type == "cuda" and place.local_tasks <= torch.cuda.device_count()
        meet("nccl" if own_gpus else "plait", TIMEOUT_S)
    return Step(programs.whole, programs, rank, placed, tell, alike=agrees)


def _chosen(
    plan: str | Path | Plan,
    ranks: int,
    device: str,
    settings: Mapping[str, Any] | None,
    mesh: Mapping[str, int] | None,
) -> Plan:
    """The plan for the processes that there are, or why there is none."""
    chosen = settled_for(ranks, resolve(plan, ranks if not isinstance(plan, Plan) else None, settings, mesh))
    refuse_what_is_no_loop_of_steps(chosen)
    if chosen.ranks != ranks:
        raise PlanError(
            f"the plan is for {chosen.ranks} ranks, but {ranks} processes were started.",
            fix=f"start {chosen.ranks} processes, or drop the mesh from the plan.",
        )
    check_device(device)
    check_suits_device(chosen, device)
    return chosen
