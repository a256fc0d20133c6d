"""Small models of the kinds that people bring, each with its data and loss: none may differ from eager in silence.

In: a name. Out: a `Job` of a few steps. What is special about a case is its class; the rest is as plain as can be.
"""

# mypy: ignore-errors
# Written as people write models, with what a type checker cannot follow.

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils import checkpoint

from plait.job.job import Job

BATCH, NUM_SAMPLES, STEPS = 6, 12, 2
CASES: dict[str, Callable[[], Job]] = {}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def vectors(width: int = 8, classes: int = 3, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, width, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, classes, (NUM_SAMPLES,), generator=generator)
    return [(x[i], y[i]) for i in range(NUM_SAMPLES)]


def numbers(width: int = 8, out: int = 1, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(NUM_SAMPLES, width, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(NUM_SAMPLES, out, generator=generator, dtype=torch.float64).to(dtype)
    return [(x[i], y[i]) for i in range(NUM_SAMPLES)]


def images(channels: int = 2, size: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_SAMPLES, channels, size, size, generator=generator)
    return [(x[i], torch.tensor(i % 3)) for i in range(NUM_SAMPLES)]


def tokens(length: int = 5, vocabulary: int = 11) -> list[Any]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(0, vocabulary, (NUM_SAMPLES, length), generator=generator)
    return [(x[i], torch.tensor(i % 3)) for i in range(NUM_SAMPLES)]


def job(model: Callable[[], nn.Module], data: Any = None, loss: Any = None, **fields: Any) -> Job:
    fields = {"optimizer": sgd, "batch": BATCH, "steps": STEPS, **fields}
    if "objective" not in fields:
        fields["loss"] = loss if loss is not None else nn.CrossEntropyLoss()
    return Job(model=model, data=data if data is not None else vectors(), **fields)


def case(data: Any = None, loss: Any = None, **fields: Any) -> Callable[[Any], Any]:
    """Register a model class (or factory) under its name."""

    def register(model: Any) -> Any:
        def make() -> Job:
            return job(model, data() if data is not None else None, loss, **fields)

        CASES[model.__name__] = make
        return model

    return register


def objective_case(model: Any, data: Any = None, **fields: Any) -> Callable[[Any], Any]:
    """Register an objective under its name."""

    def register(objective: Any) -> Any:
        def make() -> Job:
            return job(model, data() if data is not None else None, objective=objective, **fields)

        CASES[objective.__name__] = make
        return objective

    return register


def mlp(width: int = 8, out: int = 3, act: Any = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 6), act(), nn.Linear(6, 5), act(), nn.Linear(5, out))


class Base(nn.Module):
    """Two layers with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def middle(self, h: Tensor) -> Tensor:
        return h.tanh()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


# ---- gradients of gradients


def critic() -> nn.Module:
    return mlp(8, 1)


def penalty_of(model: Any, x: Tensor, create_graph: bool = True) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
    return gradient


@objective_case(critic)
def gradient_penalty_alone(model: Any, batch: Any) -> Tensor:
    return (penalty_of(model, batch[0]).norm(dim=1) - 1).square().mean()


@objective_case(critic)
def wgan_gp(model: Any, batch: Any) -> Tensor:
    real = batch[0]
    fake = real.flip(1) * 0.5
    return (model(fake) - model(real)).mean() + 10 * (
        penalty_of(model, (real + fake) / 2).norm(2, dim=1) - 1
    ).square().mean()


@objective_case(lambda: mlp(8, 1, nn.Softplus), numbers)
def third_derivative(model: Any, batch: Any) -> Tensor:
    x = batch[0].requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return F.mse_loss(second.sum(1, keepdim=True) + u, batch[1])


@objective_case(mlp)
def maml_step(model: Any, batch: Any) -> Tensor:
    x, y = batch
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)


@objective_case(mlp)
def first_order_maml(model: Any, batch: Any) -> Tensor:
    x, y = batch
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
    gradients = torch.autograd.grad(inner, list(weights.values()))
    fast = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)


@objective_case(mlp)
def adversarial_input(model: Any, batch: Any) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return F.cross_entropy(model(x + 0.1 * gradient.sign()), y)


def normed_critic() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.SiLU(), nn.BatchNorm1d(6), nn.Linear(6, 1))


@objective_case(normed_critic)
def penalty_through_norms(model: Any, batch: Any) -> Tensor:
    return penalty_of(model, batch[0]).square().sum(1).mean()


def conv_critic() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 1))


@objective_case(conv_critic, images)
def penalty_through_convolutions(model: Any, batch: Any) -> Tensor:
    return penalty_of(model, batch[0]).flatten(1).norm(dim=1).sub(1).square().mean()


class AttentiveCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x.unsqueeze(1) * torch.linspace(0.5, 1, 3)[None, :, None]).mean(1))


@objective_case(AttentiveCritic)
def penalty_through_attention(model: Any, batch: Any) -> Tensor:
    return penalty_of(model, batch[0]).norm(dim=1).sub(1).square().mean()


@objective_case(mlp)
def func_grad_penalty(model: Any, batch: Any) -> Tensor:
    x, y = batch
    slope = torch.func.grad(lambda inputs: model(inputs).square().sum())(x)
    return F.cross_entropy(model(x), y) + slope.square().mean()


@objective_case(mlp)
def vmap_of_grad(model: Any, batch: Any) -> Tensor:
    x, y = batch
    jacobian = torch.func.vmap(torch.func.jacrev(lambda sample: model(sample)))(x)
    return F.cross_entropy(model(x), y) + jacobian.square().mean()


@objective_case(mlp)
def gradient_of_input_is_used(model: Any, batch: Any) -> Tensor:
    x, y = batch
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y, reduction="none")
    (saliency,) = torch.autograd.grad(loss.sum(), x, retain_graph=True)
    return (loss * saliency.detach().norm(dim=1)).mean()


# ---- hooks


@case()
class ActivationHook(Base):
    def middle(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return h.tanh()


@case()
class ParameterHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda g: g * 3 + 0.01 * g.abs())


@case()
class ClampingParameterHook(Base):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda g: g.clamp(-0.02, 0.02))


@case()
class FullBackwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(lambda m, gi, go: None)
        self.last.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))


@case()
class BackwardPreHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))


@case()
class PostAccumulateHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self._double)

    def _double(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)


@case()
class ForwardHookChangesOutput(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda m, a, out: out * 2)


@case()
class ForwardHookWithMemory(Base):
    """A moving average that a hook keeps in a plain attribute and feeds back."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 0.0

        def remember(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1
            return out * (1 + self.average)

        self.first.register_forward_hook(remember)


# ---- Python state


@case()
class Counter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h.tanh() * self.calls


@case()
class Curriculum(Base):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"step": 0, "history": []}

    def middle(self, h: Tensor) -> Tensor:
        self.state["step"] += 1
        self.state["history"].append(self.state["step"])
        return h.tanh() if self.state["step"] > 1 else h


@case()
class KeepsActivation(Base):
    """The activation of the step before is part of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.last_mean = None

    def middle(self, h: Tensor) -> Tensor:
        scale = 1.0 if self.last_mean is None else 1.0 + self.last_mean
        self.last_mean = h.detach().mean()
        return h.tanh() * scale


@case()
class RecentNorms(Base):
    """A tensor attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(6)

    def middle(self, h: Tensor) -> Tensor:
        self.seen += h.detach().mean(0)
        return h.tanh() + self.seen


def stateful_objective() -> Job:
    calls = [0]

    def objective(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * calls[0]

    return job(mlp, objective=objective)


CASES["stateful_objective"] = stateful_objective


@case()
class LateUnfreeze(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.steps = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        if self.steps > 1:
            self.first.requires_grad_(True)
        return super().forward(x)


@case()
class PartlyInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        self.drop.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(self.norm(x)))


@case()
class EvalInForward(nn.Module):
    """An expert that is frozen and evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        self.teacher.eval()
        with torch.no_grad():
            x = self.teacher(x)
        return self.head(x)


@case()
class GivenInEvalMode(nn.Module):
    """The constructor sets a part to evaluation, as from_pretrained does for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


# ---- running statistics


def norm_net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def _norm_case(name: str, make: Callable[[], nn.Module]) -> None:
    CASES[name] = lambda: job(lambda: norm_net(make()), images())


_norm_case("batch_norm", lambda: nn.BatchNorm2d(4))
_norm_case("batch_norm_cumulative", lambda: nn.BatchNorm2d(4, momentum=None))
_norm_case("batch_norm_untracked", lambda: nn.BatchNorm2d(4, track_running_stats=False))
_norm_case("instance_norm_tracked", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
_norm_case("group_norm", lambda: nn.GroupNorm(2, 4))
_norm_case("sync_batch_norm_name", lambda: nn.BatchNorm2d(4, momentum=0.5, affine=False))


# ---- checkpointing


@case()
class CheckpointedReentrant(Base):
    def middle(self, h: Tensor) -> Tensor:
        return checkpoint.checkpoint(lambda z: z.tanh() * z.sigmoid(), h, use_reentrant=True)


@case()
class CheckpointedPlain(Base):
    def middle(self, h: Tensor) -> Tensor:
        return checkpoint.checkpoint(lambda z: z.tanh() * z.sigmoid(), h, use_reentrant=False)


@case()
class CheckpointedFirstLayer(Base):
    """No input of the checkpoint requires a gradient: reentrant checkpointing trains nothing inside, as in eager."""

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint.checkpoint(self.first, x, use_reentrant=True).tanh())


@case()
class CheckpointedSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint.checkpoint_sequential(self.layers, 2, x, use_reentrant=False))


# ---- writes into slices and views


@case()
class AddsToColumn(Base):
    def middle(self, h: Tensor) -> Tensor:
        h[:, 1] += 1
        h[:, 2:4] *= 2
        return h.tanh()


@case()
class FillsOutput(Base):
    def middle(self, h: Tensor) -> Tensor:
        out = torch.zeros(h.shape[0], 6)
        out[:, :4] = h[:, :4].tanh()
        out[:, 4:].copy_(h[:, 4:].sigmoid())
        return out


@case()
class ViewOfView(Base):
    def middle(self, h: Tensor) -> Tensor:
        h = h * 1.0
        h.view(-1, 2, 3)[:, 0].transpose(0, 1)[1].mul_(3.0)
        h.t()[2].add_(h[:, 3])
        return h.tanh()


@case()
class IndexPut(Base):
    def middle(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, torch.tensor([0, 2])] = h[:, torch.tensor([1, 3])].sigmoid()
        h.index_put_(
            (torch.arange(h.shape[0]), torch.zeros(h.shape[0], dtype=torch.long)), h[:, 5], accumulate=True
        )
        return h.tanh()


@case()
class MaskedWrites(Base):
    def middle(self, h: Tensor) -> Tensor:
        h = h.clone()
        mask = torch.tensor([True, False, True, False, True, False]).expand_as(h)
        h.masked_scatter_(mask, h.flip(1).contiguous() * 2)
        h.masked_fill_(h < -0.5, 0.1)
        return h.tanh()


@case()
class BooleanMaskWrite(Base):
    def middle(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[h > 0.3] = 0.0
        return h.tanh()


@case()
class ScatterInPlace(Base):
    def middle(self, h: Tensor) -> Tensor:
        out = h.new_zeros(h.shape)
        out.scatter_add_(1, torch.tensor([[0, 1, 0, 2, 3, 1]]).expand(h.shape[0], 6), h)
        out[:, -1].fill_(0.5)
        return out.tanh()


@case()
class FillsRowByRow(Base):
    def middle(self, h: Tensor) -> Tensor:
        out = torch.empty_like(h)
        for column in range(6):
            out[:, column] = h[:, column] * (column + 1)
        return out.relu_()


@case()
class WritesIntoTheBatch(Base):
    def forward(self, x: Tensor) -> Any:
        x[:, 0] = 0.0
        x.mul_(2.0)
        return super().forward(x)


# ---- dtypes


@case(functools.partial(vectors, dtype=torch.float64))
def float64_model() -> nn.Module:
    return mlp().double()


@case(functools.partial(vectors, dtype=torch.bfloat16))
def bfloat16_model() -> nn.Module:
    return mlp().bfloat16()


@case(functools.partial(vectors, dtype=torch.float16))
def float16_model() -> nn.Module:
    return mlp().half()


@case()
class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6).double(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x.double()).tanh().float())


@case(functools.partial(vectors, dtype=torch.float64))
class Float64Data(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward((x * (1 + 1e-9)).float())


@case()
class ComplexInside(Base):
    def middle(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h) * torch.polar(torch.ones(4), torch.arange(4.0)), n=6).tanh()


@case()
class ComplexParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def middle(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h) * self.filter, n=6).tanh()


@case()
class OddBuffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((6,), float("-inf")).masked_fill(torch.arange(6) < 4, 0.0))
        self.register_buffer("flags", torch.tensor([True, False, True, True, True, True]))
        self.register_buffer("bytes", torch.arange(6, dtype=torch.uint8))
        self.register_buffer("phase", torch.tensor([1j, 2.0], dtype=torch.complex64))
        self.register_buffer("hidden", torch.ones(6, dtype=torch.float16), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("count", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("precise", torch.linspace(0, 1, 6, dtype=torch.float64))

    def middle(self, h: Tensor) -> Tensor:
        self.count += 1
        self.precise *= 0.5
        h = (h + self.mask).softmax(1) * self.flags + self.bytes * 0.01 + self.hidden.float()
        return h * self.phase.abs().sum() + self.precise.float()


# ---- autograd functions and transforms


class ScaledSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x * ctx.scale).cos() * ctx.scale * 0.5, None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.exp(), x.argmax(1), x.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_exp: Tensor, _: Any, grad_abs: Tensor) -> Any:
        x, exp = ctx.saved_tensors
        return grad_exp * exp * 2 + grad_abs * x.sign()


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


@case()
class CustomFunction(Base):
    def middle(self, h: Tensor) -> Tensor:
        return ScaledSine.apply(h, 2.0)


@case()
class CustomFunctionSeveral(Base):
    def middle(self, h: Tensor) -> Tensor:
        exp, at, magnitude = TwoOutputs.apply(h)
        return (exp * magnitude + at[:, None]).tanh()


@case()
class GradientReversal(Base):
    def middle(self, h: Tensor) -> Tensor:
        return ReverseGradient.apply(h).tanh()


@case()
class StraightThrough(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()


@case()
class CompiledPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def middle(self, h: Tensor) -> Tensor:
        return self.inner(h)


@case()
class Vmapped(Base):
    def middle(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.tanh() * row.sum())(h)


@case()
class ConditionalOp(Base):
    def middle(self, h: Tensor) -> Tensor:
        return torch.cond(torch.tensor(True), lambda z: z.tanh(), lambda z: z.sin(), (h,))


@case()
class ConditionalOpOnValue(Base):
    def middle(self, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, lambda z: z.tanh(), lambda z: z.sin(), (h,))


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor
    note: str = "as people write them"


def as_pair(samples: list[Any]) -> Pair:
    return Pair(*(torch.stack(column) for column in zip(*samples, strict=True)))


@objective_case(mlp, collate=as_pair)
def batch_is_a_dataclass(model: Any, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


@case()
class ConditionOnValue(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h.tanh() if h.sum() > 0 else h.sin()


# ---- layers


@case()
class Dropped(Base):
    def middle(self, h: Tensor) -> Tensor:
        noisy = F.dropout(h, 0.3) + 0.1 * torch.randn_like(h)
        return noisy.tanh() * torch.bernoulli(torch.full_like(h, 0.8))


@case(tokens)
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embed(x).mean(1))


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=0.1)


@case(lambda: tokens(vocabulary=30), optimizer={"embed": sparse_adam, "*": sgd})
class SparseRows(nn.Module):
    """An optimizer that updates the rows that are there; those of the first token have gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head((self.embed(x) * torch.tensor([[0.0], [1], [1], [1], [1]])).mean(1))


@case(tokens)
class PackedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 6), nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        lengths = 1 + x[:, 0] % 5
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        return self.head(h[-1])


@case(tokens)
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(10, 3)
        self.rnn = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(self.embed(x))[0].mean(1))


@case(tokens)
class MaskedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out = self.body(h, h, tgt_mask=causal, src_key_padding_mask=x == 0, memory_key_padding_mask=x == 0)
        return self.head(out.mean(1))


@case()
def weight_normed() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[2], dim=None)
    return model


@case()
def spectral_normed() -> nn.Module:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    parametrizations.orthogonal(model[2])
    return model


@case()
def old_spectral_norm() -> nn.Module:
    model = mlp()
    nn.utils.spectral_norm(model[0])
    nn.utils.weight_norm(model[2])
    return model


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@case()
class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        parametrize.register_parametrization(self.inner, "weight", Symmetric())

    def middle(self, h: Tensor) -> Tensor:
        with parametrize.cached():
            return self.inner(self.inner(h)).tanh()


@case()
class TiedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.a, self.b, self.head = shared, shared, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.b(self.a(x).tanh()).tanh())


@case()
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        nn.init.normal_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x)) * 0.5


@case()
def lora() -> nn.Module:
    model = mlp()
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    return model


@case()
class UnregisteredTensors(Base):
    """Constants of the constructor that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.linspace(0, 1, 6)
        self.fixed = [nn.Linear(6, 6)]

    def middle(self, h: Tensor) -> Tensor:
        out: Tensor = self.fixed[0](h + self.shift).tanh()
        return out


@case()
class RebindsBuffer(Base):
    """The backward needs what the buffer was before."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def middle(self, h: Tensor) -> Tensor:
        out = (h * self.scale).tanh()
        self.scale = self.scale * 0.9 + 0.1 * h.detach().mean(0)
        return out


@case()
class UnusedParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


@case()
class MomentumTeacher(nn.Module):
    """A buffer that follows a parameter, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("slow", self.head.weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.head.weight, alpha=0.1)
        return self.head(x) + x @ self.slow.t()


@case()
class CentersWeights(Base):
    """A parameter is written in forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.first.weight.sub_(self.first.weight.mean())
        return super().forward(x)


@case()
class DataDetach(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h.tanh() * h.data.sigmoid() + h.detach()


@objective_case(mlp)
def regularized(model: Any, batch: Any) -> Tensor:
    decay = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-2 * decay


@objective_case(mlp)
def total_and_weight(model: Any, batch: Any) -> Any:
    keep = (batch[1] != 0).float()
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * keep).sum(), keep.sum()


@objective_case(mlp)
def contrastive(model: Any, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.t() / 0.5, torch.arange(z.shape[0]))


@objective_case(mlp)
def loss_used_twice(model: Any, batch: Any) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss + loss.square() + loss.detach() * 0.1
