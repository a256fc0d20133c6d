"""Steps of a model that cannot be captured: its own code runs eagerly, as one instruction a micro-batch.

In: a plan, how a step is shared, why the model cannot be captured. Out: a `Program`, with what users should know.
"""

from collections.abc import Sequence

import torch

from plait.errors import CaptureError, PlanError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.job.updates.clip import Clip
from plait.plan.plan import Plan
from plait.program.opaque import ParameterShape, compile_opaque
from plait.program.program import Program
from plait.program.value import Value
from plait.run.eager.trial import EagerTrial, loss_in_shares, try_eagerly
from plait.torch_private.wrappers import is_wrapper

_CLOSE, _CLOSE_ROUNDED = 1e-4, 2e-2
"""How far losses may be apart by rounding alone, as a share: in float32, and in what is shorter."""


class OpaqueSteps:
    """Compiles steps of one job whose inside is not known."""

    def __init__(self, job: Job, captures: Captures, device: torch.device) -> None:
        self._job = job
        self._captures = captures
        self._device = device
        self._trial: EagerTrial | None = None
        self._parameters: tuple[ParameterShape, ...] | None = None
        self._in_shares: list[tuple[float, float] | None] = []
        """What shares of a few samples make of their loss, once that was tried."""

    def compile(
        self, plan: Plan, own: Plan, units: Sequence[tuple[int, ...]], error: CaptureError
    ) -> Program:
        """One step under `plan`, which a worker that meets nobody within a step sees as `own`."""
        if self._job.precision in ("fp16", "fp8"):
            does = "scales the loss" if self._job.precision == "fp16" else "finds products with weights"
            raise PlanError(
                f"precision={self._job.precision!r} {does} in a captured step; this model runs eagerly: {error.what}",
                fix="use precision='bf16' or 'fp32'.",
            )
        trial = self.trial
        if trial.resized and plan.mesh.size > 1:
            raise PlanError(
                f"the forward gives its buffer {trial.resized[0]} another shape when it first runs; under plan "
                f"{plan.name}, ranks hold buffers of one shape.",
                fix="make it of its last shape in the constructor (run the model once there), or use plan single.",
            )
        if plan.memory.zero and plan.data_ranks > 1:
            self._refuse_wrappers(plan)
        return compile_opaque(
            own,
            self._shapes(plan),
            [sum(entry) for entry in units],
            units,
            clip=Clip.of(self._job.norm_bound, self._job.clip_value),
            notices=self._notices(plan, error),
            buffers=[name for name, _ in self._job.build_model().named_buffers()],
            draws=trial.draws,
            fixed=trial.fixed,
            by_samples=trial.by_samples,
            watched=trial.watched,
            written=trial.written if plan.mesh.size > 1 else (),
            device=self._device,
        )

    def _refuse_wrappers(self, plan: Plan) -> None:
        for name, parameter in self._job.build_model().named_parameters():
            if is_wrapper(parameter):
                raise PlanError(
                    f"plan {plan.name} cuts parameters, and {name} is a {type(parameter).__name__}, a tensor made of "
                    "others, which cannot be cut.",
                    fix="use plan ddp: what is frozen has no gradients and no state, so that only weights are held "
                    "more than once.",
                )

    @property
    def trial(self) -> EagerTrial:
        """What one forward of the user's code tells of all."""
        if self._trial is None:
            self._trial = try_eagerly(self._job, self._captures.source)
            self._captures.narrow = self._trial.narrow
        return self._trial

    def _shapes(self, plan: Plan) -> tuple[ParameterShape, ...]:
        if self._parameters is None:
            model = self._job.build_model()
            entries = [
                ParameterShape(
                    value=Value.parameter(name),
                    shape=tuple(parameter.shape),
                    dtype=self.dtype_of(parameter),
                    trained=parameter.requires_grad,
                )
                for name, parameter in model.named_parameters()
            ]
            if plan.mesh.size > 1 and not plan.agreement.alone and plan.agreement.weights != "server":
                entries += [
                    ParameterShape(
                        value=Value.buffer(name),
                        shape=tuple(buffer.shape),
                        dtype=torch.complex128 if buffer.is_complex() else torch.float64,
                        trained=False,
                    )
                    for name, buffer in model.named_buffers()
                ]
            self._parameters = tuple(entries)
        return self._parameters

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """What a tensor of the model is in this run."""
        dtype = self._captures.dtype
        return dtype if dtype == torch.float64 and tensor.is_floating_point() else tensor.dtype

    def _notices(self, plan: Plan, error: CaptureError) -> tuple[str, ...]:
        trial = self.trial
        notices = [f"running eagerly: {error.what}"]
        if not trial.weighs or trial.by_samples:
            notices.append(
                "the loss counts as a mean over its samples; return (total, weight) from `objective` to say otherwise."
            )
        if plan.mesh.size > 1:
            notices.append(
                "run eagerly, each rank's forward sees its own share alone: what looks across samples by itself "
                "(branches, state, hooks, norms of your own) is not that of one process. "
                "Losses, torch's batch norm and random numbers are."
                if self._job.batch_norm == "global" and trial.watched and not plan.agreement.alone
                else "run eagerly, each rank's forward sees its own share alone: batch norm, random numbers, and "
                "branches, state and hooks that depend on the batch, are not those of one process."
            )
            notices += self._apart(plan)
        if trial.generators:
            where = ", on every rank alike, whatever its share" if plan.data_ranks > 1 else ""
            notices.append(
                f"the forward draws from {' and '.join(trial.generators)}: seeded anew for every micro-batch{where}, "
                "so that runs repeat."
            )
        if trial.other_draws and plan.data_ranks > 1:
            notices.append(
                f"what {', '.join(trial.other_draws)} draw{'s' if len(trial.other_draws) == 1 else ''} depends on how "
                "the batch is shared."
            )
        if plan.memory.zero == 3 and plan.data_ranks > 1:
            notices.append("run eagerly, the model is whole on every rank while a micro-batch is computed.")
        return tuple(notices)

    def _apart(self, plan: Plan) -> list[str]:
        """What shares of the first samples show."""
        if plan.data_ranks == 1 or plan.agreement.alone or not self.trial.watched:
            return []
        if not self._in_shares:
            self._in_shares.append(loss_in_shares(self._job, self._captures.source, self.trial))
        (found,) = self._in_shares
        if found is None:
            return []
        whole, shares = found
        off = abs(whole - shares) / max(abs(whole), abs(shares), 1e-30)
        if off <= (_CLOSE if self._job.precision == "fp32" else _CLOSE_ROUNDED):
            return []
        return [
            f"results depend on how the batch is shared: tried on 3 samples, the loss is {whole:.6g} in one process, "
            f"and {shares:.6g} in shares of 2 and 1. Plan single has no shares."
        ]
