"""What is planned for: a job or a model on paper, with the little that the search must know of it.

In: a job, or a shape with a batch. Out: a `Subject`. The model is captured once, on fake tensors; equal blocks of a
deep one are captured a few times and counted as often as they are there.
"""

from dataclasses import dataclass, replace

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.job.paper.job import DEFAULT_BATCH, paper_job
from plait.job.paper.shapes import Shape, TransformerShape, read_shape
from plait.plan.decisions import Tensor
from plait.plan.plan import Plan
from plait.program.cost.op_time import op_name
from plait.program.cost.update import state_ratio
from plait.program.place.op_keys import find_blocks
from plait.search.choose.candidates import mesh_of
from plait.search.predict.memory_rule import StateBytes
from plait.search.predict.model_costs import ModelCosts, with_blocks
from plait.search.predict.shallow import shallow_job
from plait.search.predict.unit_costs import CAPTURED, model_costs

_BLOCKS = 2
"""Blocks with which a deep model is captured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A job as the search sees it."""

    name: str
    """What people call it."""
    job: Job
    """The job itself."""
    graph: Graph
    """One micro-step of `CAPTURED` samples, perhaps of fewer blocks."""
    num_blocks: int | None
    """Blocks of the whole model where the graph has fewer; None: the graph is whole."""
    micro_batches: int | None
    """Micro-batches a step where they decide what is computed; None: any number."""
    state: StateBytes
    """Bytes that the job's optimizer needs."""
    shape: TransformerShape | None
    """The model's numbers, where it is one on paper."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What a person should know about how the job was read."""
        found = []
        if self.num_blocks is not None:
            found.append(f"captured with {_BLOCKS} of its {self.num_blocks} equal blocks.")
        if self.micro_batches is not None:
            found.append(
                f"batch statistics depend on micro-batches: their number stays the job's, {self.micro_batches}."
            )
        return tuple(found)

    @property
    def blocks(self) -> str | None:
        """The path of the list of blocks; None where the model has none."""
        found = [name for name in find_blocks(self.graph) if name.rpartition(".")[2].isdigit()]
        return min(found, key=len).rpartition(".")[0] if found else None

    def costs(self, *, tensor: int, sequence: bool) -> ModelCosts:
        """What its units cost on a rank of so many along `tensor`."""
        plan = Plan(
            name="megatron",
            mesh=mesh_of(data=1, tensor=tensor, pipe=1),
            tensor=Tensor(sequence=sequence),
        )
        found = model_costs(self.graph, plan)
        return found if self.num_blocks is None else with_blocks(found, self.num_blocks)


def subject_of_paper(model: str | Shape, batch: int | None = None) -> Subject:
    """A model on paper, trained on `batch` samples a step."""
    shape = read_shape(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else shape.family
    job = paper_job(shape, batch=DEFAULT_BATCH if batch is None else batch)
    if not isinstance(shape, TransformerShape):
        return _subject(name, job, job, None, None)
    few = replace(shape, layers=min(shape.layers, _BLOCKS))
    deep = shape.layers if shape.layers > _BLOCKS else None
    return _subject(name, job, paper_job(few, batch=job.batch), deep, shape)


def subject_of_job(job: Job, name: str) -> Subject:
    """A user's job; raises `CaptureError` where its model cannot be captured."""
    shallow = shallow_job(job, _BLOCKS)
    if shallow is not None:
        found = _subject(name, job, shallow.job, shallow.num_blocks, None)
        if _runs_alike(found.graph, shallow.path):
            return found
    return _subject(name, job, job, None, None)


def _runs_alike(graph: Graph, path: str) -> bool:
    """Whether every block that was kept ran, each with as many forward ops, and there are no other blocks."""
    forward = [node.meta.get("module", "") for node in graph.ops() if node.meta["phase"] == "forward"]
    numbered = [name for name in find_blocks(graph) if name.rpartition(".")[2].isdigit()]
    ops = [sum(f"{at}.".startswith(f"{path}.{number}.") for at in forward) for number in range(_BLOCKS)]
    return all(name.startswith(f"{path}.") for name in numbered) and min(ops) > 0 and len(set(ops)) == 1


def _subject(
    name: str, job: Job, captured: Job, num_blocks: int | None, shape: TransformerShape | None
) -> Subject:
    graph = Captures(captured).of_size(CAPTURED)
    statistics = any("batch_norm" in op_name(node.target) for node in graph.ops())
    return Subject(
        name=name,
        job=job,
        graph=graph,
        num_blocks=num_blocks,
        micro_batches=job.accumulate if statistics else None,
        state=state_bytes(job, graph),
        shape=shape,
    )


def state_bytes(job: Job, graph: Graph) -> StateBytes:
    """What the job's optimizer keeps for each element of a parameter."""
    usual = StateBytes()
    each = usual.parameter * state_ratio(graph, job.build_optimizer)
    passes = 2 * usual.parameter + usual.gradient  # parameters and state are read and written, gradients read
    late = bool(job.norm_bound or job.clip_value) or job.precision == "fp16"
    return replace(usual, optimizer=each, update=passes + 2 * each, update_is_late=late)
