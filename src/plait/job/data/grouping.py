"""Collate functions whose batches hold something of every sample for itself: the boxes of each image.

In: the user's function. Out: one that returns the same, with such lists and tuples as `Objects`. A list is one where it
has an entry more for one sample more; a pair of tensors, made of two samples, has not.
"""

from collections.abc import Callable
from typing import Any

from plait.job.batch import Objects, copied, tensors_in
from plait.job.generators import kept_generators

Path = tuple[Any, ...]


class Grouping:
    """The user's function, and what is known of the lists that it returns."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._own = collate
        self._by_sample: dict[Path, bool] = {}
        """Of a list, by its place in a batch: whether it has an entry for each sample."""

    def __call__(self, samples: list[Any]) -> Any:
        made = self._own(samples)
        try:
            return self._with_lists(made, samples)
        except RecursionError:  # samples that are nested deeper than Python calls: they are their own leaves
            return made

    def _with_lists(self, made: Any, samples: list[Any]) -> Any:
        number = len(samples)
        found = [path for path, entry in self._lists_in(made, ()) if len(entry) == number]
        if any(path not in self._by_sample for path in found):
            with kept_generators():  # what it draws for a comparison is no part of a run
                more = dict(self._lists_in(self._own([*samples, samples[0]]), ()))
            for path in found:
                self._by_sample.setdefault(path, path in more and len(more[path]) == number + 1)
        return self._grouped(made, ()) if any(self._by_sample.get(path) for path in found) else made

    def _grouped(self, batch: Any, path: Path) -> Any:
        if type(batch) in (list, tuple):
            if self._by_sample.get(path):
                return Objects(batch)
            return type(batch)(self._grouped(entry, (*path, at)) for at, entry in enumerate(batch))
        if isinstance(batch, dict):
            keys = {id(value): key for key, value in batch.items()}
            return copied(batch, lambda value: self._grouped(value, (*path, keys[id(value)])))
        return batch

    def _lists_in(self, batch: Any, path: Path) -> list[tuple[Path, Any]]:
        """Lists and tuples with tensors in them, with their places; what is inside of a sample's own does not count."""
        found: list[tuple[Path, Any]] = []
        self._look(batch, path, found)
        return found

    def _look(self, batch: Any, path: Path, found: list[tuple[Path, Any]]) -> bool:
        """Add what is found in a part of a batch. Each part is looked at once. Out: whether tensors are in it."""
        if isinstance(batch, dict):
            inside = [self._look(entry, (*path, key), found) for key, entry in batch.items()]
            return any(inside)
        if type(batch) not in (list, tuple) or self._by_sample.get(path):
            holds = next(tensors_in(batch), None) is not None
        else:
            inside = [self._look(entry, (*path, at), found) for at, entry in enumerate(batch)]
            holds = any(inside)
        if holds and type(batch) in (list, tuple):
            found.append((path, batch))
        return holds
