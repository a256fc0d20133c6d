"""The decisions of a plan, one frozen group each, with what is allowed.

In: values from a person, a file or the search. Out: groups that hold only what is possible; every mistake is named with
its fix. Never looks at the model or at the other groups.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import PlanError
from plait.plan.checks import check_bool, check_choice, check_count, is_number
from plait.plan.offload import checked_offload
from plait.units import parse_bytes

Choice = Literal["megatron", "auto"]
SCHEDULE_NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "pipedream")
"""Orders in which the stages of a pipeline can work."""
Recompute = Literal["none", "selective", "full"]
Compression = Literal["none", "fp16", "bf16", "powersgd", "topk"]
Variant = Literal["round-robin", "sync", "async"]
Compile = Literal["auto", "on", "before", "off"]
Transport = Literal["auto", "shared", "sockets", "mpi", "nccl"]
Algorithm = Literal[
    "auto", "backend", "shared", "ring", "tree", "double-tree", "recursive-halving", "hierarchical"
]
COMPILE: tuple[str, ...] = get_args(Compile)
"""Whether segments are compiled."""
Rewrite = Literal["auto", "on", "off"]
REWRITE: tuple[str, ...] = get_args(Rewrite)
"""Whether captured graphs are rewritten."""
Layout = Literal["auto", "channels-last", "as-is"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
"""How the weights and inputs of convolutions lie in memory."""
Graphs = Literal["auto", "on", "off"]
GRAPHS: tuple[str, ...] = get_args(Graphs)
"""Whether segments are launched as CUDA graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """How gradients meet."""

    bucket_mib: float = 8.0
    """Gradients travel together in buckets of about this size; 0 sends each tensor on its own."""
    overlap: bool = True
    """Whether a bucket is sent while the backward goes on."""
    rule: str = "all-reduce"
    """How workers agree on weights, one of `AGREEMENTS`: `all-reduce`: every step, all gradients; the others are named
    plans."""
    servers: int = 0
    """Ranks that hold the weights and apply updates, beside the workers of the mesh."""
    staleness: int = 0
    """Of server-stale: how many steps a worker may be ahead of the slowest."""
    compress: Compression = "none"
    """How gradients travel in an all-reduce."""
    compress_rank: int = 4
    """Of powersgd: the rank of the approximation of each matrix."""
    compress_keep: float = 0.01
    """Of topk: the share of each bucket that is sent."""

    def __post_init__(self) -> None:
        if not is_number(self.bucket_mib) or self.bucket_mib < 0:
            raise PlanError(
                f"sync.bucket_mib={self.bucket_mib!r} is not a size.", fix="set it to 0 or more MiB."
            )
        check_bool("sync.overlap", self.overlap)
        check_choice("sync.compress", self.compress, get_args(Compression))
        check_count("sync.servers", self.servers, 0)
        check_count("sync.staleness", self.staleness, 0)
        check_count("sync.compress_rank", self.compress_rank, 1)
        if not is_number(self.compress_keep) or not 0 < self.compress_keep <= 1:
            raise PlanError(
                f"sync.compress_keep={self.compress_keep!r} is no share.",
                fix="set it to more than 0, at most 1.",
            )
        if self.compress != "none" and self.rule != "all-reduce":
            raise PlanError(
                f"sync.compress={self.compress} is about sums of gradients; {self.rule} makes none.",
                fix="drop it, or use the plan ddp.",
            )
        if self.staleness and self.rule != "server-stale":
            raise PlanError(
                f"sync.staleness={self.staleness} says nothing about {self.rule}.",
                fix="drop it, or use the plan server-stale.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """How the weights of easgd's workers and their center pull at each other."""

    rho: float = 0.5
    """How strongly: a worker moves by the learning rate times rho times its distance from the center."""
    tau: int = 4
    """Steps of a worker between two exchanges with the center."""
    variant: Variant = "async"
    """`round-robin`: one worker at a time, in turn; `sync`: all at once; `async`: each when it gets there."""
    momentum: float = 0.0
    """Nesterov momentum of the workers' own steps; 0: none."""

    def __post_init__(self) -> None:
        if not is_number(self.rho) or self.rho <= 0:
            raise PlanError(
                f"elastic.rho={self.rho!r} does not pull workers together.", fix="set it to more than 0."
            )
        check_count("elastic.tau", self.tau, 1)
        check_choice("elastic.variant", self.variant, get_args(Variant))
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise PlanError(
                f"elastic.momentum={self.momentum!r} is no momentum.", fix="set it to 0 or more, below 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """How the weights of workers that train on their own are averaged."""

    every: int | Literal["epoch"] = 10
    """Steps between two averages; `epoch`: at the end of each."""
    warmup: int = 0
    """Of local-sgd: steps at the start after each of which weights are averaged."""
    outer_lr: float = 0.7
    """Of diloco: the learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Of diloco: its Nesterov momentum."""
    fragments: int = 1
    """Of diloco: parts of the model that are averaged in turn, each every `every` steps."""

    def __post_init__(self) -> None:
        if self.every != "epoch":
            check_count("average.every", self.every, 1)
        check_count("average.warmup", self.warmup, 0)
        check_count("average.fragments", self.fragments, 1)
        turns = 1 if self.every == "epoch" else self.every
        if self.fragments > turns:
            raise PlanError(
                f"average.fragments={self.fragments} do not each get a turn with average.every={self.every}.",
                fix=f"set it to {turns} or less.",
            )
        if not is_number(self.outer_lr) or self.outer_lr <= 0:
            raise PlanError(
                f"average.outer_lr={self.outer_lr!r} is no learning rate.", fix="set it to more than 0."
            )
        if not is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise PlanError(
                f"average.outer_momentum={self.outer_momentum!r} is no momentum.",
                fix="set it to 0 or more, below 1.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hogwild:
    """What workers share that write to one model."""

    shared_state: bool = False
    """Whether they also share the optimizer's state; else each has its own."""

    def __post_init__(self) -> None:
        check_bool("hogwild.shared_state", self.shared_state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What is kept whole on every rank of `data`, and what is kept for the backward."""

    zero: int = 0
    """0: all whole; 1: optimizer state sharded; 2: gradients too; 3: parameters too."""
    limit: str | None = None
    """Memory of a rank that the choice of placements may use, such as 70GiB; None: what megatron needs."""
    recompute: str | tuple[str, ...] = "none"
    """What the backward computes again instead of keeping it: `none`; `selective`: what is cheap; `full`: all but the
    inputs of the model's repeated blocks; or the modules, with `*`, of which only the inputs are kept."""
    offload: str | tuple[str, ...] = "none"
    """What lies in the host's memory while nobody needs it: `none`; some of `optimizer`, `gradients`, `parameters`,
    `activations`, each maybe with the share that does (`optimizer:0.5`); `auto`: the least with which the plan fits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", checked_offload(self.offload))
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise PlanError(f"memory.zero={self.zero!r} is no stage.", fix="set it to 0, 1, 2 or 3.")
        if self.limit is not None:
            try:
                parse_bytes(str(self.limit))
            except ValueError as error:
                raise PlanError(
                    f"memory.limit={self.limit!r} is not a size.", fix="write it like 70GiB."
                ) from error
        if isinstance(self.recompute, str):
            if self.recompute not in get_args(Recompute):
                raise PlanError(
                    f"memory.recompute={self.recompute!r} is unknown.",
                    fix="use none, selective, full, or a list of modules such as [h.*.mlp].",
                )
            return
        names = self.recompute if isinstance(self.recompute, (list, tuple)) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise PlanError(
                f"memory.recompute={self.recompute!r} is no list of modules.",
                fix="use none, selective, full, or a list of modules such as [h.*.mlp].",
            )
        object.__setattr__(self, "recompute", tuple(names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """How weights are cut on the `tensor` axis."""

    choice: Choice = "megatron"
    """`megatron`: by pattern; `auto`: by exact minimization of communication."""
    sequence: bool = False
    """Whether norms and dropout between the blocks run on pieces of the sequence."""
    seconds: float = 20.0
    """Limit of the minimization, for a usual processor; it is counted in what is looked at, so that every rank ends
    with the same, however busy its host is."""

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise PlanError(f"tensor.choice={self.choice!r} is unknown.", fix="use megatron or auto.")
        check_bool("tensor.sequence", self.sequence)
        if not is_number(self.seconds) or self.seconds <= 0:
            raise PlanError(f"tensor.seconds={self.seconds!r} is no time.", fix="set it to more than 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """How samples are cut on the `domain` axis."""

    dim: int | None = None
    """The dim of the batch's tensors; None: the rows of images (2), the positions of sequences (1)."""

    def __post_init__(self) -> None:
        if self.dim is not None and (
            not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1
        ):
            raise PlanError(
                f"domain.dim={self.dim!r} is no dim beside the samples'.", fix="set it to 1 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """How ranks reach each other."""

    transport: Transport = "auto"
    """`auto`: shared memory between processes of one host, NCCL where every rank has a GPU; or one of them by name.
    `mpi`: by mpi4py, under mpirun with a task a rank. `nccl` also with ranks that share a GPU, over NCCL's sockets:
    slow, to try what runs on many."""
    algorithm: Algorithm = "backend"
    """How sums and gathers are made: `backend` or `shared`: as the transport does it; `ring`, `tree`, `double-tree`,
    `recursive-halving`, `hierarchical`: as messages between ranks, hop by hop; `auto`: each as is cheapest by cost."""
    groups: int = 1
    """Groups of the same ranks over which collectives are spread in turn, so that several are under way at once."""

    def __post_init__(self) -> None:
        check_choice("links.transport", self.transport, get_args(Transport))
        check_choice("links.algorithm", self.algorithm, get_args(Algorithm))
        check_count("links.groups", self.groups, 1)
        if self.transport == "mpi" and (self.by_hops or self.groups > 1):
            raise PlanError(
                "links.transport=mpi makes collectives as MPI does, in one group.",
                fix="leave out links.algorithm and links.groups, or set links.transport=auto.",
            )
        if self.algorithm == "shared" and self.transport not in ("auto", "shared"):
            raise PlanError(
                f"links.algorithm=shared needs memory that ranks share, not links.transport={self.transport}.",
                fix="set links.transport=shared, or another algorithm.",
            )

    @property
    def by_hops(self) -> bool:
        """Whether collectives are made of messages of our own."""
        return self.algorithm not in ("backend", "shared")

    @property
    def lanes(self) -> int:
        """On how many lanes collectives are made, one after the other on each; 0: they do not wait for each other."""
        return self.groups if self.by_hops or self.groups > 1 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipe:
    """How the model is cut over the `pipe` axis, and in which order its stages work."""

    schedule: str = "1f1b"
    """One of `SCHEDULE_NAMES`."""
    per_rank: int = 1
    """Stages a rank."""
    cut: tuple[str, ...] = ()
    """The modules with which the second and later stages begin; empty: cut by cost."""
    vertical_sync: bool = False
    """Of pipedream: whether a micro-batch sees weights of the same number of updates on all stages."""

    @property
    def asynchronous(self) -> bool:
        """Whether every micro-batch is an update of its own."""
        return self.schedule == "pipedream"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULE_NAMES:
            raise PlanError(
                f"pipe.schedule={self.schedule!r} is unknown.", fix=f"use one of {', '.join(SCHEDULE_NAMES)}."
            )
        if not isinstance(self.per_rank, int) or isinstance(self.per_rank, bool) or self.per_rank < 1:
            raise PlanError(
                f"pipe.per_rank={self.per_rank!r} is no number of stages.", fix="set it to 1 or more."
            )
        if isinstance(self.cut, str) or not all(isinstance(name, str) for name in self.cut):
            raise PlanError(f"pipe.cut={self.cut!r} is no list of modules.", fix="write it like [h.4, h.8].")
        object.__setattr__(self, "cut", tuple(self.cut))
        check_bool("pipe.vertical_sync", self.vertical_sync)
        if self.vertical_sync and not self.asynchronous:
            raise PlanError(
                f"pipe.vertical_sync says nothing about schedule {self.schedule}, whose stages all update at the end.",
                fix="drop it, or use the plan pipedream.",
            )
