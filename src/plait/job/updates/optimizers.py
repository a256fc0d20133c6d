"""Several optimizers over disjoint parameters, as one.

Goes in: what a job's `optimizer` is or returns: an optimizer, several of them, or functions by pattern. Comes out: one
torch optimizer. Of several, the groups are those of all in turn, and the state is shared by parameter, so whoever
saves, cuts or counts what an optimizer keeps need not know that there are several.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plait.errors import JobError
from plait.job.batch import describe
from plait.job.optimizer import checked_optimizer
from plait.job.origin import called
from plait.job.schedule import first_parameter
from plait.job.updates.patterns import check_known, first_of

Named = Sequence[tuple[str, nn.Parameter]]


class Optimizers(torch.optim.Optimizer):
    """Steps all of them, or some."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__([p for member in members.values() for p in _used(member)], {})
        self.members = dict(members)
        """By name."""
        self.param_groups = [group for member in members.values() for group in member.param_groups]
        for member in members.values():
            self.state.update(member.state)
        self._share(self.state)

    def _share(self, state: Any) -> None:
        self.state = state
        for member in self.members.values():
            if isinstance(member, Optimizers):
                member._share(state)
            else:
                member.state = state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"members": self.members}

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {member}" for name, member in self.members.items())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every optimizer."""
        assert closure is None, "optimizers that call back are refused"
        for member in self.members.values():
            member.step()


def members_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name; of a single one, itself without a name."""
    return optimizer.members if isinstance(optimizer, Optimizers) else {"": optimizer}


def leaves_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that do the work, of several within several too."""
    if not isinstance(optimizer, Optimizers):
        return [optimizer]
    return [leaf for member in optimizer.members.values() for leaf in leaves_of(member)]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The names of their classes."""
    if not isinstance(optimizer, Optimizers):
        return type(optimizer).__name__
    return ", ".join(dict.fromkeys(kind_of(member) for member in optimizer.members.values()))


def build_optimizer(factory: Any, named: Named) -> torch.optim.Optimizer:
    """The user's optimizers on these parameters, which must be the only ones that they use."""
    made = _by_pattern(factory, named) if isinstance(factory, Mapping) else _call(factory, named)
    parameters = [parameter for _, parameter in named]
    if isinstance(made, Mapping | Sequence) and not isinstance(made, str) and len(made) > 0:
        found = made.items() if isinstance(made, Mapping) else ((str(at), one) for at, one in enumerate(made))
        members = {str(name): checked_optimizer(one, parameters) for name, one in found}
        check_disjoint(members, named)
        return Optimizers(members)
    return checked_optimizer(made, parameters)


def _call(factory: Callable[..., Any], named: Named) -> Any:
    wants_names = first_parameter(factory) in ("named_parameters", "named_params")
    with called("optimizer(...)"):
        return factory(list(named) if wants_names else [parameter for _, parameter in named])


def _by_pattern(factories: Mapping[str, Callable[..., Any]], named: Named) -> dict[str, Any]:
    names = [name for name, _ in named]
    if names:
        check_known("optimizer", factories, names)
    shares: dict[str, list[tuple[str, nn.Parameter]]] = {pattern: [] for pattern in factories}
    for name, parameter in named:
        at = first_of(factories, name)
        if at is None:
            raise JobError(
                f"optimizer has functions for {', '.join(map(repr, factories))}, none of which is for {name}.",
                fix="add one for '*', the rest; or freeze that parameter with requires_grad_(False).",
            )
        shares[list(factories)[at]].append((name, parameter))
    for pattern, share in shares.items():
        if not share and names:
            raise JobError(
                f"optimizer: all parameters called {pattern!r} are called by a pattern before it.",
                fix="put the narrower patterns first.",
            )
    return {pattern: _single(pattern, _call(factories[pattern], share)) for pattern, share in shares.items()}


def _single(pattern: str, made: Any) -> Any:
    if isinstance(made, Mapping | Sequence):
        raise JobError(
            f"optimizer[{pattern!r}](...) returned {describe(made)}, not a torch.optim.Optimizer.",
            fix="give every optimizer a pattern of its own.",
        )
    return made


def check_disjoint(members: Mapping[str, torch.optim.Optimizer], named: Named) -> None:
    """Refuse optimizers that update the same parameter: its state would be two things."""
    names = {id(parameter): name for name, parameter in named}
    seen: dict[int, str] = {}
    for name, member in members.items():
        for parameter in _used(member):
            if (before := seen.setdefault(id(parameter), name)) != name:
                raise JobError(
                    f"two optimizers, {before!r} and {name!r}, update {names[id(parameter)]}.",
                    fix="give each parameter to one of them.",
                )


def _used(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
