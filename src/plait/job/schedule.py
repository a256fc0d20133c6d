"""The learning rate of optimizer step k.

Goes in: the job's `schedule` and a freshly built optimizer. Comes out: the rates of any step, set on any
optimizer with the same groups. They depend on the step alone: not on the number of ranks or micro-batches,
nor on who calls how often; but those of ReduceLROnPlateau, which depend on what was measured so far. Never
changes the optimizer that it was made from: torch schedulers run on a copy of its groups.
"""

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from plait.errors import JobError
from plait.files.document import Document, Format
from plait.files.shape import shaped
from plait.job.batch import describe
from plait.job.origin import RAISED, called, told
from plait.torch_private.autograd import mark_stepped

_FIX = "let schedule be `step -> learning rate`, or `optimizer -> torch LRScheduler`."
_OPTIMIZER_NAMES = ("optimizer", "optim", "opt")
"""What people call the first parameter of a function that makes a torch scheduler."""


def first_parameter(function: Callable[..., Any]) -> str | None:
    """The name of a callable's first parameter, where Python can tell."""
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return None


def takes_optimizer(schedule: Callable[..., Any], optimizer: Optimizer) -> bool:
    """Whether a schedule makes a torch scheduler of an optimizer, and is no function of the step.

    Its signature says so, by name or annotation; where that does not tell, it is what gives a scheduler and no number.
    """
    try:
        first = next(iter(inspect.signature(schedule).parameters.values()))
    except (TypeError, ValueError, StopIteration):
        return False
    kind = (
        first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    )
    if first.name in _OPTIMIZER_NAMES or kind.endswith("Optimizer"):
        return True
    if first.name == "step" or kind == "int":
        return False
    try:
        float(schedule(0))
    except Exception:
        try:
            return isinstance(schedule(_shadow(optimizer, optimizer.param_groups)), LRScheduler)
        except Exception:
            return False  # what it says of step 0 is told
    return False


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Plateau(msgspec.Struct):
    best: float
    num_bad_epochs: _Count
    cooldown_counter: _Count
    last_epoch: _Count
    rates: list[float]


class _Saved(msgspec.Struct):
    initial_rates: list[float]
    plateau: _Plateau | None = None


_FOLLOWED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
_FORMAT = Format(noun="a schedule", error=JobError, fix="take another checkpoint.")


class Schedule:
    """Sets the learning rates of step k; see the module for the contract."""

    def __init__(self, schedule: Callable[..., Any] | None, optimizer: Optimizer) -> None:
        self._schedule = schedule
        self._initial_groups = [_frozen(group) for group in optimizer.param_groups]
        self._builds_scheduler = schedule is not None and takes_optimizer(schedule, optimizer)
        self._template = optimizer if self._builds_scheduler else None
        self._scheduler: LRScheduler | None = None
        self._position = 0

    @property
    def initial_rates(self) -> tuple[float, ...]:
        """Each group's learning rate as the optimizer was built."""
        return tuple(group["lr"] for group in self._initial_groups)

    @property
    def moved(self) -> tuple[str, ...]:
        """Options of the optimizer that `apply` sets at every step."""
        return ("lr", "initial_lr", *(("momentum", "betas") if self._builds_scheduler else ()))

    def rates(self, step: int) -> tuple[float, ...]:
        """Each group's learning rate for optimizer step `step`, counted from 0."""
        if self._schedule is None:
            return self.initial_rates
        if self._builds_scheduler:
            return tuple(float(group["lr"]) for group in self._advance(step).param_groups)
        return self._scaled(self._rate(step))

    @property
    def follows(self) -> bool:
        """Whether the rates depend on what is measured, and not on the step alone."""
        return self._builds_scheduler and isinstance(self._built(), ReduceLROnPlateau)

    def observe(self, value: float) -> None:
        """What was measured, for a schedule that follows it; the others do not care."""
        if self.follows:
            self._built().step(value)  # type: ignore[arg-type]

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Set step `step`'s rates (and momenta, where a torch scheduler moves them) on every group."""
        rates = self.rates(step)
        if len(rates) != len(optimizer.param_groups):
            raise JobError(
                f"the schedule was made for {len(rates)} parameter groups; this optimizer has "
                f"{len(optimizer.param_groups)}.",
                fix="build both from the same optimizer function.",
            )
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._scheduler is not None:
            for group, scheduled in zip(
                optimizer.param_groups, self._scheduler.optimizer.param_groups, strict=True
            ):
                for key in ("momentum", "betas"):
                    if key in group and not isinstance(group[key], Tensor):
                        group[key] = scheduled[key]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; rates are a function of the step, so this serves to check, and to restore what was measured."""
        told: dict[str, Any] = {"initial_rates": list(self.initial_rates)}
        if self.follows:
            scheduler = self._built()
            told["plateau"] = {key: getattr(scheduler, key) for key in _FOLLOWED} | {
                "rates": [float(group["lr"]) for group in scheduler.optimizer.param_groups]
            }
        return told

    def load_state_dict(self, state: Mapping[str, Any], steps_done: int) -> None:
        """Go on after so many steps; refuse a state that was saved with other initial rates."""
        found = shaped(Document(values=state, where="the saved schedule"), _Saved, _FORMAT)
        saved = tuple(found.initial_rates)
        if saved != self.initial_rates:
            raise JobError(
                f"the optimizer starts with the learning rates {list(self.initial_rates)}; the saved schedule started "
                f"with {list(saved)}.",
                fix="resume with the job that was saved, or start a new run.",
            )
        if self.follows:
            self._load_plateau(found.plateau, steps_done)

    def _load_plateau(self, saved: _Plateau | None, steps_done: int) -> None:
        self._scheduler = None
        scheduler = self._built()
        assert isinstance(scheduler, ReduceLROnPlateau)
        if saved is None and not steps_done:
            return
        if saved is None or not self._can_have_left(saved, scheduler, steps_done):
            held = "nothing of it" if saved is None else "what it cannot have measured"
            raise JobError(
                f"the schedule follows what is measured; after {steps_done} steps the checkpoint holds {held}.",
                fix="resume with the job and the checkpoint that were saved.",
            )
        for key in _FOLLOWED:
            setattr(scheduler, key, getattr(saved, key))
        for group, rate in zip(scheduler.optimizer.param_groups, saved.rates, strict=True):
            group["lr"] = rate

    def _can_have_left(self, saved: _Plateau, scheduler: ReduceLROnPlateau, steps_done: int) -> bool:
        """Rates only fall, it looks at most once a step, and has not run out of patience."""
        initial = self.initial_rates
        falls = len(saved.rates) == len(initial) and all(
            0 <= rate <= first for rate, first in zip(saved.rates, initial, strict=True)
        )
        is_number = not math.isnan(saved.best)
        is_patient = saved.num_bad_epochs <= min(scheduler.patience, saved.last_epoch)
        is_warm = saved.cooldown_counter <= scheduler.cooldown
        return falls and is_number and is_patient and is_warm and saved.last_epoch <= steps_done

    def _rate(self, step: int) -> float:
        assert self._schedule is not None
        self._position = step
        try:
            rate = self._schedule(step)
            number = float(rate)
        except RAISED as error:
            raise JobError(f"schedule({step}) gave no learning rate{told(error)}.", fix=_FIX) from error
        if not math.isfinite(number) or number < 0:
            raise JobError(
                f"schedule({step}) is {number}.", fix="return a finite learning rate >= 0 for every step."
            )
        return number

    def _scaled(self, rate: float) -> tuple[float, ...]:
        first = self.initial_rates[0]
        if all(initial == first for initial in self.initial_rates):
            return (rate,) * len(self._initial_groups)
        if first == 0:
            raise JobError(
                f"the groups start with the learning rates {list(self.initial_rates)}; the schedule is scaled by each "
                "group's ratio to group 0, which is 0.",
                fix="give group 0 a learning rate above 0, or use an `optimizer -> LRScheduler` schedule.",
            )
        return tuple(rate * (initial / first) for initial in self.initial_rates)

    def _advance(self, step: int) -> Optimizer:
        """The shadow optimizer, its scheduler stepped exactly `step` times."""
        if self.follows:
            self._position = step
            return self._built().optimizer
        if self._scheduler is None or step < self._position:
            self._scheduler, self._position = self._build(), 0
        while self._position < step:
            with called(f"the scheduler, asked for the rate of step {self._position + 1},"):
                self._scheduler.step()
            self._position += 1
        return self._scheduler.optimizer

    def _built(self) -> LRScheduler:
        if self._scheduler is None:
            self._scheduler = self._build()
        return self._scheduler

    def _build(self) -> LRScheduler:
        assert self._template is not None
        assert self._schedule is not None
        shadow = _shadow(self._template, self._initial_groups)
        with called("schedule(optimizer)"):
            scheduler = self._schedule(shadow)
        if not isinstance(scheduler, LRScheduler):
            raise JobError(
                f"schedule(optimizer) returned {describe(scheduler)}, not a torch LRScheduler.", fix=_FIX
            )
        return scheduler


def _shadow(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> Optimizer:
    """A copy of an optimizer with these options for its groups, for a scheduler to write to; it never steps."""
    shadow = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [
        {**_frozen(dict(own)), "params": group["params"]}
        for own, group in zip(options, optimizer.param_groups, strict=True)
    ]
    mark_stepped(shadow)
    return shadow


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options without its parameters, tensors as plain numbers: nothing shared with the original."""
    options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    return {key: float(value) if isinstance(value, Tensor) else value for key, value in options.items()}
