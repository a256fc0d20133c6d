"""The tensors that outlive a step on one rank: parameters, buffers, optimizer state.

In: a job, and where its parameters are held. Out: the user's own module and optimizer on this rank's device, and both
ways between them and a checkpoint, which always holds whole tensors under the user's names.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import CheckpointError
from plait.job.batch import Objects, map_objects
from plait.job.job import Job
from plait.job.model.copies import copy_of, in_dtype
from plait.job.model.dtypes import leaf_dtype, scalar_dtype
from plait.job.schedule import Schedule
from plait.job.updates.follow import TRAIN_LOSS
from plait.job.updates.optimizers import Optimizers
from plait.job.updates.patterns import as_patterns, first_of
from plait.job.updates.schedules import Schedules
from plait.program.value import Value
from plait.run.checkpoint.state import (
    TrainingState,
    check_same_options,
    collect_model,
    collect_optimizer,
    restore_model,
    restore_optimizer,
)
from plait.run.hold.averages import Averages
from plait.run.hold.away.host_memory import HostMemory
from plait.run.hold.holding import Holding, ShardFetcher
from plait.run.hold.loss_scale import LossScale
from plait.run.hold.on_demand import room_beside
from plait.run.hold.one_pass import OnePass
from plait.run.hold.optimizer_shards import own_optimizer, whole_optimizer
from plait.run.hold.user_module import UserModule
from plait.run.setup.agreement import digest_of
from plait.torch_private import pytree


class ModelState:
    """One rank's shard of what is trained: all of it, or what a `Holding` says."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        holding: Holding | None = None,
        *,
        channels_last: bool = False,
    ) -> None:
        job = in_float64(job) if dtype == torch.float64 else job
        self.job = job
        self.device = device
        self.narrow = False
        """Whether float64 data is given to the model as float32, which is all that it takes."""
        self.asked = dtype
        """float64 for verification, else float32: the dtypes that the user made."""
        self.holding = holding
        model = job.build_model()
        if model is job.model:  # the user's own instance stays as it was given
            model = copy_of(model)
        if dtype == torch.float64:
            model = in_dtype(model, dtype)
        self.dtype = scalar_dtype(model.parameters(), dtype)
        """Of totals, weights and tangents."""
        self._channels_last = channels_last and holding is None
        """Whether images and the weights of convolutions lie that way; flat groups of parameters have no strides."""
        self._copies: torch.cuda.Stream | None = None
        """Where batches come to a GPU, beside the step before."""
        if self._channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model: nn.Module = (model.to(device) if holding is None else model).train()
        self._digest = self._digest_of_model() if holding is not None else None
        """Of the whole model, where this rank is about to let go of it."""
        whole = dict(self.model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in whole.items()}
        self.parameters: dict[str, nn.Parameter] = whole
        self.optimizer = job.build_optimizer([(n, p) for n, p in whole.items() if p.requires_grad])
        self._groups: list[list[str]] = _names_of_groups(self.optimizer, whole)
        if holding is not None:
            self.parameters = holding.adopt(whole)
            holding.point(self.optimizer, whole)
        self._module = UserModule(self.model, device, self.parameters, self._shapes, holding)
        self.buffers: dict[str, Tensor] = self._module.buffers
        self.named = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        self._one_pass = OnePass()
        self.schedule = job.build_schedule(self.optimizer)
        self.parts = job.parts()
        """The job of each objective."""
        self.steps_done = 0
        self.loss_scale = LossScale() if job.precision == "fp16" and self.asked == torch.float32 else None
        """With fp16: what every tangent is multiplied by."""
        self.host_memory = HostMemory(device)
        """What lies on the host, where the plan says so."""
        self.averages: Averages | None = None
        """Averaged weights, where the job asks for them."""
        if job.average is not None:
            self.averages = Averages(job.average, self.parameters, self.buffers)

    @torch.no_grad()
    def lay_beside(self, groups: Sequence[Sequence[str]]) -> None:
        """Give parameters that are read as one tensor memory side by side; flat groups have them so by their order."""
        if self.holding is not None and self.holding.layout.groups:
            return
        moved: set[str] = set()
        for names in groups:
            held = [self.parameters[name] for name in names if name in self.parameters]
            alike = len({parameter.dtype for parameter in held}) == 1 and len(held) == len(names)
            if not alike or moved.intersection(names) or not all(p.is_contiguous() for p in held):
                continue
            flat, start = torch.cat([parameter.detach().reshape(-1) for parameter in held]), 0
            for parameter in held:
                parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
            moved.update(names)

    def update(self, step: int) -> None:
        """One optimizer step with the gradients that the parameters have."""
        optimizer, _ = self._at(step)
        with self._one_pass.made(optimizer):
            optimizer.step()

    def rate(self, step: int) -> float:
        """The learning rate of a step: that of the first group that it updates."""
        return float(self._at(step)[0].param_groups[0]["lr"])

    def part(self, step: int) -> Job:
        """The job of the objective whose turn a step is."""
        return self.parts[self.job.turn(step).objective]

    def trained_in(self, step: int) -> frozenset[str]:
        """The parameters that the objective of a step trains."""
        patterns = as_patterns(self.part(step).trains or "*")
        return frozenset(name for name, _ in self.named if first_of(patterns, name) is not None)

    def _at(self, step: int) -> tuple[torch.optim.Optimizer, Schedule | Schedules]:
        """The optimizer of a step, with the rates of that step, and its schedule."""
        optimizer, schedule, turn = self.optimizer, self.schedule, self.job.turn(step)
        if self.job.objectives:
            assert isinstance(optimizer, Optimizers) and isinstance(schedule, Schedules)
            name = self.job.objectives[turn.objective].name
            optimizer, schedule = optimizer.members[name], schedule.of(name)
        schedule.apply(optimizer, turn.count)
        return optimizer, schedule

    def observe(self, measured: Mapping[str, float]) -> None:
        """Let the schedule know what was measured; all ranks are told the same."""
        follow = self.job.follow
        if follow is not None and follow in measured and self.schedule.follows:
            own = self._at(self.steps_done - 1)[1] if follow == TRAIN_LOSS else self.schedule
            own.observe(measured[follow])

    def frozen(self, step: int) -> frozenset[str]:
        """Parameters that are not trained in a step."""
        return self.job.frozen_in(step, self._shapes)

    @property
    def parameter_names(self) -> list[str]:
        """Of all parameters, also those that other ranks hold; in one order on all ranks."""
        return list(self._shapes)

    def digest(self) -> str:
        """Of the whole model as it was built or loaded; to be asked for before the first step."""
        return self._digest if self._digest is not None else self._digest_of_model()

    def _digest_of_model(self) -> str:
        return digest_of(dict(self.model.named_parameters()) | dict(self.model.named_buffers()))

    def values(self) -> dict[Value, Any]:
        """What instructions call these tensors."""
        if self.holding is not None:
            named: dict[Value, Any] = dict(self.holding.values())
        else:
            named = {Value.parameter(name): p.detach() for name, p in self.parameters.items()}
        return named | {Value.buffer(name): buffer for name, buffer in self.buffers.items()}

    def move(self, value: Value, tensor: Tensor) -> Tensor:
        """Let a parameter, or a chunk of some, be a tensor elsewhere; what instructions call it then."""
        if value.kind == "chunk":
            assert self.holding is not None
            self.holding.move(value.number, tensor)
            return tensor
        parameter = self.parameters[value.name]
        parameter.data = tensor
        return parameter.detach()

    def to_device(self, leaf: Tensor) -> Tensor:
        """A tensor of a batch on this rank's device, in the dtype that the model takes."""
        dtype = leaf_dtype(leaf.dtype, self.asked, self.narrow)
        lies = torch.channels_last if self._channels_last and leaf.ndim == 4 else torch.preserve_format
        if self.device.type != "cuda" or leaf.is_cuda:
            return leaf.to(self.device, dtype, non_blocking=True, memory_format=lies)
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        computes = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            placed = leaf.to(self.device, dtype, non_blocking=True, memory_format=lies)
        computes.wait_stream(self._copies)
        placed.record_stream(computes)
        return placed

    def placed(self, batch: Any) -> Any:
        """A batch whose tensors, also inside of objects, are on this rank's device, in dtypes that the model takes."""
        if self.asked == torch.float64 or self.narrow or self.device.type != "cpu":
            batch = pytree.tree_map_only(Objects, partial(map_objects, self.to_device), batch)
        return pytree.tree_map_only(Tensor, self.to_device, batch)

    def room(self, limit_bytes: int | None, fetch: ShardFetcher | None) -> int | None:
        """Bytes of other parameters for which every rank has room beside what it holds; None: for all of them."""
        held = self.holding is not None
        others = [
            (n, p) for n, p in self.model.named_parameters() if held or p.device.type != self.device.type
        ]
        if limit_bytes is None or not others:
            return None
        states = [*self.optimizer.state.values(), self.averages.tensors if self.averages is not None else {}]
        own = [
            *self.parameters.values(),
            *self.buffers.values(),
            *(t for one in states for t in one.values()),
        ]
        room = room_beside(own, self.device, limit_bytes)
        room = min(fetch.tell(room)) if fetch is not None else room
        return None if sum(self._shapes[n].numel() * p.element_size() for n, p in others) <= room else room

    @contextmanager
    def whole_model(self, fetch: ShardFetcher | None, room_bytes: int | None = None) -> Iterator[nn.Module]:
        """The user's module with all of its parameters, for as long as somebody needs to run it.

        `room_bytes`: of parameters that may be there at once, beside those in use; all ranks that hold shards must then
        run the module alike.
        """
        self.host_memory.settle()
        with self._module.whole(fetch, room_bytes):
            yield self.model

    def lent(self, values: Mapping[Value, Any]) -> AbstractContextManager[None]:
        """The user's module with the parameters that were gathered, for as long as it runs."""
        return self._module.lent(values)

    def to_checkpoint(self, extra: dict[str, Any], fetch: ShardFetcher | None = None) -> TrainingState:
        """Everything that the next step depends on; where ranks hold shards, all of them must call it."""
        self.host_memory.settle()
        parameters, buffers, aliases, transient = collect_model(self.model)
        optimizer = collect_optimizer(self.optimizer, self.named)
        if self.holding is not None:
            assert fetch is not None
            self._module.share_buffers(fetch)
            parameters = {
                name: self.holding.assemble(name, self._module.shard(name, held.dtype), fetch)
                for name, held in parameters.items()
            }
            optimizer = whole_optimizer(optimizer, self.holding, fetch, self._groups, self._shapes)
        average: dict[str, Tensor] = {}
        if self.averages is not None and self.averages.count:
            with self.averages.shown(), self.whole_model(fetch) as model:
                held, numbers, _, _ = collect_model(model)
                average = {name: tensor.clone() for name, tensor in (held | numbers).items()}
        return TrainingState(
            step=self.steps_done,
            parameters=parameters,
            buffers=buffers,
            aliases=aliases,
            transient=transient,
            optimizer=optimizer,
            schedule=self.schedule.state_dict(),
            extra=extra | ({"loss_scale": self.loss_scale.state()} if self.loss_scale is not None else {}),
            average=average,
            averaged=self.averages.count if self.averages is not None else 0,
        )

    def load(self, state: TrainingState) -> None:
        """Continue from a checkpoint, whatever plan wrote it."""
        optimizer = state.optimizer
        if self.holding is None:
            restore_model(self.model, state)
        else:
            with self._module.shaped():
                restore_model(self.model, state)
                self.holding.load(dict(self.model.named_parameters()))
            optimizer = own_optimizer(optimizer, self.holding, self._shapes)
        self.host_memory.forget()
        own = [dict(group) for group in self.optimizer.param_groups]
        restore_optimizer(self.optimizer, self.named, optimizer)
        check_same_options(own, optimizer.groups, moved=self.schedule.moved)
        self.schedule.load_state_dict(state.schedule, state.step)
        self._load_averages(state)
        self.steps_done = state.step
        if self.loss_scale is not None and "loss_scale" in state.extra:
            self.loss_scale.load(state.extra["loss_scale"])
        if self.holding is not None:
            self._digest = digest_of(state.parameters | state.buffers)

    def _load_averages(self, state: TrainingState) -> None:
        if self.averages is None:
            if state.averaged:
                raise CheckpointError(
                    f"the checkpoint holds averaged weights (taken {state.averaged} times); the job has no `average`",
                    fix="resume with the job that was saved.",
                )
            return
        holding = self.holding
        self.averages.count = state.averaged
        self.averages.tensors = {
            name: (
                value
                if holding is None or name in self.buffers
                else holding.layout.take(name, value, holding.rank)
            ).to(self.device, copy=True)
            for name, value in state.average.items()
            if name in self.parameters or name in self.buffers
        }


def in_float64(job: Job) -> Job:
    """The job with its loss module, which may hold class weights, in float64."""
    return replace(job, loss=copy.deepcopy(job.loss).double()) if isinstance(job.loss, nn.Module) else job


def _names_of_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
