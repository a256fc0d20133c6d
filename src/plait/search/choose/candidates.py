"""Every way to run a job on some ranks that plait knows and that computes the same: what the search chooses from.

In: how many ranks, samples and units there are. Out: `Candidate`s: a plan with its micro-batch. Plans that relax what
is computed are not among them: `relaxed` lists those by name. Nothing is predicted here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeVar

from plait.errors import PlanError
from plait.plan.decisions import Memory, Pipe, Tensor
from plait.plan.mesh import Mesh
from plait.plan.named import NAMED
from plait.plan.plan import AXES, DATA, PIPE, TENSOR, Plan

_Tried = TypeVar("_Tried")
RECOMPUTE = ("none", "selective", "full")
"""What is tried for `memory.recompute`, from the fastest to the smallest."""
_STREAMED = (("optimizer:0.25",), ("optimizer:0.5",), ("optimizer:0.75",), ("optimizer",))
_ON_HOST = (("gradients:0.25",), ("gradients:0.5",), ("gradients:0.75",), ("gradients",))
OFFLOAD_STATE = (*_STREAMED, *_ON_HOST, ("optimizer", "gradients:0.5"))
"""What is tried for `memory.offload` where a plan does not fit without: state that is streamed through the device, and
what the host updates itself."""
_ACTIVATIONS = (("activations:0.5",), ("activations",))
_MORE = tuple((kind, *away) for kind in ("optimizer", "gradients") for away in _ACTIVATIONS)
OFFLOAD = (
    (_STREAMED, _ON_HOST, (("optimizer", "gradients:0.5"),), _ACTIVATIONS),
    (_MORE[:2], _MORE[2:]),
    ((("optimizer", "activations", "parameters"),), (("gradients", "activations", "parameters"),)),
)
"""The same where a step is compiled for each: more is tried only where less does not fit. Of each family, the least
that fits is a candidate."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1), ("gpipe", 1))
"""Schedules that are tried, with their stages a rank."""
_MOST_TENSOR = 8
"""Ranks of `tensor` that are tried where a host has one device."""
_MOST_SIZES = 8
"""Micro-batches that are tried for one mesh."""
_MOST_SCHEDULED = 16384
"""Micro-batches times stages of a schedule; longer ones are worth no more than the time to plan them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What bounds the choice."""

    ranks: int
    """Devices to use."""
    batch: int
    """Samples a step."""
    devices_per_host: int
    """Devices that share a host."""
    num_units: int
    """Units of the model, of which a stage has one at least."""
    micro_batches: int | None = None
    """Micro-batches a step where they decide what is computed (batch statistics); None: any number."""

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("batch", self.batch)):
            if value < 1:
                raise PlanError(f"a plan for {name}={value} was asked for.", fix=f"use {name} of 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan and how its batch is cut."""

    plan: Plan
    """How."""
    micro_batch: int
    """Samples that one rank of `data` computes at once."""
    num_micro_batches: int
    """Of a step."""

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.num_micro_batches * self.micro_batch * self.plan.data_ranks

    @property
    def family(self) -> tuple[object, ...]:
        """What one row of a ranking stands for: candidates that differ in batch sizes and recompute share it."""
        plan = self.plan
        away = plan.memory.offload != "none"
        return (plan.mesh, plan.memory.zero, plan.pipe.schedule, plan.pipe.per_rank, away)

    def with_offload(self, offload: tuple[str, ...]) -> "Candidate":
        """The same with something on the host."""
        memory = replace(self.plan.memory, offload=offload)
        return replace(self, plan=replace(self.plan, memory=memory))


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A mesh that cannot be used at all."""

    mesh: Mesh
    """Its ranks."""
    reason: str
    """Why."""


def meshes(space: Space) -> tuple[list[Mesh], list[Misfit]]:
    """All meshes of data, tensor and pipe with that many ranks, and those that the batch or the model rules out."""
    widest = space.devices_per_host if space.devices_per_host > 1 else _MOST_TENSOR
    found, misfits = [], []
    for tensor in divisors(space.ranks):
        if tensor > widest:
            continue
        for pipe in divisors(space.ranks // tensor):
            data = space.ranks // (tensor * pipe)
            mesh = mesh_of(data=data, tensor=tensor, pipe=pipe)
            reason = _misfit(space, data, pipe)
            if reason is None:
                found.append(mesh)
            elif pipe <= space.num_units:
                misfits.append(Misfit(mesh=mesh, reason=reason))
    return found, misfits


def _misfit(space: Space, data: int, pipe: int) -> str | None:
    if pipe > space.num_units:
        return f"{space.num_units} units of the model for pipe={pipe} stages"
    if space.batch % data:
        return f"batch {space.batch} does not divide over data={data}"
    if space.micro_batches is not None and (space.batch // data) % space.micro_batches:
        return f"{space.batch // data} samples a rank do not divide into {space.micro_batches} micro-batches"
    return None


def candidates_on(mesh: Mesh, space: Space, sequences: Sequence[bool] = (False, True)) -> Iterator[Candidate]:
    """Every plan on a mesh; `sequences`: what is tried for `tensor.sequence` where there is such an axis."""
    data, tensor, pipe = (mesh.size_of(axis) for axis in (DATA, TENSOR, PIPE))
    zeros = (0,) if data == 1 else (0, 1) if pipe > 1 else (0, 1, 2, 3)
    sequences = sequences if tensor > 1 else (False,)
    for size, (schedule, per_rank) in product(
        micro_batch_sizes(space.batch // data, space.micro_batches), schedules(pipe, space)
    ):
        count = space.batch // data // size
        if pipe > 1 and (count == 1 or count * pipe * per_rank > max(_MOST_SCHEDULED, 2 * pipe * pipe)):
            continue
        for zero, recompute, sequence in product(zeros, RECOMPUTE, sequences):
            plan = Plan(
                name=_name(data, tensor, pipe, zero, schedule),
                mesh=mesh,
                memory=Memory(zero=zero, recompute=recompute),
                tensor=Tensor(sequence=sequence),
                pipe=Pipe(schedule=schedule, per_rank=per_rank) if pipe > 1 else Pipe(),
            )
            yield Candidate(plan=plan, micro_batch=size, num_micro_batches=count)


def schedules(pipe: int, space: Space) -> Sequence[tuple[str, int]]:
    """Schedules for so many ranks of `pipe`, with their stages a rank."""
    if pipe == 1:
        return SCHEDULES[:1]
    return [entry for entry in SCHEDULES if pipe * entry[1] <= space.num_units]


def micro_batch_sizes(share: int, fixed: int | None) -> list[int]:
    """Samples of a micro-batch of a rank that has `share` a step: divisors, the smallest ones and the whole."""
    if fixed is not None:
        return [share // fixed]
    found = divisors(share)
    powers = [size for size in found if size & (size - 1) == 0 or size == share]
    chosen = powers if len(powers) > 1 else found
    return chosen[:_MOST_SIZES]


def divisors(number: int) -> list[int]:
    """All that divide a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def mesh_of(*, data: int, tensor: int, pipe: int) -> Mesh:
    """The mesh with these ranks; axes of one rank are left out, but for `data`."""
    sizes = {PIPE: pipe, DATA: data, TENSOR: tensor}
    axes = tuple((axis, sizes[axis]) for axis in AXES if axis in sizes and (sizes[axis] > 1 or axis == DATA))
    assert prod(size for _, size in axes) == data * tensor * pipe
    return Mesh(axes=axes)


def _name(data: int, tensor: int, pipe: int, zero: int, schedule: str) -> str:
    """The named plan that a file of this one starts from."""
    if pipe > 1:
        return schedule
    if tensor > 1:
        return "megatron"
    if data > 1:
        return f"zero{zero}" if zero else "ddp"
    return "single"


def relaxed() -> dict[str, str]:
    """Named plans that change what is computed, each in a sentence."""
    found = {}
    for name, function in NAMED.items():
        plan = function(1)
        if plan.pipe.asynchronous or plan.agreement.alone:
            found[name] = (function.__doc__ or "").strip().splitlines()[0]
    return found


def cheapest_offload(
    plan: Plan,
    tried: Callable[[Plan], _Tried],
    fits: Callable[[_Tried], bool],
    cost: Callable[[_Tried], float],
) -> _Tried:
    """What `memory.offload=auto` takes: nothing on the host where that fits; else, of the least that fits of each
    kind, the cheapest. Where nothing fits: what was tried last, with the most on the host."""
    kept = 0 < plan.memory.zero < 3 and plan.data_ranks > 1  # every rank computes with all parameters
    found = tried(replace(plan, memory=replace(plan.memory, offload="none")))
    if fits(found):
        return found
    for families in OFFLOAD:
        fitting = []
        for family in families:
            for entries in family:
                if kept and "parameters" in entries:
                    continue
                found = tried(replace(plan, memory=replace(plan.memory, offload=entries)))
                if fits(found):
                    fitting.append(found)
                    break
        if fitting:
            return min(fitting, key=cost)
    return found
