"""A quick prediction: units of a model on clocks, without compiling a program.

In: `ModelCosts`, a plan with its micro-batch, a cluster. Out: a `Prediction`, in about a millisecond. It stands on the
same costs of ops, collectives and memory as the simulation of a compiled program; what it leaves out is what is inside
of a unit. Pipelines run the lists of `program/schedules`, so bubbles come from the schedule; data parallelism runs on a
second lane beside the units, so what is exposed comes from the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from plait.cluster.cluster import Cluster
from plait.errors import PlanError
from plait.plan.plan import DATA, DOMAIN, PIPE, TENSOR, Plan
from plait.program.cost.collective_time import CollectiveSeconds, collective_seconds, message_seconds
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Action, peak_in_flight
from plait.search.predict.between import Row, best_cut
from plait.search.predict.memory_rule import Held, StateBytes, memory_use, state_held
from plait.search.predict.model_costs import ModelCosts, UnitCosts
from plait.search.predict.prediction import MemoryUse, Prediction
from plait.search.predict.sketch_clock import Course, Overlap, course, course_times, overlapped
from plait.search.predict.unit_times import UnitTimes, unit_times


@dataclass(slots=True)
class Sketcher:
    """Predicts plans that share costs and a cluster; times of units are computed once for each micro-batch."""

    costs: ModelCosts
    cluster: Cluster
    state: StateBytes = field(default_factory=StateBytes)
    collective: CollectiveSeconds = collective_seconds
    _times: dict[tuple[float, str], tuple[UnitTimes, ...]] = field(default_factory=dict)

    def predict(
        self, plan: Plan, *, micro_batch: int, batch: int, starts: Sequence[int] | None = None,
        limit_bytes: float | None = None,
    ) -> Prediction:  # fmt: skip
        """One step of `batch` samples; `starts`: the first unit of the second and later stages."""
        if plan.mesh.size_of(TENSOR) != self.costs.tensor or plan.mesh.size_of(DOMAIN) > 1:
            raise PlanError(
                f"the costs are of tensor={self.costs.tensor}; the plan has tensor={plan.mesh.size_of(TENSOR)}"
                f" and domain={plan.mesh.size_of(DOMAIN)}.",
                fix="read the costs for the plan's tensor axis; domain is predicted by `plait predict`.",
            )
        return _Step(self, plan, micro_batch, batch, starts, limit_bytes).predict()

    def memory(
        self, plan: Plan, *, micro_batch: int, batch: int, limit_bytes: float | None = None
    ) -> MemoryUse:
        """The memory of a prediction alone, which needs no clocks."""
        return _Step(self, plan, micro_batch, batch, None, limit_bytes).memory()

    def starts(
        self, plan: Plan, *, micro_batch: int, batch: int, limit_bytes: float | None = None
    ) -> list[int]:
        """The first unit of the second and later stages, as `predict` cuts the model."""
        return _Step(self, plan, micro_batch, batch, None, limit_bytes).starts[1:]

    def times(self, samples: float, setting: str) -> tuple[UnitTimes, ...]:
        """Of each unit."""
        key = (samples, setting)
        if key not in self._times:
            reach = self.cluster.link_of(1, self.costs.tensor)
            self._times[key] = tuple(
                unit_times(unit, samples, setting, self.cluster.device, reach, self.collective)
                for unit in self.costs.units
            )
        return self._times[key]


@lru_cache(maxsize=256)
def course_of(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> Course:
    """A schedule in the order of its clocks; many plans share one."""
    return course(SCHEDULES[schedule](ranks, per_rank, micro_batches), ranks * per_rank)


@lru_cache(maxsize=4096)
def in_flight_of(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that each rank keeps at once, counted by stage.

    But for gpipe's, no schedule keeps more than it does with four micro-batches a rank, and few are quickly counted.
    """
    few = micro_batches if schedule == "gpipe" else min(micro_batches, 4 * ranks)
    return tuple(peak_in_flight(SCHEDULES[schedule](ranks, per_rank, few)))


class _Step:
    """One plan."""

    def __init__(
        self, sketcher: Sketcher, plan: Plan, micro_batch: int, batch: int, starts: Sequence[int] | None,
        limit_bytes: float | None,
    ) -> None:  # fmt: skip
        self.sketcher, self.plan, self.samples, self.batch = sketcher, plan, micro_batch, batch
        self.cluster, self.costs, self.state = sketcher.cluster, sketcher.costs, sketcher.state
        self.device = self.cluster.device
        self.limit = self.device.memory_bytes if limit_bytes is None else limit_bytes
        self.data, self.pipe = plan.data_ranks, plan.mesh.size_of(PIPE)
        self.per_rank = plan.pipe.per_rank if self.pipe > 1 else 1
        self.num_micro = max(1, ceil(batch / (self.data * micro_batch)))
        self.setting = plan.memory.recompute if isinstance(plan.memory.recompute, str) else "full"
        times = sketcher.times(micro_batch, self.setting)
        self.units: list[UnitCosts] = []
        self.times: list[UnitTimes] = []
        for unit, taken in zip(self.costs.units, times, strict=True):
            self.units += [unit] * unit.repeat
            self.times += [taken] * unit.repeat
        self.reach = self.cluster.link_of(self.costs.tensor, self.data)
        name = "1f1b" if plan.pipe.asynchronous else plan.pipe.schedule
        self.schedule = (name, self.pipe, self.per_rank, self.num_micro)
        self.in_flight = in_flight_of(*self.schedule) if self.pipe > 1 else (1,)
        self.starts = self._starts(starts)
        ends = [*self.starts[1:], len(self.units)]
        self.stages = [range(start, end) for start, end in zip(self.starts, ends, strict=True)]

    def _starts(self, given: Sequence[int] | None) -> list[int]:
        stages = self.pipe * self.per_rank
        if stages == 1:
            return [0]
        if given is not None:
            return [0, *given]
        if stages > len(self.units):
            raise PlanError(
                f"{stages} stages of a model of {len(self.units)} units.", fix="use fewer ranks of pipe."
            )
        each = self.state.held(self.plan.shards)
        row = Row(
            seconds=tuple(t.forward_s + t.backward_s for t in self.times),
            state_bytes=tuple(unit.parameters * each for unit in self.units),
            kept_bytes=tuple(unit.kept[self.setting].at(self.samples) for unit in self.units),
        )
        flight = [self.in_flight[stage % self.pipe] / self.per_rank for stage in range(stages)]
        cut = best_cut(row, in_flight=flight, limit_bytes=self.limit, virtual=self.per_rank)
        if cut is None:  # nothing has room: the memory of the most even cut is what is told
            cut = best_cut(row, in_flight=flight, limit_bytes=float("inf"), virtual=self.per_rank)
        assert cut is not None
        return [0, *cut.starts]

    def predict(self) -> Prediction:
        """Times, bytes and memory."""
        compute_s, idle = self._compute()
        exposed_s = max(self._sync(rank) for rank in range(self.pipe))
        update_s = max(self._update(rank) for rank in range(self.pipe))
        inside_s = max(
            sum(self.times[u].exposed_s for u in self._units_of(rank)) for rank in range(self.pipe)
        )
        constants = self.device.calibration
        step_s = compute_s + exposed_s + update_s + constants.step_s
        step_s = max(self._with_copies(rank, step_s) for rank in range(self.pipe))
        flops = self.costs.flops
        return Prediction(
            plan=self.plan,
            cluster=self.cluster,
            batch=self.batch,
            micro_batch=self.samples,
            step_s=step_s,
            model_flops=(flops.per_sample * self.batch + flops.fixed * self.num_micro) * self.costs.tensor,
            bubble=idle * compute_s / step_s,
            exposed_s=exposed_s + inside_s * self.num_micro,
            sent_bytes=self._sent(),
            memory=self.memory(),
            limit_bytes=self.limit,
            peak_flops=self.device.rate(self.costs.dtype),
        )

    def _units_of(self, rank: int) -> list[int]:
        return [u for stage in range(rank, len(self.stages), self.pipe) for u in self.stages[stage]]

    def _elements(self, rank: int) -> float:
        """Of the parameters that a rank holds."""
        own = self._units_of(rank)
        shared = sum(self.units[u].shared for u in own) if self.pipe > 1 else 0.0
        return sum(self.units[u].parameters for u in own) + shared

    def _compute(self) -> tuple[float, float]:
        """All micro-batches of the slowest rank, and the idle share of all ranks."""
        adds_s = [self._traffic_s(self._elements(rank) * self.state.accumulate) for rank in range(self.pipe)]
        if self.pipe == 1:
            return self._micro_s() * self.num_micro + adds_s[0] * (self.num_micro - 1), 0.0
        parts: dict[str, list[float]] = {
            kind: [sum(getattr(self.times[u], f"{kind}_s") for u in stage) for stage in self.stages]
            for kind in ("forward", "input", "weight", "backward")
        }

        def seconds(action: Action) -> float:
            taken = parts[action.kind][action.stage]
            adds = action.kind in ("backward", "weight") and action.micro_batch > 0
            return taken + (adds_s[action.stage % self.pipe] / self.per_rank if adds else 0.0)

        found = course_times(course_of(*self.schedule), seconds, self._message_s())
        return found.step_s, found.bubble

    def _micro_s(self) -> float:
        """Forward and backward of a micro-batch, with what ZeRO gathers and reduces in each."""
        forward_s = sum(t.forward_s for t in self.times)
        backward_s = sum(t.backward_s for t in self.times)
        if self.plan.memory.zero < 2 or self.data == 1:
            return forward_s + backward_s
        gathers = self.plan.memory.zero == 3
        gather_s = [
            self._moved_s("all_gather", u, self.state.gathered) if gathers else 0.0 for u in self._all()
        ]
        reduce_s = [self._moved_s("reduce_scatter", u, self.state.reduced) for u in self._all()]
        forward = [Overlap(compute_s=self.times[u].forward_s, before_s=gather_s[u]) for u in self._all()]
        backward = [
            Overlap(compute_s=self.times[u].backward_s, before_s=gather_s[u], after_s=reduce_s[u])
            for u in reversed(self._all())
        ]
        return overlapped([*forward, *backward])[1]

    def _all(self) -> range:
        return range(len(self.units))

    def _moved_s(self, kind: str, unit: int, width: float) -> float:
        return self.sketcher.collective(kind, self.units[unit].parameters * width, self.reach, self.device)

    def _traffic_s(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bandwidth * self.device.calibration.memory_share)

    def _message_s(self) -> float:
        reach = self.cluster.link_of(self.costs.tensor * self.data, 2)
        sizes = [self.units[stage[0] - 1].leaves.at(self.samples) for stage in self.stages[1:]]
        return message_seconds(max(sizes), reach.outer if reach.hosts > 1 else reach.inner, self.device)

    def _sync(self, rank: int) -> float:
        """What gradients (and parameters after the update) add to a step, beyond the last backward."""
        zero = self.plan.memory.zero
        if self.data == 1 or zero >= 2:
            return 0.0
        kind = "reduce_scatter" if zero else "all_reduce"
        own = self._units_of(rank)
        walked = [
            Overlap(compute_s=self.times[u].backward_s, after_s=self._moved_s(kind, u, self.state.reduced))
            for u in reversed(own)
        ]
        if self.plan.sync.overlap:
            compute_s, end_s = overlapped(walked)
            late_s = end_s - compute_s
        else:
            late_s = sum(unit.after_s for unit in walked)
        gather_s = 0.0
        if zero:
            whole = self._elements(rank) * self.state.gathered
            gather_s = self.sketcher.collective("all_gather", whole, self.reach, self.device)
        return late_s + gather_s

    def _update(self, rank: int) -> float:
        return self._traffic_s(self._elements(rank) * self.state.update / self.plan.shards.optimizer)

    def _with_copies(self, rank: int, step_s: float) -> float:
        """With what goes to the host and comes back, and what the host updates: beside it; where updates are late,
        state moves and the host updates after it."""
        held = state_held(self._elements(rank), self.plan, self.state, self.num_micro)
        device = self.device
        if not device.host_bandwidth:
            return step_s + self._traffic_s(4 * held.moved + 2 * (held.out + held.back))
        bus = device.host_bandwidth * (device.duplex if held.moved else 1.0)
        host_s = held.updated * self.state.update / device.processor_bandwidth
        if self.state.update_is_late:
            beside_s = max(step_s, (held.out + held.back) / device.host_bandwidth)
            return beside_s + max(held.moved / bus, host_s)
        return max(step_s, (held.moved + max(held.out, held.back)) / bus, host_s)

    def _sent(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by axis."""
        found: dict[str, float] = {}
        busiest = max(range(self.pipe), key=self._elements)
        if self.costs.tensor > 1:
            sent = max(sum(self.times[u].sent_bytes for u in self._units_of(r)) for r in range(self.pipe))
            found[TENSOR] = sent * self.num_micro
        if self.data > 1:
            part, elements, zero = (self.data - 1) / self.data, self._elements(busiest), self.plan.memory.zero
            width = {0: 2 * self.state.reduced, 1: self.state.reduced + self.state.gathered}.get(zero)
            if width is None:
                gathers = 2 if zero == 3 else 0
                width = (self.state.reduced + gathers * self.state.gathered) * self.num_micro
                width += self.state.gathered if zero == 2 else 0.0
            found[DATA] = elements * part * width
        if self.pipe > 1:
            sizes = [self.units[stage[0] - 1].leaves.at(self.samples) for stage in self.stages[1:]]
            found[PIPE] = 2 * max(sizes) * self.num_micro * self.per_rank
        return found

    def memory(self) -> MemoryUse:
        """Of the rank that needs most."""
        found = []
        for rank in range(self.pipe):
            own = self._units_of(rank)
            held = Held(
                units=[self.units[u] for u in own],
                in_flight=self.in_flight[rank] / self.per_rank if self.pipe > 1 else 1,
                elements=self._elements(rank),
                num_micro=self.num_micro,
            )
            found.append(memory_use(held, self.samples, self.plan, self.state, self.device))
        return max(found, key=lambda use: use.total)
