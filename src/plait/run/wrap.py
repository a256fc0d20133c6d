"""A model in a loop of the user's own: `loss.backward()` leaves the gradients of the whole batch on every rank.

In: a module, and ranks that torchrun or `plait.launch` started (or one process alone). Out: the module, wrapped as
DistributedDataParallel wraps it. Gradients are those that one process would have of all ranks' samples: each rank's
loss weighs what it is a mean of, read off its autograd graph as in models that are not captured, and batch norm has the
statistics of all. All ranks must run backward equally often. What a rank draws at random is its own.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from plait.run.eager.company import Company
from plait.run.eager.statistics import WholeStatistics
from plait.run.start.party import TIMEOUT_S, meet, place_here
from plait.torch_private.intercept import intercepted

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BUCKET_BYTES = 25 << 20
"""Gradients that travel together, as in DistributedDataParallel."""
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
        self._num_samples: int | None = None
        """Of the last forward that a backward may follow."""
        self._outputs: list[Tensor] = []
        """Of that forward."""
        self.fraction = 1.0
        """What this rank's last loss weighed in that of all."""
        self.divisor: float | None = None
        """Losses that are sums over this number are parts of one loss: what all ranks count together."""
        self._touched: set[int] = set()
        """Parameters with a gradient that is not summed yet, by number."""
        self._is_whole = False
        """Whether gradients are sums over all ranks."""
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.ranks > 1:
            equalize(module)
            for number, parameter in enumerate(self._trained):
                parameter.register_post_accumulate_grad_hook(self._toucher(number))  # type: ignore[no-untyped-call]
            _wrapped.append(weakref.ref(self))
            _watch_backward()

    def _toucher(self, number: int) -> Callable[[Tensor], None]:
        own = weakref.ref(self)

        def touched(parameter: Tensor) -> None:
            if (wrapped := own()) is not None:
                wrapped._touched.add(number)

        return touched

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; while it trains, batch norm meets the other ranks."""
        if self.ranks == 1 or self._is_alone:
            return self.module(*args, **kwargs)
        count = _samples_of([*args, *kwargs.values()])
        stands_in = not count and not self._normalizes()
        run = partial(without_samples, self.module) if stands_in else self.module
        if not (self.module.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        self._num_samples = count
        company = self._company()
        with self._statistics(company):
            output = run(*args, **kwargs)
        company.leave()
        self._outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
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
            self._touched.clear()

    def _begin(self) -> None:
        """A pass adds to gradients that are sums over all ranks already: each rank has a part of those."""
        if self._is_whole:
            for number, parameter in enumerate(self._trained):
                if parameter.grad is not None:
                    parameter.grad.div_(self.ranks)
                    self._touched.add(number)
        self._is_whole = False

    def _end(self) -> None:
        """Sum over all ranks; parameters that any of them used have a gradient on all. The pass was for this model
        if there are any."""
        flags = torch.zeros(len(self._trained), dtype=torch.int32, device=self._device)
        flags[list(self._touched)] = 1
        dist.all_reduce(flags)
        numbers = flags.nonzero().flatten().tolist()
        if not numbers:
            return
        self._num_samples, self._outputs = None, []
        if not self._syncs:
            return
        with torch.no_grad():
            for number in numbers:
                parameter = self._trained[number]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for bucket in _buckets([self._trained[number] for number in numbers]):
                gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                dist.all_reduce(flat)
                parts = flat.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
        self._touched.clear()
        self._is_whole = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


_original = torch.autograd.backward


def _watch_backward() -> None:
    torch.autograd.backward = _backward  # `Tensor.backward` calls it by this name


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch's, with the loss weighed among those of all ranks; then gradients are summed."""
    root = tensors if isinstance(tensors, Tensor) else tensors[0] if len(tensors) == 1 else None
    alive = [one for one in (known() for known in _wrapped) if one is not None]
    waiting = [one for one in alive if one._num_samples is not None]
    if not waiting or root is None or root.numel() != 1 or inputs is not None:
        return _original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    lead = waiting[0]
    assert lead._num_samples is not None
    company = lead._company()
    fraction = _fraction(root, lead, company)
    for one in waiting:
        one.fraction = fraction
        one._begin()
    normalizing = next((one for one in waiting if one._normalizes()), lead)
    with normalizing._statistics(company):
        if fraction > 0:
            given = (
                grad_tensors if isinstance(grad_tensors, Tensor) or grad_tensors is None else grad_tensors[0]
            )
            scale = torch.full_like(root, fraction) if given is None else given * fraction
            _original(root, scale, retain_graph, create_graph)
        elif normalizing._normalizes() and normalizing._outputs:
            # the loss may be no number, but this rank's samples are in the statistics of others
            outputs = normalizing._outputs
            _original(outputs, [torch.zeros_like(output) for output in outputs])
    company.leave()
    for one in waiting:
        one._end()
    return None


def _fraction(loss: Tensor, model: Wrapped, company: Company) -> float:
    """What this rank's loss weighs in that of all; a sum counts whole, one over no samples not at all."""
    num_samples = model._num_samples
    assert num_samples is not None
    reading = read_loss(loss, num_samples, model.divisor)
    adds_up = reading is not None and reading.weight is None
    weight = float(num_samples) if reading is None or reading.weight is None else reading.weight
    told = [weight, float(adds_up and num_samples > 0), float(reading is None), float(num_samples)]
    rows = company.gather("weight", torch.tensor(told, dtype=torch.float64))
    untold = rows[rows[:, 3] > 0, 2]
    if bool(untold.any()) and not bool(untold.all()):  # weights of several kinds: all count samples
        return num_samples / float(rows[:, 3].sum())
    if bool(rows[:, 1].any()):  # on another rank a count of all may look like one of its own samples
        return (1.0 / model.ranks if model._averages_sums else 1.0) if num_samples else 0.0
    whole = float(rows[:, 0].sum())
    return weight / whole if whole > 0 else 0.0


def _samples_of(arguments: Sequence[Any]) -> int:
    """Rows of the first tensor; of images and targets in lists, as detection has them, the entries of the list."""
    lists = [value for value in arguments if isinstance(value, list | tuple) and value]
    targets = {len(value) for value in lists if all(isinstance(entry, Mapping) for entry in value)}
    for value in lists:
        of_tensors = all(isinstance(entry, Tensor) for entry in value)
        if of_tensors and (len(value) in targets or len({entry.shape[:1] for entry in value}) > 1):
            return len(value)
    first = next((tensor for tensor in tensors_in(list(arguments)) if tensor.dim()), None)
    return 1 if first is None else first.shape[0]


def _gathered(collective: Collective, tensor: Tensor) -> Tensor:
    own = tensor.reshape(-1).contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.cat(found)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, in the order of the backward."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in reversed(parameters):
        bucket = by_dtype.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(entry.numel() * entry.element_size() for entry in bucket) >= _BUCKET_BYTES:
            yield by_dtype.pop(parameter.dtype)
    yield from by_dtype.values()
