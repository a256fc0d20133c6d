"""A model in a loop of the user's own, under a plan that decides about a whole step.

In: a module, its optimizer, a plan. Out: a module whose calls are recorded while it trains. `loss.backward()` runs what
was recorded as the plan's program, up to its gradients; the optimizer's own `step()` updates what this rank holds. With
`model.eval()`, or without gradients, it computes at once, with all parameters. Passes, saves and whole models are the
affair of all ranks: who calls something else than the others is told so.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import PlanError, UsageError
from plait.job.generators import kept_generators
from plait.plan.plan import Plan
from plait.run.parallelize import Step, refuse_what_is_no_loop_of_steps
from plait.run.planned.expression import expression_of
from plait.run.planned.forms import Forms
from plait.run.planned.meeting import Meeting
from plait.run.planned.optimizer import PlannedOptimizer
from plait.run.planned.original import retire
from plait.run.planned.paper import Paper
from plait.run.planned.parameters import Gradients, HeldParameter
from plait.run.planned.promise import Call, Promise, promised
from plait.run.prepare.programs import Programs
from plait.run.wrap import equalize, join_ranks


class Planned(nn.Module):
    """What `plait.prepare` makes of a model, where the plan is not ddp."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        seed: int,
        micro_batches: int,
    ) -> None:
        super().__init__()
        refuse_what_is_no_loop_of_steps(plan)
        if plan.pipe.asynchronous:
            raise PlanError(
                f"plan {plan.name} updates within a step, after every micro-batch; a loop of your own says when.",
                fix="use plait.train or plait.parallelize, or plan='1f1b', which updates once a step.",
            )
        first = next(module.parameters(), None)
        if first is None:
            raise UsageError(
                f"{type(module).__name__} has no parameter.", fix="prepare the model that is trained."
            )
        self.device = first.device
        self.rank, self.ranks = join_ranks(self.device)
        self.plan = plan
        equalize(module)
        self.__dict__["_module"] = module  # no part of this one: its parameters are not what is trained
        self._paper = Paper(module)
        self._meet = Meeting(plan, self.rank, self.ranks)
        self._gradients = Gradients()
        self._held = {n: HeldParameter.of(n, p, self, self._gradients) for n, p in module.named_parameters()}
        self._optimizer = PlannedOptimizer(optimizer, module, self._held, self)
        self._step: Step | None = None
        self._forms = Forms(
            module, self._optimizer.like, plan, self.device, seed=seed, micro_batches=micro_batches
        )
        self._pending: tuple[Promise, dict[str, Tensor]] | None = None
        """What was computed before somebody asked for its gradients."""
        self._num_passes = 0
        self._open = ExitStack()
        """While the whole model is at hand."""
        self._whole: nn.Module | None = None

    # what a loop calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A promise while it trains, else the module's own result."""
        if not (self.training and torch.is_grad_enabled()):
            with torch.no_grad():
                return self._gathered()(*args, **kwargs)
        self._refuse_mixed_modes()
        half = (
            torch.get_autocast_dtype(self.device.type)
            if torch.is_autocast_enabled(self.device.type)
            else None
        )
        call = Call(function=None, args=args, kwargs=kwargs, grad=True, autocast=half)
        return promised(self, call, self._paper(args, kwargs))

    def train(self, mode: bool = True) -> "Planned":
        """As the module's own."""
        if mode:
            self._close()
        self.training = mode
        self._module.train(mode)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops that were written for DistributedDataParallel: sums over ranks add up all the same."""
        yield

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The module itself with all of its parameters, for as long as it takes; all ranks must enter it."""
        with torch.no_grad():
            yield self._gathered()
        self._close()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All of them, with the module's names; this rank may hold parts."""
        for name, held in self._held.items():
            yield f"{prefix}.{name}" if prefix else name, held

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All of them."""
        yield from self._held.values()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters, those too that no optimizer has."""
        for held in self._held.values():
            held.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the whole model, with the module's own names; all ranks must call it."""
        found: dict[str, Any] = self._gathered("state_dict").state_dict(*args, **kwargs)
        copied = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in found.items()}
        self._close()
        return copied

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Into the whole model; all ranks must call it."""
        given = {key.removeprefix("module."): value for key, value in state_dict.items()}
        model = self._gathered("load_state_dict")
        found = model.load_state_dict(given, strict)
        if self._step is not None and self._step.state.holding is not None:
            self._step.state.holding.load(dict(model.named_parameters()))
        self._close()
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_module"], name)
        if isinstance(found, nn.Module | Tensor) or callable(found):
            raise UsageError(
                f"under plan {self.plan.name} {name} of the model cannot be used by itself: a step is one program.",
                fix=f"let forward use it, or `with model.whole() as whole: whole.{name}`, on all ranks.",
            )
        return found

    # what promises and the optimizer call

    def backward(self, promise: Promise) -> None:
        """Run the recording up to its gradients, and add them to those of the parameters."""
        if self._pending is None or self._pending[0] is not promise:
            self._gradients.keep()
            self._run(promise, trains=True)
        assert self._pending is not None
        self._gradients.add(self._pending[1])
        self._pending = None

    def value_of(self, promise: Promise) -> Tensor:
        """A number that is asked for before its backward, or instead of it."""
        self._gradients.keep()
        if self._step is None:
            self._run(promise, trains=False)
        else:
            with self._step.on_trial():  # buffers change once, with the backward
                self._run(promise, trains=False)
        assert promise.value is not None
        return promise.value

    def before_update(self) -> None:
        """The optimizer is about to step."""
        self._pending = None
        self._close()

    def after_update(self) -> None:
        """The optimizer has stepped."""
        if self._step is not None:
            if self.plan.agreement.averages and self.plan.agreement.due(self._step.state.steps_done, False):
                self._meet("optimizer.step()")
            self._step.after_update()

    @property
    def step(self) -> Step | None:
        """What runs steps on this rank; None before the first."""
        return self._step

    # how

    @kept_generators()  # the next epoch's order is drawn from them
    def _run(self, promise: Promise, *, trains: bool) -> None:
        self._close()
        expression = expression_of(promise)
        if promise.number is None:
            promise.number, self._num_passes = self._num_passes, self._num_passes + 1
        sizes, has_samples = self._meet.shares_of(expression)
        programs, reached = self._forms.programs_of(expression, has_samples, sum(sizes), trains=trains)
        if self._step is None:
            self._step = self._begun(programs)
        found, loss = self._step.gradients(expression.given, sizes, programs, promise.number)
        found = {name: gradient for name, gradient in found.items() if name in reached}
        self._gradients.made |= reached if trains else frozenset()
        promise.value = torch.tensor(loss, dtype=promise.like.dtype)
        self._pending = (promise, found)

    @kept_generators()
    def _begun(self, programs: Programs) -> Step:
        """Hand what is trained over to a step: the user's own module has nothing from here on."""
        step = Step(programs.whole, programs, self.rank, self.device, lambda event: None)
        table = self._gradients
        table.shards, table.names, table.rank = step.state.parameters, list(self._held), self.rank
        table.layout = programs.layout
        self._optimizer.begin(step)
        retire(self._module, self._held, self.plan.name)
        return step

    def _gathered(self, what: str = "model(...) without gradients") -> nn.Module:
        if self._step is None:
            module: nn.Module = self._module.train(self.training)
            return module
        if self._whole is None:
            if self._step.state.holding is not None or self.plan.agreement.averages:
                self._meet(what)
            self._whole = self._open.enter_context(self._step.whole_model())
        return self._whole.train(self.training)

    def _close(self) -> None:
        """Let go of the whole model."""
        self._whole = None
        self._open.close()

    def _refuse_mixed_modes(self) -> None:
        still = next((name for name, module in self._module.named_modules() if not module.training), None)
        if still is not None:
            raise UsageError(
                f"{still} is in evaluation mode while the model trains; a step is captured as it trains.",
                fix="freeze parameters by requires_grad_(False) before prepare, or use plan='ddp'.",
            )
