"""What the search asks about candidates: bounds that cost little, and predictions by sketch.

In: a subject, a cluster, the memory that a device may use. Out: numbers. Costs of the model are read once for every
width of the `tensor` axis, when somebody asks.
"""

from collections.abc import Iterator
from dataclasses import replace

from plait.cluster.cluster import Cluster
from plait.plan.named import NAMED
from plait.plan.plan import PIPE, TENSOR, Plan
from plait.search.choose.candidates import Candidate
from plait.search.choose.subject import Subject
from plait.search.predict.memory_rule import state_held
from plait.search.predict.model_costs import CollectiveCost, ModelCosts
from plait.search.predict.prediction import Prediction
from plait.search.predict.relaxed import relaxed_prediction
from plait.search.predict.sketch import Sketcher


class SketchOracle:
    """Knows one subject on one cluster."""

    def __init__(self, subject: Subject, cluster: Cluster, limit_bytes: float) -> None:
        self.subject, self.cluster, self.limit_bytes = subject, cluster, limit_bytes
        self._sketchers: dict[tuple[int, bool], Sketcher] = {}
        self._costs: dict[tuple[int, bool], ModelCosts] = {}

    def sketcher(self, plan: Plan) -> Sketcher:
        """Of the plan's width and treatment of the sequence; raises `PlanError` where that width cannot be used."""
        key = (plan.mesh.size_of(TENSOR), plan.tensor.sequence)
        if key not in self._sketchers:
            self._sketchers[key] = Sketcher(self._costs_of(*key), self.cluster, self.subject.state)
        return self._sketchers[key]

    def sequences(self, tensor: int) -> tuple[bool, ...]:
        """What of `tensor.sequence` is worth trying; raises `PlanError` where that width cannot be used.

        A sum is as much to send as its two halves, so cutting the sequence only saves memory; but switches that add
        up do sums alone.
        """
        if tensor == 1:
            return (False,)
        cut = self._costs_of(tensor, True)
        steps = [step for unit in cut.units for step in unit.steps if isinstance(step, CollectiveCost)]
        if not any(step.kind == "reduce_scatter" for step in steps):
            self._costs[tensor, False] = cut
            return (False,)
        return (False, True) if self.cluster.host.in_network else (True,)

    def _costs_of(self, tensor: int, sequence: bool) -> ModelCosts:
        key = (tensor, sequence)
        if key not in self._costs:
            self._costs[key] = self.subject.costs(tensor=tensor, sequence=sequence)
        return self._costs[key]

    def on(self, cluster: Cluster, subject: Subject) -> "SketchOracle":
        """The same model on another cluster, or with another batch; what was read of it is kept, and shared."""
        other = SketchOracle(subject, cluster, self.limit_bytes)
        other._costs = self._costs
        return other

    def least_s(self, candidate: Candidate) -> float:
        """All micro-batches on the rank that has an equal part of the units, and the first one's way to it."""
        plan = candidate.plan
        sketcher = self.sketcher(plan)
        times = sketcher.times(candidate.micro_batch, str(plan.memory.recompute))
        repeats = [unit.repeat for unit in sketcher.costs.units]
        forward_s = sum(t.forward_s * n for t, n in zip(times, repeats, strict=True))
        total_s = forward_s + sum(t.backward_s * n for t, n in zip(times, repeats, strict=True))
        pipe = plan.mesh.size_of(PIPE)
        # A rank waits for one micro-batch on all others: forward and backward, or where weights' gradients fill gaps,
        # the forward alone; of a part of their units where they have several stages.
        waits_s = forward_s if plan.pipe.schedule == "zero-bubble" else total_s
        wait_s = waits_s / pipe * (pipe - 1) / plan.pipe.per_rank
        return candidate.num_micro_batches * total_s / pipe + wait_s

    def least_bytes(self, candidate: Candidate) -> float:
        """State and one micro-batch's activations, spread evenly over stages."""
        plan, pipe = candidate.plan, candidate.plan.mesh.size_of(PIPE)
        costs, state = self.sketcher(plan).costs, self.subject.state
        held = state_held(costs.parameters, plan, state, candidate.num_micro_batches)
        kept_state = (
            costs.parameters * state.parameter / plan.shards.parameters + held.gradients + held.optimizer
        )
        kept = sum(
            unit.kept[str(plan.memory.recompute)].at(candidate.micro_batch) * unit.repeat
            for unit in costs.units
        )
        return (kept_state + kept) / pipe + self.cluster.device.calibration.reserve_bytes

    def needs_bytes(self, candidate: Candidate) -> float:
        """Memory of the sketch of a candidate, without its times."""
        return (
            self.sketcher(candidate.plan)
            .memory(
                candidate.plan,
                micro_batch=candidate.micro_batch,
                batch=candidate.batch,
                limit_bytes=self.limit_bytes,
            )
            .total
        )

    def predict(self, candidate: Candidate) -> Prediction:
        """The sketch of a candidate."""
        return self.sketcher(candidate.plan).predict(
            candidate.plan,
            micro_batch=candidate.micro_batch,
            batch=candidate.batch,
            limit_bytes=self.limit_bytes,
        )

    def relaxed(self) -> tuple[Prediction, ...]:
        """Plans whose workers do not sum gradients, on all devices; servers count among them."""
        found, ranks = [], self.cluster.size
        on_host = self.cluster.hosts == 1 and self.cluster.device.name.startswith("cpu")
        names = [name for name, make in NAMED.items() if not make(1).agreement.sums]
        for plan in [NAMED[name](ranks) for name in names]:
            if plan.ranks > ranks:  # no device is left for a worker
                continue
            if plan.agreement.weights != "shared" or on_host:  # one memory, that of a host
                sketcher, batch = self.sketcher(plan), self.subject.job.batch
                found.append(relaxed_prediction(sketcher, plan, batch=batch, limit_bytes=self.limit_bytes))
        return tuple(found)

    def with_cut(self, prediction: Prediction) -> Prediction:
        """The prediction with the modules with which its plan's stages begin, where all of them have names."""
        plan = prediction.plan
        if plan.mesh.size_of(PIPE) == 1 or plan.pipe.cut:
            return prediction
        sketcher = self.sketcher(plan)
        starts = sketcher.starts(
            plan,
            micro_batch=prediction.micro_batch,
            batch=prediction.batch,
            limit_bytes=self.limit_bytes,
        )
        names = list(unit_names(sketcher.costs))
        cut = tuple(names[start] for start in starts)
        if not all(name and names.count(name) == 1 for name in cut):
            return prediction
        return replace(prediction, plan=replace(plan, pipe=replace(plan.pipe, cut=cut)))


def unit_names(costs: ModelCosts) -> Iterator[str]:
    """The module of every unit, repeated ones counted one by one."""
    for unit in costs.units:
        stem, _, last = unit.name.rpartition(".")
        for number in range(unit.repeat):
            yield f"{stem}.{int(last) + number}" if unit.is_block and unit.repeat > 1 else unit.name
