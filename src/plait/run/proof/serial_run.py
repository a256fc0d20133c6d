"""A whole training run in one process: all ranks of a plan, on real tensors, step by step.

In: a job, a plan. Out: losses, gradients and final states, for verification and for stepping through with a
debugger.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from plait.graph.from_job import Captures
from plait.job.data.loader import Loader
from plait.job.data.share import LoadedStep
from plait.job.job import Job
from plait.job.updates.follow import TRAIN_LOSS
from plait.plan.plan import Plan
from plait.program.layout import Layout
from plait.program.program import Program
from plait.program.segment.compiled import compiled_where_it_pays
from plait.run.hold.away.copies import copies_of, has_current, spread
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.interpret.outcome import StepOutcome
from plait.run.interpret.serial import (
    Mailboxes,
    Reduce,
    SerialLinks,
    SerialPost,
    Unobserved,
    add_up,
    run_step,
)
from plait.run.link.hop_links import HopLinks, in_turns
from plait.run.link.links import Links
from plait.run.loop.shared_model import on_model_of
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.serve.optimized import Optimized
from plait.torch_private.wrappers import in_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a run computed, for comparison."""

    losses: tuple[float, ...]
    norms: tuple[float, ...] | None
    """Global gradient norms of the steps; None where nothing was clipped, or not where it can be seen."""
    gradients: tuple[dict[str, Tensor], ...]
    """By step, then by parameter; rank 0's."""
    weights: dict[str, Tensor]
    """Parameters after the last step; rank 0's, or the mean of workers that average."""
    buffers: dict[str, Tensor]
    """Buffers after the last step; rank 0's."""
    spread: float | None
    """Largest difference of a weight between ranks that hold copies; None where ranks differ on purpose."""
    notices: tuple[str, ...]


class SerialRanks:
    """All ranks of a plan in this process, one step at a time; servers take turns with workers."""

    def __init__(self, job: Job, programs: Programs, dtype: torch.dtype, reduce: Reduce = add_up) -> None:
        self.job, self.programs = job, programs
        plan, device = programs.plan, torch.device("cpu")
        self._full = programs.full_step()
        self.boxes = Mailboxes(plan.mesh, reduce)
        self._moves = 0
        self._hopping: list[HopLinks] = []
        """The workers' links, where collectives are made hop by hop."""
        compiled = compiled_where_it_pays(plan, self._full, device)
        self.machines: list[Machine] = []
        """Of the workers."""
        self.servers: list[Machine] = []
        """Of the ranks beside them."""
        self._gradients: list[dict[str, Tensor]] = []
        for rank in range(plan.ranks):
            links: Links = SerialLinks(self.boxes, rank)
            if plan.links.by_hops:
                links = in_turns(links, plan, rank)
                self._hopping.append(links)
            state = ModelState(job, device, dtype, programs.holding(rank, links, device))
            state.narrow = bool(programs.captures.narrow)
            state.lay_beside(self._full.beside)
            if plan.agreement.weights == "shared" and self.machines:
                state = on_model_of(self.machines[0].state, state, plan)
            post = SerialPost(self.boxes, rank) if plan.ranks > plan.mesh.size else None
            machine = Machine(rank, state, links, Unobserved(), compiled, post)
            machine.serving.waits = False
            with torch.no_grad():
                machine.begin(self._full)
            (self.servers if rank >= plan.mesh.size else self.machines).append(machine)
            self._gradients.append({})
            self._store(machine).on_ready = partial(_remember, self._gradients[rank])
        self._turns = [machine.execute(self._full, 0, ()) for machine in self.servers]
        self.notices: tuple[str, ...] = ()
        self._outcome: StepOutcome | None = None

    @staticmethod
    def _store(machine: Machine) -> GradientStore:
        """Where gradients are made ready: that of whoever updates."""
        holder = machine.serving.service.holder if machine.serving.service is not None else None
        return holder.store if isinstance(holder, Optimized) else machine.store

    def run(self, step: int) -> bool:
        """One step; False where the data has ended."""
        source, agreement = self.programs.captures.source, self.programs.plan.agreement
        loaded = _loaded(self.job, self.programs.plan, step, source.num_samples, self.programs)
        if loaded is None:
            return False
        by_rank = [self.programs.own_shares(one.micro_batches) for one in loaded]
        fragments = agreement.due(step, loaded[0].ends_epoch)
        working: list[Machine] = []
        own: list[Program] = []
        for machine, shares in zip(self.machines, by_rank, strict=True):
            if shares or fragments:
                working.append(machine)
                own.append(self.programs.at(step).for_step(shares, fragments))
            else:
                machine.skip(step)
                if machine.serving.port is not None:
                    machine.serving.port.skip(step)
        for parts in self._gradients:
            parts.clear()  # a parameter may have none in this step
        self.notices = (*self.programs.choices, *own[0].notices)
        run_step(working, own, step, [by_rank[machine.rank] for machine in working], self.turn)
        while self.turn():
            pass
        for machine in self.machines:
            if machine.serving.port is not None:
                machine.serving.port.shares += 1
        self._outcome = self._together(own[0]) if self.servers else self.machines[0].outcome
        if self._outcome is not None and not self.servers:
            for machine in self.machines:
                machine.state.observe({TRAIN_LOSS: self._outcome.loss})
        return True

    def turn(self) -> bool:
        """Let every server do what it can, and make the hops that can be made; whether anything was done."""
        before = self._progress()
        with torch.no_grad():
            for turns in self._turns:
                next(turns, None)
            for links in self._hopping:
                links.advance()
        before_moves, self._moves = self._moves, self.boxes.moves
        return before != self._progress() or before_moves != self._moves

    def _progress(self) -> list[tuple[int, int]]:
        services = [machine.serving.service for machine in self.servers]
        return [(service.streams.taken, service.rule.applied) for service in services if service is not None]

    def _together(self, program: Program) -> StepOutcome:
        """What all workers say of a step, and the first server of the norm."""
        outcomes = [m.outcome for m in self.machines if m.outcome is not None]
        weights = [torch.as_tensor(outcome.weight) for outcome in outcomes]
        known = not self.programs.plan.agreement.alone and not any(
            "weight" in bucket.scalars for bucket in program.buckets
        )
        service = self.servers[0].serving.service
        holder = service.holder if service is not None else None
        return StepOutcome(
            total=torch.stack([outcome.total for outcome in outcomes]).sum(),
            weight=weights[0] if known else torch.stack(weights).sum(),
            norm=holder.norm if isinstance(holder, Optimized) else None,
        )

    @property
    def outcome(self) -> StepOutcome:
        """What rank 0 says about the last step; of workers with servers, what all of them say together."""
        assert self._outcome is not None
        return self._outcome

    def gradients(self) -> dict[str, Tensor]:
        """The last step's, whole: of whoever updates."""
        if self.programs.plan.agreement.weights == "server":
            return self._whole(self._gradients[len(self.machines) :])
        return _assemble(self._gradients[: len(self.machines)], self.programs.layout)

    def _whole(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """From the parts of all servers."""
        holding = self.servers[0].state.holding
        return _assemble(parts, holding.layout if holding is not None else None)

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole; of workers that average, their mean or their center."""
        held = [
            {n: p.detach() for n, p in m.state.parameters.items()} for m in (self.servers or self.machines)
        ]
        agreement = self.programs.plan.agreement
        if self.servers:
            return self._whole(held)
        if agreement.averages:
            return self.machines[0].averaging.center if agreement.mix == "elastic" else _mean(held)
        return _assemble(held, self.programs.layout)

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, from the ranks that change them; of workers that average, their means."""
        if self.servers:
            return self.servers[0].state.buffers
        layout, found = self.programs.layout, dict(self.machines[0].state.buffers)
        if self.programs.plan.agreement.averages:
            return found | _mean([m.state.buffers for m in self.machines])
        for machine in reversed(self.machines):
            own = {n: b for n, b in machine.state.buffers.items() if has_current(layout, n, machine.rank)}
            found |= own
        return found


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The means of floating tensors."""
    names = [name for name, tensor in parts[0].items() if tensor.is_floating_point()]
    return {name: torch.stack([part[name] for part in parts]).mean(0) for name in names}


def run_serially(
    job: Job,
    plan: Plan,
    steps: int,
    dtype: torch.dtype,
    *,
    reduce: Reduce = add_up,
    each_step: Callable[[int], None] | None = None,
    captures: Captures | None = None,
) -> Record:
    """Train all ranks of `plan` for `steps` steps in this process; what a real run refuses is refused here too.

    `captures` are graphs of this job that are known already.
    """
    job = replace(job, steps=steps, epochs=None)
    programs = prepare(job, plan, "cpu", dtype, lambda event: None, captures)
    ranks = SerialRanks(programs.whole, programs, dtype, reduce)
    gradients: list[dict[str, Tensor]] = []
    losses: list[float] = []
    norms: list[float] = []
    for step in range(steps):
        if not ranks.run(step):
            break
        gradients.append(ranks.gradients())
        losses.append(ranks.outcome.loss)
        norms += [float(ranks.outcome.norm)] if ranks.outcome.norm is not None else []
        if each_step is not None:
            each_step(step)
    return Record(
        losses=tuple(losses),
        norms=tuple(norms) or None,
        gradients=tuple(gradients),
        weights=in_parts(ranks.weights()),
        buffers=ranks.buffers(),
        spread=None
        if plan.agreement.mix is not None or plan.agreement.threads or ranks.servers
        else spread(copies_of(machine.state, machine.rank) for machine in ranks.machines),
        notices=ranks.notices,
    )


def _remember(parts: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    parts.update((name, tensor.clone()) for name, tensor in found.items())


def _assemble(parts: list[dict[str, Tensor]], layout: Layout | None) -> dict[str, Tensor]:
    """Whole tensors from what each rank has of them."""
    if layout is None or layout.is_whole:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    found = {}
    for name in names:
        nothing = next(part[name] for part in parts if name in part).new_empty(0)
        found[name] = layout.assemble(name, [part.get(name, nothing) for part in parts])
    return found


def _loaded(
    job: Job, plan: Plan, step: int, num_samples: int | None, programs: Programs
) -> list[LoadedStep] | None:
    order = job.order(num_samples)
    found: list[LoadedStep] = []
    for own in range(plan.data_ranks):
        with Loader(
            source=programs.captures.source, order=order, batch=job.batch, accumulate=job.accumulate, rank=own,
            ranks=plan.data_ranks, start_step=step, stop_step=step + 1, depth=1, rows=programs.rows,
            draws=job.draws,
        ) as loader:  # fmt: skip
            loaded = next(iter(loader), None)
        if loaded is None:
            return None
        found.append(loaded)
    return [found[plan.data_coordinate(rank)] for rank in range(plan.mesh.size)]
