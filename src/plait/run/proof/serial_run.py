"""A whole training run in one process: all ranks of a plan, on real tensors, step by step.

In: a job, a plan. Out: losses, gradients and final states, for verification and for stepping through with a
debugger.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from plait.graph.from_job import Captures
from plait.job.data.loader import LoadedStep, Loader, Share
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.program.averaging import averages, due, has_center, mixes
from plait.program.layout import Layout
from plait.program.segment.compiled import CompiledSegments
from plait.run.interpret.copies import copies_of, has_current, spread
from plait.run.interpret.machine import Machine, StepOutcome
from plait.run.interpret.serial import Mailboxes, Reduce, SerialLinks, Unobserved, add_up, run_step
from plait.run.interpret.state import ModelState
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.relaxed.hogwild import on_model_of
from plait.run.relaxed.serial import SerialCenter, SerialServers


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
    rounds_to_float32: bool = False
    """Whether the model casts float64 down by itself, so that it agrees with itself only as well as float32."""


class SerialRanks:
    """All ranks of a plan in this process, one step at a time."""

    def __init__(self, job: Job, programs: Programs, dtype: torch.dtype, reduce: Reduce = add_up) -> None:
        self.job, self.programs = job, programs
        plan, device = programs.plan, torch.device("cpu")
        boxes = Mailboxes(plan.mesh, reduce)
        self.machines: list[Machine] = []
        compiled = CompiledSegments(device) if plan.compile == "on" else None
        self._gradients: list[dict[str, Tensor]] = []
        for rank in range(plan.mesh.size):
            links = SerialLinks(boxes, rank)
            state = ModelState(job, device, dtype, programs.holding(rank, links, device))
            if plan.sync.rule == "hogwild" and self.machines:
                state = on_model_of(self.machines[0].state, state, plan)
            machine = Machine(rank, state, links, Unobserved(), compiled)
            self.machines.append(machine)
            self._gradients.append({})
            machine.store.on_ready = partial(_remember, self._gradients[rank])
        self._servers = SerialServers(programs, self.machines) if plan.sync.has_servers else None
        self.center = SerialCenter(programs, self.machines) if has_center(plan) else None
        """What easgd's workers are drawn to, where a rank of its own has it."""
        self.rounds_to_float32 = False
        """Whether a step so far turned float64 into something shorter."""
        self.notices: tuple[str, ...] = ()
        self._outcome: StepOutcome | None = None

    def run(self, step: int) -> bool:
        """One step; False where the data has ended."""
        source = self.programs.captures.source
        loaded = _loaded(self.job, self.programs.plan, step, source.num_samples, self.programs)
        if loaded is None:
            return False
        by_rank = [self.programs.own_shares(one.micro_batches) for one in loaded]
        if self._servers is not None:
            self._run_served(step, by_rank)
            return True
        fragments = due(self.programs.plan, step, loaded[0].ends_epoch)
        alone = self.programs.plan.sync.alone
        own = [self.programs.for_step(s, fragments) for s in (by_rank if alone else by_rank[:1])]
        self.notices = (*self.programs.choices, *own[0].notices)
        self.rounds_to_float32 = self.rounds_to_float32 or _rounds(self.programs, by_rank[0][0])
        others = self.center.turn if self.center is not None else (lambda: False)
        run_step(self.machines, own if alone else own[0], step, by_rank, others)
        if self.center is not None:
            outcomes = [m.outcome for m in self.machines if m.outcome is not None]
            self._outcome = StepOutcome(
                total=torch.stack([outcome.total for outcome in outcomes]).sum(),
                weight=torch.stack([torch.as_tensor(outcome.weight) for outcome in outcomes]).sum(),
                norm=None,
            )
        return True

    def _run_served(self, step: int, by_rank: Sequence[Sequence[Share]]) -> None:
        """One step of all workers, and what the servers make of it."""
        servers = self._servers
        assert servers is not None
        working = [(m, shares) for m, shares in zip(self.machines, by_rank, strict=True) if shares]
        for port, shares in zip(servers.ports, by_rank, strict=True):
            if not shares:
                port.skip(step)
        own = [self.programs.for_step(shares) for _, shares in working]
        self.notices = (*self.programs.choices, *own[0].notices)
        self.rounds_to_float32 = self.rounds_to_float32 or _rounds(self.programs, by_rank[0][0])
        run_step([m for m, _ in working], own, step, [shares for _, shares in working], servers.turn)
        while servers.turn():
            pass
        outcomes = [m.outcome for m, _ in working if m.outcome is not None]
        weights = [torch.as_tensor(outcome.weight) for outcome in outcomes]
        together = not self.programs.plan.sync.alone and not any(
            "weight" in bucket.scalars for bucket in own[0].buckets
        )
        self._outcome = StepOutcome(
            total=torch.stack([outcome.total for outcome in outcomes]).sum(),
            weight=weights[0] if together else torch.stack(weights).sum(),
            norm=servers.norm,
        )

    @property
    def outcome(self) -> StepOutcome:
        """What rank 0 says about the last step; of workers with servers, what all of them say together."""
        if self._outcome is not None:
            return self._outcome
        outcome = self.machines[0].outcome
        assert outcome is not None
        return outcome

    def gradients(self) -> dict[str, Tensor]:
        """The last step's, whole."""
        if self._servers is not None:
            return self._servers.gradients()
        return _assemble(self._gradients, self.programs.layout)

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole; of workers that average, their mean or their center."""
        held = [{name: p.detach() for name, p in m.state.parameters.items()} for m in self.machines]
        plan = self.programs.plan
        if self._servers is not None:
            return self._servers.weights()
        if self.center is not None:
            return self.center.weights()
        if averages(plan):
            return self.machines[0].averaging.center if plan.sync.rule == "easgd" else _mean(held)
        return _assemble(held, self.programs.layout)

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, from the ranks that change them; of workers that average, their means."""
        layout, found = self.programs.layout, dict(self.machines[0].state.buffers)
        if self._servers is not None:
            return self._servers.buffers()
        if self.center is not None:
            return self.center.center.state.buffers
        if averages(self.programs.plan):
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
    ranks = SerialRanks(job, programs, dtype, reduce)
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
        weights=ranks.weights(),
        buffers=ranks.buffers(),
        spread=None
        if mixes(programs.plan) or programs.plan.sync.has_servers
        else spread(copies_of(machine.state, machine.rank) for machine in ranks.machines),
        notices=ranks.notices,
        rounds_to_float32=ranks.rounds_to_float32,
    )


def _remember(parts: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    parts.update((name, tensor.clone()) for name, tensor in found.items())


def _assemble(parts: list[dict[str, Tensor]], layout: Layout | None) -> dict[str, Tensor]:
    """Whole tensors from what each rank has of them."""
    if layout is None or layout.is_whole:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    nothing = torch.empty(0)
    return {name: layout.assemble(name, [part.get(name, nothing) for part in parts]) for name in names}


def _rounds(programs: Programs, share: Share) -> bool:
    """Whether the captured model turns float64 into something shorter, as Hugging Face's losses do."""
    if programs.capture_error is not None:
        return False
    for node in programs.captures.of_batch(share.batch, sum(share.sizes)).ops():
        if node.target is torch.ops.aten._to_copy.default:
            before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
            if before == torch.float64 and after.is_floating_point and after != torch.float64:
                return True
    return False


def _loaded(
    job: Job, plan: Plan, step: int, num_samples: int | None, programs: Programs
) -> list[LoadedStep] | None:
    order = job.order(num_samples)
    found: list[LoadedStep] = []
    for own in range(plan.data_ranks):
        with Loader(
            source=programs.captures.source, order=order, batch=job.batch, accumulate=job.accumulate, rank=own,
            ranks=plan.data_ranks, start_step=step, stop_step=step + 1, depth=1,
        ) as loader:  # fmt: skip
            loaded = next(iter(loader), None)
        if loaded is None:
            return None
        found.append(loaded)
    return [found[plan.data_coordinate(rank)] for rank in range(plan.mesh.size)]
