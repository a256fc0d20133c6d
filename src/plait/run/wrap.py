"""A model in a loop of the user's own: `loss.backward()` leaves the gradients of the whole batch on every rank.

In: a module, and ranks that torchrun or `plait.launch` started (or one process alone). Out: the module, wrapped as
DistributedDataParallel wraps it. Gradients are those that one process would have of all ranks' samples: each rank's
loss weighs what it is a mean of, read off its autograd graph as in models that are not captured, and batch norm has the
statistics of all. All ranks must run backward equally often. What a rank draws at random is its own.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import UsageError
from plait.job.batch import map_tensors, tensors_in
from plait.job.reading import read_loss
from plait.program.instructions import Collective
from plait.run.backward_pass import one_loss, reached, samples_of
from plait.run.eager.company import Company
from plait.run.eager.statistics import WholeStatistics
from plait.run.rank_gradients import RankGradients
from plait.run.start.party import TIMEOUT_S, meet, place_here
from plait.torch_private.intercept import intercepted

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_calls, _gradients = itertools.count(), RankGradients()
_wrapped: "list[weakref.ref[Wrapped]]" = []
"""Whom a backward pass may be for, in the order in which all ranks wrapped them."""


def join_ranks(device: torch.device) -> tuple[int, int]:
    """Meet the other ranks, where there are any and this process has not met them; (rank, ranks)."""
    if not dist.is_initialized():
        place = place_here()
        if place is None:
            return 0, 1
        own_gpus = device.type == "cuda" and place.local_tasks <= torch.cuda.device_count()
        meet("nccl" if own_gpus else "plait", TIMEOUT_S)
    return dist.get_rank(), dist.get_world_size()


def without_samples(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a model returns on no samples: it runs on a row of zeros, as many cannot run on none.

    Numbers that it returns become means over nothing.
    """

    def filled(tensor: Tensor) -> Tensor:
        return tensor.new_zeros((1, *tensor.shape[1:])) if tensor.dim() and not tensor.shape[0] else tensor

    def emptied(tensor: Tensor) -> Tensor:
        if not tensor.dim() and tensor.is_floating_point():
            return tensor.view(1)[:0].mean()
        return tensor[:0] if tensor.dim() and tensor.shape[0] == 1 else tensor

    given, named = map_tensors(filled, (args, kwargs))
    return map_tensors(emptied, function(*given, **named))


def equalize(module: nn.Module) -> None:
    """All ranks have rank 0's weights."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, 0)
            tensor.detach().copy_(whole)


class Wrapped(nn.Module):
    """A module whose gradients are those of all ranks' samples together; `module` is the user's own."""

    def __init__(self, module: nn.Module, *, averages_sums: bool = False) -> None:
        """`averages_sums`: losses that are sums are averaged over ranks, as DistributedDataParallel does with all."""
        super().__init__()
        self.module = module
        self._averages_sums = averages_sums
        first = next(module.parameters(), None)
        if first is None or not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError(
                f"{type(module).__name__} has no trainable parameter.", fix="wrap the model that is trained."
            )
        self.rank, self.ranks = join_ranks(first.device)
        self._device = first.device
        self._syncs, self._is_alone = True, False
        self._num_samples, self._called, self._awaits = 1, -1, False
        """Of the last forward in training: its samples, its number, whether no backward followed it."""
        self._outputs: list[Tensor] = []
        """Of that forward."""
        self._has_told = False
        """Whether it was said that a loss does not show what it is a mean of."""
        self.fraction = 1.0
        """What this rank's last loss weighed in that of all."""
        self.divisor: float | None = None
        """Losses that are sums over this number are parts of one loss: what all ranks count together."""
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.ranks > 1:
            equalize(module)
            self._watch()

    def _watch(self) -> None:
        """Be told of gradients that come, and of passes."""
        _gradients.watch(self._trained)
        _wrapped.append(weakref.ref(self))
        torch.autograd.backward = _backward  # `Tensor.backward` calls it by this name

    def __getstate__(self) -> dict[str, Any]:
        """Copies, and what is saved, have nothing of a pass."""
        return {**self.__dict__, "_outputs": [], "_awaits": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.rank, self.ranks = join_ranks(self._device)
        if self.ranks > 1:
            self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; while it trains, batch norm meets the other ranks."""
        if self.ranks == 1 or self._is_alone:
            return self.module(*args, **kwargs)
        count = samples_of([*args, *kwargs.values()])
        stands_in = not count and not self._normalizes()
        run = partial(without_samples, self.module) if stands_in else self.module
        if not (self.module.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        self._num_samples, self._called, self._awaits = count, next(_calls), True
        company = self._company()
        with self._statistics(company):
            output = run(*args, **kwargs)
        company.leave()
        self._outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return output

    def _by_name(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Another method than `forward`: a call of the model as well where it returns what can be differentiated."""
        if self._is_alone or not (self.module.training and torch.is_grad_enabled()):
            return method(*args, **kwargs)
        company = self._company()
        with self._statistics(company):
            output = method(*args, **kwargs)
        if company.has_met:
            company.leave()
        if outputs := [tensor for tensor in tensors_in(output) if tensor.requires_grad]:
            self._num_samples = samples_of([*args, *kwargs.values()])
            self._called, self._awaits, self._outputs = next(_calls), True, outputs
        return output

    def _company(self) -> Company:
        return Company(self.ranks, _gathered, self._device)

    def _normalizes(self) -> bool:
        return any(isinstance(module, BATCH_NORMS) and module.training for module in self.module.modules())

    def _statistics(self, company: Company) -> Any:
        return intercepted(WholeStatistics(company, self.module).takers() if self._normalizes() else ())

    @property
    def require_backward_grad_sync(self) -> bool:
        """DistributedDataParallel's name of what `no_sync` changes, which loops set themselves (nanoGPT's)."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._syncs = wanted

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes within it stay this rank's, until the next one outside of it."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Losses and gradients of passes within it are this rank's own, and stay so: each rank trains for itself."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before
            _gradients.forget(self._trained)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
            is_own = self.ranks > 1 and getattr(found, "__self__", None) is self.module
            return partial(self._by_name, found) if is_own else found


_original = torch.autograd.backward


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch's, with the loss weighed among those of all ranks; then gradients are summed."""
    alive = [one for one in (known() for known in _wrapped) if one is not None and not one._is_alone]
    if not alive or _gradients.is_passed:  # a pass within a pass, as checkpointing has them
        return _original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    root, given = one_loss(tensors, grad_tensors)
    waiting = _meant(root, alive)
    if not waiting:
        return _original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    lead = max(waiting, key=lambda one: one._called)
    company = lead._company()
    fraction = _fraction(root, lead, company)
    for one in waiting:
        one.fraction = fraction
    _gradients.is_passed = True
    try:
        _pass(root, given, fraction, waiting, company, retain_graph, create_graph, inputs)
    finally:
        _gradients.is_passed = False
    company.leave()
    _settle(waiting)
    return None


def _settle(waiting: list[Wrapped]) -> None:
    """Gradients become sums; the pass was for the models whose parameters it reached on any rank."""
    found = _gradients.reached(list({id(p): p for one in waiting for p in one._trained}.values()))
    numbers, summed = {id(parameter) for parameter in found}, set[int]()
    for one in waiting:
        own = {id(parameter) for parameter in one._trained} & numbers
        if own:
            one._awaits, one._outputs = False, []
        summed |= own if one._syncs else set()
    _gradients.add_up([parameter for parameter in found if id(parameter) in summed])


def _meant(root: Tensor, alive: list[Wrapped]) -> list[Wrapped]:
    """Whom a pass may be for: models that were called since their last one, and those that the graph shows."""
    if all(one._awaits for one in alive):
        return alive
    leaves = reached(root)
    return [one for one in alive if one._awaits or any(id(p) in leaves for p in one._trained)]


def _pass(
    root: Tensor,
    given: Tensor | None,
    fraction: float,
    waiting: list[Wrapped],
    company: Company,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Any,
) -> None:
    normalizing = [one for one in waiting if one._called >= 0 and one._normalizes()]
    statistics = WholeStatistics(company, nn.ModuleList(one.module for one in normalizing)).takers()
    with intercepted(statistics if normalizing else ()):
        if fraction > 0:
            scale = torch.full_like(root, fraction) if given is None else given * fraction
            _original(root, scale, retain_graph, create_graph, inputs=inputs)
        elif outputs := [output for one in normalizing for output in one._outputs]:
            # the loss may be no number, but this rank's samples are in the statistics of others
            _original(outputs, [torch.zeros_like(output) for output in outputs], inputs=inputs)


def _fraction(loss: Tensor, model: Wrapped, company: Company) -> float:
    """What this rank's loss weighs in that of all; a sum counts whole, one over no samples not at all."""
    num_samples = model._num_samples
    reading = read_loss(loss, num_samples, model.divisor)
    adds_up = reading is not None and reading.weight is None
    weight = float(num_samples) if reading is None or reading.weight is None else reading.weight
    told = [weight, float(adds_up and num_samples > 0), float(reading is None), float(num_samples)]
    rows = company.gather("weight", torch.tensor(told, dtype=torch.float64))
    untold = rows[rows[:, 3] > 0, 2]
    if bool(untold.any()) and model.rank == 0 and not model._has_told:
        model._has_told = True
        warnings.warn(
            f"the loss ({type(loss.grad_fn).__name__}) does not show what it is a mean of: a rank's counts by its "
            "samples, as for a mean over them. If samples meet in it (a ratio of sums), one process has another.",
            stacklevel=4,
        )
    if bool(untold.any()) and not bool(untold.all()):  # weights of several kinds: all count samples
        return num_samples / float(rows[:, 3].sum())
    if bool(rows[:, 1].any()):  # on another rank a count of all may look like one of its own samples
        return (1.0 / model.ranks if model._averages_sums else 1.0) if num_samples else 0.0
    whole = float(rows[:, 0].sum())
    return weight / whole if whole > 0 else 0.0


def _gathered(collective: Collective, tensor: Tensor) -> Tensor:
    own = tensor.reshape(-1).contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.cat(found)
