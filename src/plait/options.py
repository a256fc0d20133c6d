"""Options that belong together, as values that Python and the command line share.

A field `checkpoint_every` of `Saving` is `plait.train(..., saving=Saving(checkpoint_every=10))` in Python and
`plait run --checkpoint-every 10` on the command line, which reads names, types, defaults and help from here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from plait.errors import UsageError
from plait.units import parse_rate, parse_seconds

SYSTEMS = ("fsdp2", "megatron", "torchtitan", "deepspeed", "accelerate")
"""Other systems that a plan can be written for."""
Listener = Callable[[dict[str, Any]], None]
"""Is told of everything that a person may want to see while it goes on."""
Searching = Literal["grid", "random", "optuna", "asha"]
"""How the arguments of trials are chosen."""
Exported = Literal["safetensors", "state_dict", "huggingface", "onnx"]
"""What trained weights can be written as."""
OnBadLoss = Literal["stop", "back", "skip"]
"""What is done about a step whose loss is no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What is changed of the job and its plan."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    """Ranks along each axis: data=2,tensor=2."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Change the job (batch=128) or the plan (sync.bucket_mib=4)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """An argument of the job's function: lr=3e-4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What a run leaves in its folder beside plan and metrics."""

    checkpoint_every: int | None = None
    """Save a checkpoint every so many steps; one is saved at the end anyway."""
    keep: int = 2
    """Checkpoints to keep, the newest; what is deleted for a new one is told."""
    keep_best: str | None = None
    """Save after the best evaluation so far in this metric, and keep that checkpoint too: accuracy, min:perplexity."""
    log: str | None = None
    """Write metrics for other tools too, joined by commas: csv, tensorboard, wandb, mlflow."""
    checkpoint_timeout_s: float = field(default=120.0, metadata={"python_only": True})
    """Seconds that a checkpoint may take before it is given up, with a notice."""
    record_samples: bool = False
    """Write the sample ids of every step to samples.jsonl."""
    trace: bool = True
    """Record every instruction of every rank."""
    name: str = field(default="run", metadata={"python_only": True})
    """What the run folder is called where no folder is given: runs/NAME-TIME."""
    remembered: Mapping[str, Any] = field(default_factory=dict, metadata={"python_only": True})
    """More for environment.json: what resuming without a job needs to know."""

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(
                f"checkpoint_every={self.checkpoint_every} is not a number of steps.", fix="use 1 or more."
            )
        if self.keep < 1:
            raise UsageError(
                f"keep={self.keep} would delete the checkpoint just written.", fix="keep at least 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a run is refused, or given up."""

    memory: str | None = None
    """Refuse a plan that needs more of a device than this: 70GiB."""
    check: bool = True
    """Hold the captured step against the model's own code once, before the run."""
    hang_s: float = 300.0
    """Report a hang after so many seconds; sooner where a rank does nothing."""
    compare_every: int = 100
    """Compare the weights of ranks that hold the same every so many steps; 0: only before a checkpoint."""
    on_bad_loss: OnBadLoss = "stop"
    """At a loss that is no number: stop; go back to the last checkpoint; go back and leave the step out. Plans
    whose workers do not march in step can only stop."""
    detect_nan: bool = False
    """Look for NaN after every piece of a captured step, and name the line and the samples that made the first."""
    spike: float | None = None
    """Take a loss over so many times the median of the last 32 for a bad one, too."""
    elastic: str | None = None
    """Go on with the ranks that are left when some are lost, from the fewest to the most of them: 2:4."""
    trust_job: bool = False
    """Resume with the job that the folder names, even if changed or another's."""

    @property
    def elastic_ranks(self) -> tuple[int, int] | None:
        """The fewest and the most ranks of an elastic run."""
        if self.elastic is None:
            return None
        least, colon, most = self.elastic.partition(":")
        if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
            raise UsageError(
                f"elastic={self.elastic} is no range of ranks.", fix="write it like --elastic 2:4."
            )
        return int(least), int(most)

    def __post_init__(self) -> None:
        _ = self.elastic_ranks
        if not self.hang_s > 0:
            raise UsageError(f"hang_s={self.hang_s:g} is not a time.", fix="use some seconds.")
        if self.compare_every < 0:
            raise UsageError(
                f"compare_every={self.compare_every} is no number of steps.", fix="use 0 or more."
            )
        if self.on_bad_loss not in get_args(OnBadLoss):
            raise UsageError(f"on_bad_loss={self.on_bad_loss} is not known.", fix="use stop, back or skip.")
        if self.spike is not None and not self.spike > 1:
            raise UsageError(
                f"spike={self.spike:g} would take any loss for a bad one.", fix="use a factor over 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """A network between hosts that are none: ranks of one machine, whose messages are delayed."""

    bandwidth: float
    """Bytes per second of a host's wire, each way; the ranks of a host share it."""
    latency_s: float
    """Of a message between hosts, beside the time for its bytes."""
    hosts: int
    """Number of them."""
    per_host: int
    """Ranks of each, which are consecutive."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `bandwidth=1Gbit,latency=1ms,hosts=2x2`."""
        given = dict(entry.strip().partition("=")[::2] for entry in text.split(","))
        hosts = re.fullmatch("([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", given.get("hosts", ""))
        try:
            if set(given) != {"bandwidth", "latency", "hosts"} or hosts is None:
                raise ValueError(f"emulate={text!r} does not say bandwidth, latency and hosts")
            return cls(
                bandwidth=parse_rate(given["bandwidth"]),
                latency_s=parse_seconds(given["latency"]),
                hosts=int(hosts[1]),
                per_host=int(hosts[2]),
            )
        except ValueError as error:
            raise UsageError(
                f"{error}.", fix="write it like bandwidth=1Gbit,latency=1ms,hosts=2x2."
            ) from None

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    def host_of(self, rank: int) -> int:
        """The host that a rank is on."""
        return rank // self.per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What makes a run an experiment."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Make a rank take so many times as long to compute."""
    emulate: str | None = None
    """Delay messages as a network would: bandwidth=1Gbit,latency=1ms,hosts=2x2 (hosts x ranks of each)."""
    dtype: Literal["float32", "float64"] = field(default="float32", metadata={"python_only": True})
    """What the model is trained in; float64 is for comparing numbers."""
    record_gradients: bool = field(default=False, metadata={"python_only": True})
    """Write every step's gradients to the folder, for verification."""

    @property
    def emulation(self) -> Emulation | None:
        """The network that `emulate` describes."""
        return None if self.emulate is None else Emulation.parse(self.emulate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search for a plan may use, and what it is to find."""

    ranks: int | None = None
    """Devices to use; all of the cluster by default."""
    memory: str | None = None
    """Memory of a device that may be used: 70GiB."""
    price: float | None = None
    """Money for one device and hour."""
    top: int = 10
    """Plans to show."""
    seconds: float = 60.0
    """Time limit of the search."""
    plan: str | None = None
    """Rank the forms of this named plan alone."""

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UsageError(f"--ranks {self.ranks} is no number of devices.", fix="use 1 or more.")
        if self.top < 1 or not self.seconds > 0:
            raise UsageError(
                f"--top {self.top} --seconds {self.seconds:g} leaves nothing to show.", fix="use 1 or more."
            )
        if self.price is not None and self.price < 0:
            raise UsageError(
                f"--price {self.price:g} is negative.", fix="give the price of one device and hour."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tries:
    """Which arguments are tried, and how they are compared."""

    folds: int = 1
    """Train on all but one part of the data, for each of so many."""
    search: Searching = "grid"
    """How arguments are chosen; asha stops losers early."""
    trials: int = 20
    """How many; a grid has its own number."""
    metric: str = "loss"
    """What is compared: loss, accuracy, min:perplexity."""
    seed: int = 0
    """Of the folds and of random arguments."""
    parallel: int | None = None
    """Runs side by side; as many as fit by default."""

    def __post_init__(self) -> None:
        if self.search not in get_args(Searching):
            raise UsageError(
                f"--search {self.search} is not known.", fix=f"use one of {', '.join(get_args(Searching))}."
            )
        for name in ("folds", "trials", "parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value} leaves nothing to run.", fix="use 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """On other hosts."""

    engine: str | None = None
    """Have it started by torchrun, mpi, slurm, ray or spark; or shown for kubernetes."""
    hosts: int = 1
    """With --engine: hosts that share the ranks."""
    engine_set: Sequence[str] = ()
    """An option of the engine: time=1:00:00; or a .yaml file of them."""
