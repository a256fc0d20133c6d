"""Predict published cases.

In: cases. Out: for each an `Outcome`: what was predicted beside what was measured, or why nothing was. Models are
captured once for each shape and width, with one or two of their blocks; the constants are those of the device's type.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.errors import PlaitError
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.paper.job import paper_job
from plait.job.paper.shapes import Shape, TransformerShape
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, PIPE, TENSOR, Plan
from plait.program.cost.collective_time import collective_seconds
from plait.search.predict.model_costs import ModelCosts, with_blocks
from plait.search.predict.prediction import Prediction
from plait.search.predict.sketch import Sketcher
from plait.search.predict.unit_costs import CAPTURED, model_costs
from plait.search.published.case import Case
from plait.search.published.network import crowded_s, efa_seconds, is_efa
from plait.search.published.other_kinds import collective_rates, pipeline_bubbles
from plait.search.published.setup import Setup, UnclearError, setup_of
from plait.search.published.style import Style

_VARIANTS: Mapping[str, tuple[str, bool]] = {
    "baseline-no-recompute": ("none", False),
    "sequence-parallel": ("none", True),
    "baseline-full-recompute": ("full", False),
    "selective-recompute": ("selective", False),
    "selective+sequence": ("selective", True),
}
"""Of a `layer_time`: what is computed again, and whether the sequence is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One number, predicted and measured."""

    what: str
    """`step`, `memory`, `layer`, `bubble` or `bus`."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a case."""

    case: Case
    compared: tuple[Compared, ...] = ()
    """What was predicted and measured."""
    rejected: str | None = None
    """Why it cannot run, by prediction: mostly too little memory; None: it can."""
    flops_per_device: float | None = None
    """Of the model, in one step: what a naive guess divides by a constant rate."""
    skipped: str | None = None
    """Why nothing was predicted; None: something was."""
    notes: tuple[str, ...] = ()
    """What the case does not say and was filled in."""

    def of(self, what: str) -> Compared | None:
        """The comparison of one quantity."""
        return next((entry for entry in self.compared if entry.what == what), None)


Progress = Callable[[int, int], None]
"""(cases done, all cases)."""


def predict_cases(cases: Sequence[Case], progress: Progress = lambda done, total: None) -> list[Outcome]:
    """The outcome of every case, in order."""
    predictor = Predictor()
    setups: list[tuple[int, Setup]] = []
    found: dict[int, Outcome] = {}
    for index, case in enumerate(cases):
        outcome = _simple(case)
        if outcome is None:
            try:
                setups.append((index, setup_of(case)))
                continue
            except UnclearError as error:
                outcome = Outcome(case=case, skipped=str(error))
        found[index] = outcome
    # Cases of one shape come one after the other, so that one graph is held at a time.
    setups.sort(key=lambda entry: _order(entry[1]))
    for index, setup in setups:
        found[index] = predictor.outcome(cases[index], setup)
        progress(len(found), len(cases))
    return [found[index] for index in range(len(cases))]


def _simple(case: Case) -> Outcome | None:
    """Cases that need no model."""
    if case.kind == "hardware":
        return Outcome(case=case, skipped="a data sheet: nothing to predict")
    if case.kind in ("collective", "pipeline_schedule"):
        rates = collective_rates if case.kind == "collective" else pipeline_bubbles
        try:
            pairs = rates(case)
        except UnclearError as error:
            return Outcome(case=case, skipped=str(error))
        what = "bus" if case.kind == "collective" else "bubble"
        return Outcome(
            case=case,
            compared=tuple(Compared(what=what, predicted=p, measured=m) for p, m in pairs),
        )
    return None


def _order(setup: Setup) -> tuple[str, int]:
    tensor = setup.plan.mesh.size_of(TENSOR)
    return repr(_few_blocks(setup.shape, tensor)), tensor


def _few_blocks(shape: Shape, tensor: int) -> Shape:
    """With the blocks that must be captured: across `tensor` the first one also sums up what comes in."""
    return replace(shape, layers=1 if tensor == 1 else 2) if isinstance(shape, TransformerShape) else shape


class Predictor:
    """Holds the costs of models, and the graph of the last one."""

    def __init__(self) -> None:
        self._costs: dict[object, ModelCosts] = {}
        self._graph: tuple[Shape, Graph] | None = None

    def outcome(self, case: Case, setup: Setup) -> Outcome:
        """What comes of a case, whatever it holds."""
        try:
            return self._layer(case, setup) if case.kind == "layer_time" else self._run(case, setup)
        except UnclearError as error:
            return Outcome(case=case, skipped=str(error), notes=setup.notes)
        except PlaitError as error:
            if case.failed:  # what cannot be planned cannot run either
                return Outcome(case=case, rejected=error.what, flops_per_device=0.0, notes=setup.notes)
            return Outcome(case=case, skipped=error.what, notes=setup.notes)

    def costs(self, setup: Setup, *, sequence: bool) -> ModelCosts:
        """Of a rank, for the whole model."""
        tensor = setup.plan.mesh.size_of(TENSOR)
        few = _few_blocks(setup.shape, tensor)
        key = (few, tensor, sequence, setup.style)
        if key not in self._costs:
            self._costs[key] = self._read(few, tensor, setup.plan, setup.style, sequence)
        found = self._costs[key]
        return with_blocks(found, setup.shape.layers) if isinstance(setup.shape, TransformerShape) else found

    def _read(self, shape: Shape, tensor: int, plan: Plan, style: Style, sequence: bool) -> ModelCosts:
        if self._graph is None or self._graph[0] != shape:
            self._graph = (shape, Captures(paper_job(shape, batch=CAPTURED)).of_size(CAPTURED))
        narrow = replace(
            plan,
            mesh=Mesh(axes=((DATA, 1), (TENSOR, tensor))),
            tensor=replace(plan.tensor, sequence=sequence),
        )
        return model_costs(self._graph[1], narrow, style.reader())

    def predict(self, case: Case, setup: Setup) -> Prediction:
        """A training step with the fastest micro-batch that fits, of those that the case leaves open."""
        costs = self.costs(setup, sequence=setup.plan.tensor.sequence)
        efa = is_efa(case)
        sketcher = Sketcher(costs, setup.cluster, setup.state, efa_seconds if efa else collective_seconds)
        starts = stage_starts(setup, costs)
        found = [
            sketcher.predict(setup.plan, micro_batch=size, batch=setup.batch, starts=starts)
            for size in setup.micro_batches
        ]
        best = min(found, key=lambda prediction: (not prediction.fits, prediction.step_s))
        if efa:
            num_micro = -(-setup.batch // (setup.plan.data_ranks * best.micro_batch))
            return replace(best, step_s=best.step_s + num_micro * crowded_s(setup.cluster.hosts))
        return best

    def _run(self, case: Case, setup: Setup) -> Outcome:
        prediction = self.predict(case, setup)
        compared = []
        if case.step_s is not None:
            compared.append(Compared(what="step", predicted=prediction.step_s, measured=case.step_s))
        if case.memory_bytes is not None:
            # Allocators count what they gave out, not the context of the device beside it.
            used = prediction.memory.total - setup.cluster.device.calibration.reserve_bytes
            compared.append(Compared(what="memory", predicted=used, measured=case.memory_bytes))
        compared += self._parts(case, setup)
        if not compared and not case.failed:
            raise UnclearError(
                f"nothing that is predicted was measured: {', '.join(case.measured) or 'nothing'}"
            )
        return Outcome(
            case=case,
            compared=tuple(compared),
            rejected=prediction.reason,
            flops_per_device=prediction.model_flops / setup.plan.mesh.size,
            notes=setup.notes,
        )

    def _parts(self, case: Case, setup: Setup) -> list[Compared]:
        """Memory that a paper gives by kind."""
        measured, found = case.measured, []
        for name, recompute, sequence in (
            ("params_and_optimizer_gib", "none", False),
            ("activations_gib_no_recompute", "none", False),
            ("activations_gib_seqpar_selective", "selective", True),
        ):
            gib = measured.get(name)
            if not isinstance(gib, (int, float)) or gib <= 0:
                continue
            plan = replace(setup.plan, memory=replace(setup.plan.memory, recompute=recompute))
            sketcher = Sketcher(self.costs(setup, sequence=sequence), setup.cluster, setup.state)
            use = sketcher.predict(plan, micro_batch=setup.micro_batches[0], batch=setup.batch).memory
            state = use.parameters + use.gradients + use.optimizer
            predicted = state if name.startswith("params") else use.activations
            found.append(Compared(what="memory", predicted=predicted, measured=gib * 2**30))
        return found

    def _layer(self, case: Case, setup: Setup) -> Outcome:
        variant = str(case.plan.get("variant", ""))
        milliseconds = case.measured.get("combined_ms")
        if variant not in _VARIANTS or not isinstance(milliseconds, (int, float)) or milliseconds <= 0:
            raise UnclearError(f"variant {variant!r} or its combined_ms is not known")
        recompute, sequence = _VARIANTS[variant]
        costs = self.costs(setup, sequence=sequence)
        times = Sketcher(costs, setup.cluster, setup.state).times(setup.micro_batches[0], recompute)
        block = max(index for index, unit in enumerate(costs.units) if unit.is_block)
        seconds = times[block].forward_s + times[block].backward_s
        layer = Compared(what="layer", predicted=seconds, measured=milliseconds / 1e3)
        return Outcome(case=case, compared=(layer,), notes=setup.notes)


def stage_starts(setup: Setup, costs: ModelCosts) -> list[int] | None:
    """The first unit of the second and later stages as the system cuts models; None: by cost, as plait does.

    Megatron gives stages equal numbers of blocks. nanotron fills one stage after the other until it has its part of the
    weights that matrix products read, so the first stages are the fullest.
    """
    stages = setup.plan.mesh.size_of(PIPE) * setup.plan.pipe.per_rank
    order = [unit for unit in costs.units for _ in range(unit.repeat)]
    blocks = [index for index, unit in enumerate(order) if unit.is_block]
    if stages == 1 or setup.system not in ("megatron", "nanotron") or len(blocks) < stages:
        return None
    if setup.system == "megatron":
        return [blocks[round(len(blocks) * stage / stages)] for stage in range(1, stages)]
    weights = [
        unit.parameters + unit.shared if index >= blocks[0] else 0.0 for index, unit in enumerate(order)
    ]
    starts: list[int] = []
    filled = 0.0
    for index, weight in enumerate(weights):
        wanted = sum(weights) / stages * (len(starts) + 1)
        left = len(order) - index
        if len(starts) < stages - 1 and (filled >= wanted or left <= stages - 1 - len(starts)):
            starts.append(index)
        filled += weight
    return starts
