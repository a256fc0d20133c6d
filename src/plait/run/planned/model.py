"""A model in a loop of the user's own, under a plan that decides about a whole step.

In: a module, its optimizer, a plan. Out: a module whose calls are recorded while it trains. `loss.backward()` runs what
was recorded as the plan's program, up to its gradients; the optimizer's own `step()` updates what this rank holds. With
`model.eval()`, or without gradients, it computes at once, with all parameters. Passes, saves and whole models are the
affair of all ranks: who calls something else than the others is told so.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import PlanError, UsageError
from plait.graph.capture.capture import as_fake
from plait.graph.from_job import Captures
from plait.job.batch import map_tensors, tensors_in
from plait.job.data.source import Source
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.run.parallelize import Step, refuse_what_is_no_loop_of_steps
from plait.run.planned.expression import Expression, expression_of
from plait.run.planned.optimizer import PlannedOptimizer
from plait.run.planned.parameters import Gradients, HeldParameter
from plait.run.planned.promise import Call, Promise, promised
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.wire.tell import tell
from plait.run.wrap import equalize, join_ranks
from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode

_FORMS = 16
"""Ways of computing a loss that are kept: one whose numbers change with every step would have no end."""


class Shapes(Source):
    """Batches like those that a loop gives: all that is read of them is how they are shaped."""

    def __init__(self, given: tuple[Tensor, ...], has_samples: tuple[bool, ...], num_samples: int) -> None:
        self._given, self._has_samples, self._num_samples = given, has_samples, num_samples

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def fetch(self, ids: Tensor) -> Any:
        return tuple(
            tensor.new_zeros((len(ids), *tensor.shape[1:])) if counts else tensor
            for tensor, counts in zip(self._given, self._has_samples, strict=True)
        )


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
        self.plan, self._seed, self._micro_batches = plan, seed, micro_batches
        equalize(module)
        self.__dict__["_module"] = module  # no part of this one: its parameters are not what is trained
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._paper = (as_fake(module, self._fakes).train(),)
        """The module without memory; in a tuple, as it is no part of this one."""
        self._results: dict[str, Any] = {}
        """What the model returns, by the shapes that it is given."""
        self._gradients = Gradients()
        self._held = {n: HeldParameter.of(n, p, self, self._gradients) for n, p in module.named_parameters()}
        self._optimizer = PlannedOptimizer(optimizer, module, self._held, self)
        self._step: Step | None = None
        self._forms: dict[str, tuple[Programs, frozenset[str]]] = {}
        """By what is computed."""
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
        return promised(self, call, self._on_paper(args, kwargs))

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

    def _run(self, promise: Promise, *, trains: bool) -> None:
        self._close()
        expression = expression_of(promise)
        if promise.number is None:
            promise.number, self._num_passes = self._num_passes, self._num_passes + 1
        count = self._num_samples(expression)
        sizes, has_samples = self._exchange(expression, count)
        programs, reached = self._programs(expression, has_samples, sum(sizes), trains=trains)
        assert self._step is not None
        found, loss = self._step.gradients(expression.given, sizes, programs, promise.number)
        found = {name: gradient for name, gradient in found.items() if name in reached}
        self._gradients.made |= reached if trains else frozenset()
        promise.value = torch.tensor(loss, dtype=promise.like.dtype)
        self._pending = (promise, found)

    def _num_samples(self, expression: Expression) -> int:
        """Rows of what the model is given first."""
        for call in expression.calls:
            for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if call.function is None else ():
                given = expression.tensor(leaf)
                if given is not None and given.dim():
                    return given.shape[0]
        raise UsageError(
            "the model was given no tensor that has samples on dim 0.", fix="give it the batch as tensors."
        )

    def _exchange(self, expression: Expression, count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The samples of every share, and which tensors have samples on dim 0 wherever they are."""
        may = [
            counts and t.shape[0] == count
            for t, counts in zip(expression.given, expression.counts, strict=True)
        ]
        own = {"count": count, "may": may, "form": hashlib.sha256(expression.text.encode()).hexdigest()}
        told = self._meet("loss.backward()", own)
        for rank, other in enumerate(told):
            if other["form"] != own["form"]:
                raise UsageError(
                    f"rank {rank} computes another loss than rank {self.rank}.",
                    fix="let all ranks run the same lines, whatever samples they have.",
                )
        counts: dict[int, int] = {}
        for rank, other in enumerate(told):
            share = self.plan.data_coordinate(rank)
            if counts.setdefault(share, other["count"]) != other["count"]:
                raise UsageError(
                    f"rank {rank} gave {other['count']} samples, another rank of share {share} {counts[share]}.",
                    fix="prepare the DataLoader too, or give ranks of one place on `data` the same samples.",
                )
        if not sum(counts.values()):
            raise UsageError("all ranks gave an empty batch.", fix="end the loop when the data ends.")
        flags = tuple(all(other["may"][at] for other in told) for at in range(len(may)))
        return tuple(counts[share] for share in range(self.plan.data_ranks)), flags

    def _meet(self, what: str, value: Any = None) -> list[Any]:
        """Tell all ranks what this one is about to do, and hear it of them."""
        if self.ranks == 1:
            return [value]
        told = tell({"calls": what, "value": value})
        for rank, other in enumerate(told):
            if other["calls"] != what:
                raise UsageError(
                    f"rank {self.rank} calls {what} while rank {rank} calls {other['calls']}; under plan "
                    f"{self.plan.name} all ranks take part in each.",
                    fix="call it on all ranks (no `if rank == 0:` around it); write files on one of them.",
                )
        return [other["value"] for other in told]

    def _programs(
        self, expression: Expression, has_samples: tuple[bool, ...], num_samples: int, *, trains: bool
    ) -> tuple[Programs, frozenset[str]]:
        """What runs it, and the parameters that it depends on."""
        key = f"{expression.text} of {has_samples}"
        if key not in self._forms:
            if len(self._forms) == _FORMS:
                raise UsageError(
                    f"the loss was computed in {_FORMS} ways so far, each compiled anew; the last is "
                    f"{expression.text[:200]}.",
                    fix="give numbers that change from step to step as tensors: torch.tensor(beta) * penalty.",
                )
            self._forms[key] = self._prepared(expression, has_samples, num_samples, trains=trains)
        return self._forms[key]

    @kept_generators()
    def _prepared(
        self, expression: Expression, has_samples: tuple[bool, ...], num_samples: int, *, trains: bool
    ) -> tuple[Programs, frozenset[str]]:
        source = Shapes(expression.given, has_samples, max(num_samples, self.plan.data_ranks))
        job = Job(
            model=self._module, data=source, objective=expression.objective, optimizer=self._optimizer.like,
            batch=source.num_samples, seed=self._seed, accumulate=self._micro_batches,
        )  # fmt: skip
        if self._step is None:
            captures = Captures(job, source, torch.float32, self.device.type)
            programs = prepare(job, self.plan, self.device.type, torch.float32, lambda event: None, captures)
            wanted = {name for name, held in self._held.items() if held.requires_grad}
            if not trains and programs.trained != wanted:
                raise UsageError(
                    "a number is asked for before the first loss.backward(), and it does not depend on all parameters.",
                    fix="ask for it after the first backward, which decides how parameters are held.",
                )
            self._step = Step(programs.whole, programs, self.rank, self.device, lambda event: None)
            self._begin(programs)
            return programs, programs.trained
        lead, known = next(iter(self._forms.values()))
        programs = self._like(lead, job)
        reached = programs.trained
        if reached - known:
            raise UsageError(
                f"this loss trains {', '.join(sorted(reached - known))}, the first one did not; plan {self.plan.name} "
                "holds parameters by what the first one trains.",
                fix="let the first loss reach all that is trained, or use plan='ddp'.",
            )
        if reached != known:  # all steps fill the same buckets
            everything = partial(_touching, expression.objective, sorted(known - reached))
            programs = self._like(lead, replace(job, objective=everything))
        return programs, reached

    def _like(self, lead: Programs, job: Job) -> Programs:
        """Programs of another loss, with parameters where the first one has them."""
        programs = Programs(job, job.data, self.plan, self.device, torch.float32)
        programs.compiler.follow(lead.compiler)
        programs.full_step()
        return programs

    def _begin(self, programs: Programs) -> None:
        """Hand what is trained over to the step: the user's own module is a shape from here on."""
        assert self._step is not None
        state, table = self._step.state, self._gradients
        table.shards, table.names, table.rank = state.parameters, list(self._held), self.rank
        table.layout = programs.layout
        self._optimizer.begin(self._step)
        for parameter in self._module.parameters():
            parameter.data = torch.empty_like(parameter)  # never written to: shapes alone are asked for

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

    def _on_paper(self, args: Any, kwargs: Any) -> Any:
        """What the model returns on these shapes: tensors without memory."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = f"{spec} {[(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]}"
        if key not in self._results:
            with self._fakes, torch.no_grad():
                fakes = [torch.empty(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in leaves]
                given, named = pytree.tree_unflatten(fakes, spec)
                try:
                    found = self._paper[0](*given, **named)
                except Exception as error:
                    raise UsageError(
                        f"the model cannot be looked at without values: {type(error).__name__}: {error}",
                        fix="mend that line; where forward reads values of tensors, use plan='ddp'.",
                    ) from error
            if next(tensors_in(found), None) is None:
                raise UsageError("the model returned no tensor.", fix="return tensors from forward().")
            self._results[key] = found
        return map_tensors(
            lambda fake: torch.empty(fake.shape, dtype=fake.dtype, device="meta"), self._results[key]
        )


def _touching(objective: Any, names: Sequence[str], model: nn.Module, batch: Any) -> Tensor:
    """An objective that depends on more parameters, with gradients of zero."""
    loss: Tensor = objective(model, batch)
    return loss + sum(0.0 * model.get_parameter(name).sum() for name in names)
