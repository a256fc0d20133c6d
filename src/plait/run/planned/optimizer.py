"""The user's optimizer over parameters of which this rank holds parts.

In: an optimizer on a module's parameters. Out: the same object; its groups show whole parameters, it steps on what this
rank holds, and its `state_dict` is that of one process. Learning rates and schedulers are the user's own affair.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.errors import UsageError
from plait.run.checkpoint.state import OptimizerState
from plait.run.hold.optimizer_shards import own_optimizer, whole_optimizer
from plait.run.link.fetch import ProcessShardFetcher
from plait.run.parallelize import Step
from plait.run.planned.parameters import HeldParameter


class Told(Protocol):
    """Who is told when the optimizer steps."""

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def _meet(self, what: str) -> Any: ...


class PlannedOptimizer:
    """Makes one optimizer step on shards."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        held: Mapping[str, HeldParameter],
        told: Told,
    ) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if foreign:
            raise UsageError(
                f"the optimizer has {len(foreign)} parameters that the model does not have, the first of shape "
                f"{tuple(foreign[0].shape)}.",
                fix="prepare the model whose parameters the optimizer was made of, as one module if there are several.",
            )
        self._user, self._held, self._told = optimizer, held, told
        self._groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._before = {names[id(p)]: dict(state) for p, state in optimizer.state.items()}
        """State from before: an optimizer that was loaded."""
        self._step: Step | None = None
        self._shards: list[list[nn.Parameter]] = [[] for _ in self._groups]
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        """By shard."""
        self._show()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_save)
        optimizer.register_state_dict_post_hook(self._after_save)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def like(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """One of the same class, groups and options on other parameters."""
        known = dict(named_parameters)
        made: torch.optim.Optimizer = object.__new__(type(self._user))
        own = {key: value for key, value in vars(self._user).items() if key not in ("step", "state")}
        own = {key: value for key, value in own.items() if not key.endswith("_hooks")}
        made.__dict__.update(_without_hooks(), **own)
        made.param_groups = [
            {**group, "params": [known[name] for name in names if name in known]}
            for group, names in zip(self._user.param_groups, self._groups, strict=True)
        ]
        made.state = defaultdict(dict)
        for name, state in self._before.items():
            if name in known and known[name].shape == self._held[name].like.shape:  # not a shard, for a trial
                made.state[known[name]] = {
                    k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()
                }
        return made

    def begin(self, step: Step) -> None:
        """The first step is prepared: what it holds is what is updated."""
        self._step = step
        made = step.state.optimizer
        self._shards = [list(group["params"]) for group in made.param_groups]
        self._state = made.state
        self._before = {}
        step.state.optimizer = self._user
        self._show()

    def _show(self) -> None:
        """Whole parameters to look at."""
        for group, names in zip(self._user.param_groups, self._groups, strict=True):
            group["params"] = [self._held[name] for name in names]
        self._user.state = self._state

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if next((value for value in (*args[1:], *kwargs.values()) if value is not None), None) is not None:
            raise UsageError(
                "optimizer.step(closure) computes the loss again within a step.",
                fix="call optimizer.step() alone, after loss.backward().",
            )
        self._told.before_update()
        for group, shards in zip(optimizer.param_groups, self._shards, strict=True):
            group["params"] = list(shards)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._state = optimizer.state
        self._show()
        self._told.after_update()

    def _before_save(self, optimizer: Any) -> None:
        """For as long as it is saved, the state is whole."""
        if self._step is None:
            state = {self._held[name]: entries for name, entries in self._before.items()}
        else:
            state = {self._held[name]: entries for name, entries in self._whole().items()}
        optimizer.state = defaultdict(dict, state)

    def _after_save(self, optimizer: Any, saved: Any) -> None:
        optimizer.state = self._state

    def _after_load(self, optimizer: Any) -> None:
        loaded = {
            held.called: entries
            for held, entries in optimizer.state.items()
            if isinstance(held, HeldParameter)
        }
        if self._step is None:
            self._before = loaded
        else:
            self._take(loaded)
        self._show()

    def _whole(self) -> dict[str, dict[str, Any]]:
        assert self._step is not None
        state = self._step.state
        names = {id(shard): name for name, shard in state.parameters.items()}
        own = {names[id(shard)]: entries for shard, entries in self._state.items()}
        if state.holding is None:
            return {name: own[name] for names in self._groups for name in names if name in own}
        self._told._meet("optimizer.state_dict()")
        tensors, values = _parted(own)
        known = OptimizerState(groups=[{} for _ in self._groups], tensors=tensors, values=values)
        shapes = {name: held.like.shape for name, held in self._held.items()}
        fetch = ProcessShardFetcher(state.holding.layout)
        whole = whole_optimizer(known, state.holding, fetch, self._groups, shapes)
        return {
            name: {**whole.values.get(name, {}), **entries} for name, entries in whole.tensors.items()
        } | {name: dict(entries) for name, entries in whole.values.items() if name not in whole.tensors}

    def _take(self, loaded: Mapping[str, Mapping[str, Any]]) -> None:
        assert self._step is not None
        state = self._step.state
        tensors, values = _parted(loaded)
        if state.holding is not None:
            shapes = {name: held.like.shape for name, held in self._held.items()}
            known = OptimizerState(groups=[], tensors=tensors, values=values)
            tensors = own_optimizer(known, state.holding, shapes).tensors
        self._state = defaultdict(dict)
        for name in [name for names in self._groups for name in names]:
            entries = {**values.get(name, {}), **tensors.get(name, {})}
            if entries and name in state.parameters and (state.holding is None or name in tensors):
                self._state[state.parameters[name]] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                }


def _parted(state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and numbers apart."""
    tensors = {n: {k: v for k, v in e.items() if isinstance(v, Tensor)} for n, e in state.items()}
    values = {n: {k: v for k, v in e.items() if not isinstance(v, Tensor)} for n, e in state.items()}
    return {n: e for n, e in tensors.items() if e}, {n: e for n, e in values.items() if e}


def _without_hooks() -> dict[str, Any]:
    """What an optimizer has of its own beside groups and state."""
    blank = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    return {key: value for key, value in vars(blank).items() if key.endswith("_hooks")}
