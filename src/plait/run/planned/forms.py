"""Ways in which a loop computes its losses, and the programs of each.

In: what was recorded. Out: the plan's programs for it, and the parameters that it depends on. The first one decides how
parameters are held; the others follow it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import UsageError
from plait.graph.from_job import Captures
from plait.job.data.source import Source
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.run.planned.expression import Expression
from plait.run.planned.original import shell
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs

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


class Forms:
    """Programs by what is computed."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        plan: Plan,
        device: torch.device,
        *,
        seed: int,
        micro_batches: int,
    ) -> None:
        self._module, self._optimizer, self._plan, self._device = module, optimizer, plan, device
        self._shape = module
        """What is captured."""
        self._seed, self._micro_batches = seed, micro_batches
        self._known: dict[str, tuple[Programs, frozenset[str]]] = {}

    def programs_of(
        self, expression: Expression, has_samples: tuple[bool, ...], num_samples: int, *, trains: bool
    ) -> tuple[Programs, frozenset[str]]:
        """What runs it, and the parameters that it depends on."""
        key = f"{expression.text} of {has_samples}"
        if key not in self._known:
            if len(self._known) == _FORMS:
                raise UsageError(
                    f"the loss was computed in {_FORMS} ways so far, each compiled anew; the last is "
                    f"{expression.text[:200]}.",
                    fix="give numbers that change from step to step as tensors: torch.tensor(beta) * penalty.",
                )
            self._known[key] = self._prepared(expression, has_samples, num_samples, trains=trains)
        return self._known[key]

    def _prepared(
        self, expression: Expression, has_samples: tuple[bool, ...], num_samples: int, *, trains: bool
    ) -> tuple[Programs, frozenset[str]]:
        if not self._known:
            self._shape = shell(self._module)  # as the user left it; the module itself is let go of
        source = Shapes(expression.given, has_samples, max(num_samples, self._plan.data_ranks))
        job = Job(
            model=self._shape, data=source, objective=expression.objective, optimizer=self._optimizer,
            batch=source.num_samples, seed=self._seed, accumulate=self._micro_batches,
        )  # fmt: skip
        if not self._known:
            captures = Captures(job, source, torch.float32, self._device.type)
            programs = prepare(
                job, self._plan, self._device.type, torch.float32, lambda event: None, captures
            )
            wanted = {name for name, parameter in self._shape.named_parameters() if parameter.requires_grad}
            if not trains and programs.trained != wanted:
                raise UsageError(
                    "a number is asked for before the first loss.backward(), and it does not depend on all parameters.",
                    fix="ask for it after the first backward, which decides how parameters are held.",
                )
            return programs, programs.trained
        lead, known = next(iter(self._known.values()))
        programs = self._like(lead, job)
        reached = programs.trained
        if reached - known:
            raise UsageError(
                f"this loss trains {', '.join(sorted(reached - known))}, the first one did not; plan {self._plan.name} "
                "holds parameters by what the first one trains.",
                fix="let the first loss reach all that is trained, or use plan='ddp'.",
            )
        if reached != known:  # all steps fill the same buckets
            everything = partial(_touching, expression.objective, sorted(known - reached))
            programs = self._like(lead, replace(job, objective=everything))
        return programs, reached

    def _like(self, lead: Programs, job: Job) -> Programs:
        """Programs of another loss, with parameters where the first one has them."""
        programs = Programs(job, job.data, self._plan, self._device, torch.float32)
        programs.compiler.follow(lead.compiler)
        programs.full_step()
        return programs


def _touching(objective: Any, names: Sequence[str], model: nn.Module, batch: Any) -> Tensor:
    """An objective that depends on more parameters, with gradients of zero."""
    loss: Tensor = objective(model, batch)
    return loss + sum(0.0 * model.get_parameter(name).sum() for name in names)
