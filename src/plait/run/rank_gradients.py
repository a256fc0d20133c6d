"""Gradients of a loop on several ranks: which are a rank's own, which are sums over all, and how they become sums.

In: parameters that are watched, for one model or for several that share them. Out: gradients that are sums over all
ranks. What is not summed in a pass is in a later one.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_BYTES = 25 << 20
"""Gradients that travel together, as in DistributedDataParallel."""


class RankGradients:
    """What is known of the gradients of this rank's parameters."""

    def __init__(self) -> None:
        self.is_passed = False
        """Whether a pass is under way whose gradients become sums."""
        self._own, self._whole = set[int](), set[int]()
        """Ids of parameters whose gradient is this rank's part of a sum; of those where it is the sum."""

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Be told of gradients that come."""
        self.forget(parameters)
        for parameter in parameters:
            if parameter.requires_grad:  # otherwise it was frozen before its model was copied
                parameter.register_hook(self._parter(weakref.ref(parameter)))  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(lambda own: self._own.add(id(own)))  # type: ignore[no-untyped-call]

    def _parter(self, known: "weakref.ref[Tensor]") -> Callable[[Tensor], None]:
        def comes(gradient: Tensor) -> None:
            if self.is_passed and (parameter := known()) is not None:
                self._part(parameter)

        return comes

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """What gradients they have is each rank's own affair."""
        numbers = {id(parameter) for parameter in parameters}
        self._own -= numbers
        self._whole -= numbers

    def _part(self, parameter: Tensor) -> None:
        """Its gradient is a sum over all ranks, to which a pass adds: each rank has a part of it."""
        if id(parameter) in self._whole and parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.div_(dist.get_world_size())
            self._own.add(id(parameter))
        self._whole.discard(id(parameter))

    def reached(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those that have a part of a sum on any rank; all ranks ask together."""
        flags = torch.tensor([id(parameter) in self._own for parameter in parameters], dtype=torch.int32)
        flags = flags.to(parameters[0].device)
        dist.all_reduce(flags)
        found = [parameters[number] for number in flags.nonzero().flatten().tolist()]
        for parameter in found:
            self._part(parameter)
        return found

    @torch.no_grad()
    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Sum over all ranks; all of these have a gradient then."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(parameters):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        numbers = {id(parameter) for parameter in parameters}
        self._own -= numbers
        self._whole |= numbers


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of one dtype each, in the order of the backward."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in reversed(parameters):
        bucket = by_dtype.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(entry.numel() * entry.element_size() for entry in bucket) >= _BUCKET_BYTES:
            yield by_dtype.pop(parameter.dtype)
    yield from by_dtype.values()
