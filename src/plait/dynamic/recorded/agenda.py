"""Which recorded operations run together, and in which order.

In: a recording. Out: `Work`: groups of operations of one signature, none before what it needs. Of the signatures with
operations that could run now, the one goes first whose remaining operations lie least deep on average, so that others
wait until more of theirs are ready; among equals, the one with more (DyNet's agenda: Neubig et al., NeurIPS 2017).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.dynamic.evaluate import Group, Rows, Work
from plait.dynamic.recorded.blocks import Condensed
from plait.dynamic.recorded.signatures import Signature
from plait.dynamic.row_graphs import RowFunction
from plait.dynamic.structure import Array

GIVEN = "given"
"""The kind of family of values that were there before: (GIVEN, buffer)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agenda:
    """The order in which a recording is run."""

    order: tuple[tuple[Signature, Array], ...]
    """Groups: a signature, and which calls."""

    @classmethod
    def of(cls, recording: Condensed) -> "Agenda":
        """By average depth."""
        signatures = recording.signatures.numbered
        kind = np.array(recording.kinds, dtype=np.int64)
        if not len(kind):
            return cls(order=())
        counts = np.array([len(signature.sees) for signature in signatures])[kind]
        taken = np.array(recording.taken, dtype=np.int64)
        users = np.repeat(np.arange(len(kind)), counts)
        made_by = np.searchsorted(np.array(recording.firsts), taken, side="right") - 1
        is_made = np.ones(recording.num_values, dtype=bool)
        is_made[list(recording.given)] = False
        users, made_by = users[is_made[taken]], made_by[is_made[taken]]
        waiting = np.bincount(users, minlength=len(kind))
        by_maker = np.argsort(made_by, kind="stable")
        starts = np.searchsorted(made_by[by_maker], np.arange(len(kind) + 1))
        users = users[by_maker]
        depth = _depths(waiting.copy(), starts, users)

        highest = int(kind.max()) + 1
        left, deep = np.bincount(kind, minlength=highest), np.bincount(kind, weights=depth, minlength=highest)
        ready: dict[int, list[Array]] = {}
        _add(ready, kind, np.flatnonzero(waiting == 0))
        order = []
        while ready:
            number = min(ready, key=lambda k: (deep[k] / left[k], -sum(map(len, ready[k]))))
            group = np.concatenate(ready.pop(number))
            left[number] -= len(group)
            deep[number] -= depth[group].sum()
            order.append((signatures[number], group))
            _add(ready, kind, _freed(waiting, starts, users, group))
        return cls(order=tuple(order))


def _freed(waiting: Array, starts: Array, users: Array, done: Array) -> Array:
    """The calls that waited only for those that are done now."""
    sizes = starts[done + 1] - starts[done]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    told, times = np.unique(users[np.repeat(starts[done], sizes) + within], return_counts=True)
    waiting[told] -= times
    freed: Array = told[waiting[told] == 0]
    return freed


def _depths(waiting: Array, starts: Array, users: Array) -> Array:
    """How many calls come one after the other before each, at least."""
    depths = np.zeros(len(waiting), dtype=np.int64)
    ready, depth = np.flatnonzero(waiting == 0), 0
    while len(ready):
        depths[ready] = depth
        ready, depth = _freed(waiting, starts, users, ready), depth + 1
    return depths


def _add(ready: dict[int, list[Array]], kind: Array, calls: Array) -> None:
    if not len(calls):
        return
    kinds = kind[calls]
    by_kind = np.argsort(kinds, kind="stable")
    kinds, calls = kinds[by_kind], calls[by_kind]
    cuts = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    for part, number in zip(np.split(calls, cuts), kinds[np.append(0, cuts)].tolist(), strict=True):
        ready.setdefault(number, []).append(part)


class Planned:
    """A recording as groups over buffers."""

    def __init__(self, recording: Condensed, agenda: Agenda) -> None:
        self._recording = recording
        self._buffers: dict[int, int] = {}
        self._examples: list[Tensor] = []
        self._sizes: list[int] = []
        self._rows = np.zeros(recording.num_values, dtype=np.int64)
        self._firsts = np.array(recording.firsts, dtype=np.int64)
        self._taken = np.array(recording.taken, dtype=np.int64)
        numbered = recording.signatures.numbered
        counts = np.array([len(numbered[kind].sees) for kind in recording.kinds], dtype=np.int64)
        self._starts = np.cumsum(counts) - counts
        self.num_rows: dict[Any, int] = {}
        self.inputs: dict[Any, list[Tensor]] = {}
        self.groups: list[Group] = []
        self._place_given()
        for signature, calls in agenda.order:
            self._place(signature, calls)

    def work(self, functions: Mapping[Any, RowFunction], read: Sequence[tuple[int, int]]) -> Work:
        """All of it, of which the values at `read` are looked at."""
        return Work(
            read=tuple(read),
            groups=tuple(self.groups),
            functions=functions,
            num_rows=self.num_rows,
            buffers=tuple(zip(self._sizes, self._examples, strict=True)),
        )

    def where(self, number: int, like: Tensor) -> tuple[int, int]:
        """The buffer and row of a value."""
        return self._buffers[id(like)], int(self._rows[number])

    def _buffer(self, like: Tensor, num_rows: int) -> tuple[int, int]:
        """Room in the buffer of such tensors: which, and from which row on."""
        if id(like) not in self._buffers:
            self._buffers[id(like)] = len(self._sizes)
            real = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self._examples.append(real)
            self._sizes.append(0)
        buffer = self._buffers[id(like)]
        start = self._sizes[buffer]
        self._sizes[buffer] += num_rows
        return buffer, start

    def _place_given(self) -> None:
        alike: dict[int, list[int]] = {}
        likes: dict[int, Tensor] = {}
        for number, tensor in self._recording.given.items():
            like = self._recording.signatures.example(tensor)
            alike.setdefault(id(like), []).append(number)
            likes[id(like)] = like
        for key, numbers in alike.items():
            buffer, start = self._buffer(likes[key], len(numbers))
            self._rows[numbers] = start + np.arange(len(numbers))
            family = (GIVEN, key)
            self.num_rows[family] = len(numbers)
            self.inputs[family] = [torch.stack([self._recording.given[number] for number in numbers])]
            self.groups.append(
                Group(family=family, within=0, num_rows=len(numbers), seen=(), into=((buffer, start),))
            )

    def _place(self, signature: Signature, calls: Array) -> None:
        takes = self._taken[self._starts[calls][:, None] + np.arange(len(signature.sees))]
        if len(signature.sees):
            order = np.argsort(self._rows[takes[:, 0]], kind="stable")
            takes, calls = takes[order], calls[order]
        first = self._firsts[calls]
        seen = tuple(
            (self._buffers[id(like)], _rows(self._rows[takes[:, index]]))
            for index, like in enumerate(signature.sees)
        )
        into = []
        for index, like in enumerate(signature.makes):
            buffer, start = self._buffer(like, len(calls))
            self._rows[first + index] = start + np.arange(len(calls))
            into.append((buffer, start))
        within = self.num_rows.get(signature, 0)
        self.num_rows[signature] = within + len(calls)
        self.groups.append(
            Group(family=signature, within=within, num_rows=len(calls), seen=seen, into=tuple(into))
        )


def _rows(rows: Array) -> Rows:
    """A slice where rows follow each other: nothing has to be gathered then."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
