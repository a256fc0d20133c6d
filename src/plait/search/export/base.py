"""What an exporter gets and gives.

In: a plan with the batch that it was chosen for, and the little that other systems must know of the job. Out: the text
of a configuration file, with notes where the other system does something else. Nothing is run or imported from there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plait.job.paper.shapes import TransformerShape
from plait.plan.plan import DATA, PIPE, TENSOR, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A plan as another system must know it."""

    plan: Plan
    """The chosen plan."""
    batch: int
    """Samples a step."""
    micro_batch: int
    """Samples that one rank of `data` computes at once."""
    hosts: int
    """Machines."""
    precision: str
    """The job's: fp32 or bf16."""
    blocks: str | None = None
    """The path of the list of repeated blocks, such as `model.layers`; None: there is none."""
    shape: TransformerShape | None = None
    """The model's numbers, where it is one on paper."""

    @property
    def data(self) -> int:
        """Ranks along `data`."""
        return self.plan.mesh.size_of(DATA)

    @property
    def tensor(self) -> int:
        """Ranks along `tensor`."""
        return self.plan.mesh.size_of(TENSOR)

    @property
    def pipe(self) -> int:
        """Ranks along `pipe`."""
        return self.plan.mesh.size_of(PIPE)

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.batch // (self.data * self.micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A configuration."""

    text: str
    """The file."""
    notes: tuple[str, ...] = ()
    """Where the other system does not do quite the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """One system's configuration."""

    name: str
    """As `--export` takes it."""
    file_name: str
    """What the file is called by default."""
    refusal: Callable[[Setup], str | None]
    """Why the system cannot do this; None where it can."""
    write: Callable[[Setup], Exported]
    """The configuration of a setup that is not refused."""


def recompute_of(setup: Setup) -> str:
    """none, selective or full: a list of modules is nearest to full."""
    value = setup.plan.memory.recompute
    return value if isinstance(value, str) else "full"
