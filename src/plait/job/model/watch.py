"""Python state that a forward pass changes, which a graph cannot show.

In: the objects that a job's code can reach (its model, its loss or objective, its hooks). Out: what changed while a
piece of it ran, and the way back. What is followed is in `places.py`; besides, the states of Python's and numpy's
random numbers.
"""

import random
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from plait.job.model.places import Held, differs, environment, joined, places_of
from plait.job.model.states import PLAIN
from plait.torch_private.autograd import version_of
from plait.torch_private.dispatch import without_modes
from plait.torch_private.fake import FakeTensor

__all__ = ["Change", "Watch", "joined"]

_LIMIT = 50_000
"""Objects that are followed, at most."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not what it was."""

    path: str
    """As the user would write it: `model.encoder.calls`."""
    tensor: Tensor | None
    """What is there now, where it is a tensor that was put there."""


class Watch:
    """The state of everything that is reachable from `roots`, as it was when this was made."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._held: list[Held] = []
        self._seen: dict[int, Any] = {}
        model = roots.get("model")
        self._own = {id(part) for part in model.modules()} if isinstance(model, nn.Module) else set()
        """Modules whose parameters and buffers are a run's to keep."""
        with without_modes():
            self._held.append(environment())
            for path, root in roots.items():
                self._visit(path, root)
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def changes(self) -> list[Change]:
        """What is different now."""
        with without_modes():
            return self._changes()

    def _changes(self) -> list[Change]:
        found = []
        for held in self._held:
            now = held.read()
            for key in [*now, *(key for key in held.contents if key not in now)]:
                if not _same(held, key, now):
                    found += _changes_of(joined(held.path, key), now.get(key))
        return found + [Change(f"the state of {name}", None) for name in self.generators()]

    def generators(self) -> tuple[str, ...]:
        """Generators of random numbers of the whole process that were drawn from."""
        found = ["Python's `random`"] if random.getstate() != self._random else []
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            key, position = numpy.random.get_state()[1:3]
            found += ["`numpy.random`"] if position != self._numpy[2] or (key != self._numpy[1]).any() else []
        return tuple(found)

    def restore(self) -> list[str]:
        """Put everything back; returns what could not be: places of iterators, values of large tensors."""
        lost = []
        for held in self._held:
            with without_modes():
                now = held.read()
                changed = [key for key in {**now, **held.contents} if not _same(held, key, now)]
                if changed:
                    held.write(held.contents)
                if not held.is_emptied:
                    lost += [joined(held.path, key) for key in changed if not _put_back(held, key)]
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        return lost

    def _visit(self, path: str, value: Any) -> None:
        stack = [(path, value)]
        while stack and len(self._seen) < _LIMIT:
            path, value = stack.pop()
            if isinstance(value, (*PLAIN, Tensor)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            for entry in places_of(path, value, id(value) not in self._own):
                self._held.append(entry)
                stack.extend((joined(entry.path, key), inner) for key, inner in entry.contents.items())


def _changes_of(path: str, value: Any) -> list[Change]:
    """What is in a place now: a tensor, nothing but tensors in a container (cosines and sines), or anything else."""
    if isinstance(value, Tensor):
        return [Change(path, value)]
    entries = dict(enumerate(value)) if type(value) in (tuple, list) else value if type(value) is dict else {}
    inner = [change for key, entry in entries.items() for change in _changes_of(joined(path, key), entry)]
    return inner if inner and all(change.tensor is not None for change in inner) else [Change(path, None)]


def _put_back(held: Held, key: Any) -> bool:
    """Whether a place that was written is as it was; what a tensor held is copied into it again."""
    now, before = held.read().get(key), held.contents.get(key)
    if now is not before or not isinstance(before, Tensor):
        return now is before or (isinstance(now, PLAIN) and now == before)
    if key in held.values:
        before.data.copy_(held.values[key])
    return key in held.values or isinstance(before, FakeTensor)


def _same(held: Held, key: Any, now: dict[Any, Any]) -> bool:
    if key not in now or key not in held.contents:
        return False
    before, after = held.contents[key], now[key]
    if isinstance(after, Tensor):
        kept = held.values.get(key)  # batch norm writes its statistics without counting that
        written = version_of(after) != held.versions.get(key)
        return before is after and not written and (kept is None or not differs(after, kept))
    if isinstance(before, PLAIN) and isinstance(after, PLAIN):
        return type(before) is type(after) and (before == after or before != before)
    return before is after
