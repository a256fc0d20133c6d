"""Count what a machine keeps alive while it runs a step.

In: a machine. Out: the most bytes that were alive at once of what its ops made.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.program.instructions import Accumulate, Finish, Instruction, Update
from plait.run.interpret.machine import Machine


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage, each once."""
    found = [leaf.untyped_storage() for leaf in pytree.tree_leaves(list(tensors)) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in found}


class Live(TorchDispatchMode):
    """The bytes of all storages that ops make while it is on, and the most at any time."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = set(storages(known))
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = self.known | storages([args, kwargs]).keys()  # a view shows what others made
        for tensor in (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if size and not self.paused and key not in seen and key not in self.alive:
                self.alive[key] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, key)
        return result

    def forget(self, key: int) -> None:
        """The storage is gone, or counts as something else."""
        self.now -= self.alive.pop(key, 0)


class Activations:
    """Leaves the update out, and gradients that were handed over; tells the machine's own observer on."""

    def __init__(self, live: Live, machine: Machine) -> None:
        self.live, self.machine, self.next = live, machine, machine.observer

    def entering(self, step: int, instruction: Instruction, waiting: bool) -> None:
        self.next.entering(step, instruction, waiting)
        self.live.paused = isinstance(instruction, (Finish, Update))

    def hopped(self, step: int, hops: object) -> None:
        pass

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        self.next.done(step, instruction, start_ns, end_ns)
        if isinstance(instruction, Accumulate):
            for key in storages(self.machine.store._memory.views.values()):
                self.live.forget(key)
