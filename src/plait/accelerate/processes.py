"""This process of a script among all of them: who it is, who goes first, what only some do, what all know.

In: processes that have met, or one alone. Out: Accelerate's `PartialState`, which its `Accelerator` is too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.accelerate.functions import DistributedType, device_of
from plait.errors import UsageError
from plait.job.batch import map_tensors
from plait.job.order import split
from plait.run.own_loop import gathered, padded
from plait.run.start.party import place_here
from plait.run.wrap import join_ranks


class PartialState:
    """A process of a script, which knows the others."""

    def __init__(self, cpu: bool = False, **unused: Any) -> None:
        """`cpu`: even where there is a GPU."""
        self.device = device_of(cpu)
        self.process_index, self.num_processes = join_ranks(self.device)
        place = place_here()
        self.local_process_index = self.process_index % (place.local_tasks if place else self.num_processes)
        """This rank's number on its host."""
        self._is_triggered = False

    @property
    def is_main_process(self) -> bool:
        """Rank 0 of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """The first of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """The last of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are others."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """By Accelerate's names."""
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the first process of each host alone."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """All ranks come here before any goes on."""
        if self.use_distributed:
            dist.all_reduce(torch.zeros(1, device=self.device))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process before all others."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each host before the others of that host."""
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if goes_first:
                self.wait_for_everyone()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing but on the main process."""
        return _only(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing but on the first process of each host."""
        return _only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing but on the last process."""
        return _only(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A function that does nothing but on this process; without one, what makes a function such a one."""
        made = partial(_only, self.process_index == process_index)
        return made if function is None else made(function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """The same, by the number on its host."""
        made = partial(_only, self.local_process_index == local_process_index)
        return made if function is None else made(function)

    def gather(self, tree: Any) -> Any:
        """Tensors of all ranks one after the other along dim 0, in which they may differ."""
        return map_tensors(gathered, tree)

    def pad_across_processes(
        self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors as long as the longest rank's along `dim`."""
        return map_tensors(lambda tensor: padded(tensor, dim, pad_index, pad_first), tree)

    def reduce(self, tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over ranks."""

        def reduced(tensor: Tensor) -> Tensor:
            whole = tensor.detach().clone()
            if self.use_distributed:
                dist.all_reduce(whole)
            return whole * scale / (self.num_processes if reduction == "mean" else 1)

        return map_tensors(reduced, tree)

    def set_trigger(self) -> None:
        """This rank wants something, such as an end, of which all learn by `check_trigger`."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank wanted it since it was asked last; all ranks must ask."""
        wanted = float(self.reduce(torch.tensor(float(self._is_triggered), device=self.device)))
        self._is_triggered = self._is_triggered and not wanted
        return wanted > 0

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, a tuple, a tensor or a dict of them; with padding, the last entry again."""
        yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            if len({len(value) for value in inputs.values()}) > 1:
                lengths = {name: len(value) for name, value in inputs.items()}
                raise UsageError(
                    f"entries of {lengths} cannot be split alike.", fix="give lists of one length."
                )
            return {name: self._part(value, apply_padding) for name, value in inputs.items()}
        sizes = split(len(inputs), self.num_processes)
        begin = sum(sizes[: self.process_index])
        own = inputs[begin : begin + sizes[self.process_index]]
        missing = sizes[0] - len(own) if apply_padding else 0
        if not missing or not len(inputs):
            return own
        last = inputs[-1:]
        return torch.cat([own, *[last] * missing]) if isinstance(own, Tensor) else own + last * missing


def _only(here: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return chosen
