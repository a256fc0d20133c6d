"""Recorded operations that always come one after the other, as one.

In: a recording. Out: a smaller one, in which a stretch of the user's code without a branch, such as a tree's cell, is
one operation: it is ordered once, and evaluated as a vertex function is. Two operations belong together when neither
was ever seen next to another one; where one was, at any time, there is a branch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from plait.dynamic.recorded.recording import Recording
from plait.dynamic.recorded.signatures import Hole, Shared, Signature, Signatures, name_of
from plait.dynamic.structure import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Condensed:
    """A recording of blocks. Values have new numbers."""

    signatures: Signatures
    kinds: Array
    """The signature of each block."""
    firsts: Array
    """The first value that each block makes; the others follow."""
    taken: Array
    """The values that blocks take, one block after the other."""
    given: Mapping[int, Tensor]
    """Values that were there before."""
    num_values: int
    now: Array
    """The new number of each recorded value; -1: nobody needs it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """Signatures one after the other, as a function."""

    parts: tuple[Signature, ...]
    wiring: tuple[int, ...]
    """Of each value that a part takes: which of those made before it is; -1: the next one from outside."""
    out: tuple[int, ...]
    """Which of the values that parts make are needed."""

    @property
    def __name__(self) -> str:
        return " and ".join(dict.fromkeys(name_of(part.function) for part in self.parts))

    def __call__(self, *values: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        outside, wiring = iter(values), iter(self.wiring)
        for part in self.parts:
            seen = [next(outside) if (at := next(wiring)) < 0 else made[at] for _ in part.sees]
            made += part.call(seen, parameters)
        return tuple(made[at] for at in self.out)


@dataclass(kw_only=True, slots=True)
class _BlockKind:
    """Blocks that are alike, in one recording."""

    parts: tuple[Signature, ...]
    wiring: tuple[int, ...]
    takes: Array
    """Of each block, the values from outside."""
    makes: Array
    """Of each block, the values that its parts make."""


def condensed(recording: Recording, results: Iterable[int]) -> Condensed:
    """The recording with blocks as operations; `results` are values that somebody asks for at the end."""
    signatures = recording.signatures
    if not recording.kinds:
        return _renumbered(recording, (), np.zeros(0, dtype=bool))
    tokens, firsts = np.array(recording.kinds), recording.firsts
    taken = np.array(recording.taken, dtype=np.int64)
    starts = _starts(tokens, np.array(recording.begins), signatures)
    counts = np.array([len(each.sees) for each in signatures.of_token])[tokens]
    maker = np.searchsorted(firsts, taken, side="right") - 1
    is_given = np.zeros(recording.num_values, dtype=bool)
    is_given[list(recording.given)] = True
    maker[is_given[taken]] = -1
    block = np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1
    needed = np.zeros(recording.num_values, dtype=bool)
    outside = (maker < 0) | (block[maker] != np.repeat(block, counts))
    needed[taken[outside]] = True
    needed[list(results)] = True

    kinds: list[_BlockKind] = []
    first_taken = np.cumsum(counts) - counts
    ends = np.append(starts[1:], len(tokens))
    for head in np.unique(tokens[starts]):
        here = np.flatnonzero(tokens[starts] == head)
        at, length = starts[here], int(ends[here[0]] - starts[here[0]])
        parts = tuple(signatures.of_token[token] for token in tokens[at[0] : at[0] + length])
        kinds += _alike(parts, at, firsts, taken, maker, first_taken)
    return _renumbered(recording, kinds, needed)


def _starts(tokens: Array, begins: Array, signatures: Signatures) -> Array:
    """Where blocks begin."""
    before, after = tokens[:-1], tokens[1:]
    inside = np.ones(len(tokens), dtype=bool)
    inside[begins[begins < len(tokens)]] = False
    pairs = np.stack(
        divmod(np.unique((before * len(signatures.of_token) + after)[inside[1:]]), len(signatures.of_token))
    )
    ends = np.unique(tokens[np.append(np.flatnonzero(~inside)[1:] - 1, len(tokens) - 1)])
    signatures.note_neighbours(pairs.T.tolist(), np.unique(tokens[~inside]).tolist(), ends.tolist())
    follower, leader = np.array(signatures.follower), np.array(signatures.leader)
    joined = inside[1:] & (follower[before] == after) & (leader[after] == before)
    return np.append(0, 1 + np.flatnonzero(~joined))


def _alike(
    parts: tuple[Signature, ...], at: Array, firsts: Array, taken: Array, maker: Array, first_taken: Array
) -> list[_BlockKind]:
    """The blocks at `at` by how their parts are connected: nearly always in one way."""
    num_made = [len(part.makes) for part in parts]
    offsets = np.cumsum([0, *num_made])
    owner = np.repeat(np.arange(len(parts)), num_made)
    makes = firsts[at[:, None] + owner] + (np.arange(offsets[-1]) - offsets[owner])
    slots = first_taken[at][:, None] + np.arange(sum(len(part.sees) for part in parts))
    values, makers = taken[slots], maker[slots]
    inside = makers >= at[:, None]
    within = np.where(inside, makers - at[:, None], 0)
    wired = np.where(inside, offsets[within] + values - firsts[np.where(inside, makers, 0)], -1)
    found = []
    left = np.arange(len(at))
    while len(left):
        wiring = wired[left[0]]
        same = (wired[left] == wiring).all(1)
        rows, left = left[same], left[~same]
        found.append(
            _BlockKind(
                parts=parts,
                wiring=tuple(wiring.tolist()),
                takes=values[rows][:, wiring < 0],
                makes=makes[rows],
            )
        )
    return found


def _renumbered(recording: Recording, kinds: Sequence[_BlockKind], needed: Array) -> Condensed:
    now = np.full(recording.num_values, -1, dtype=np.int64)
    total, told, firsts, takes = 0, [], [], []
    for kind in kinds:
        wanted: Array = np.any(needed[kind.makes], axis=0)
        if not wanted.any():
            continue  # nobody needs what it makes
        signature, wanted = _signature(kind, wanted, recording.signatures)
        num_blocks, num_made = len(kind.makes), int(wanted.sum())
        now[kind.makes[:, wanted]] = total + np.arange(num_blocks * num_made).reshape(num_blocks, num_made)
        told.append(np.full(num_blocks, signature.number))
        firsts.append(total + num_made * np.arange(num_blocks))
        takes.append(kind.takes.reshape(-1))
        total += num_blocks * num_made
    given = list(recording.given)
    now[given] = total + np.arange(len(given))
    nothing = np.zeros(0, dtype=np.int64)
    return Condensed(
        signatures=recording.signatures,
        kinds=np.concatenate([nothing, *told]),
        firsts=np.concatenate([nothing, *firsts]),
        taken=now[np.concatenate([nothing, *takes])],
        given={int(now[number]): recording.given[number] for number in given},
        num_values=total + len(given),
        now=now,
    )


def _signature(kind: _BlockKind, wanted: Array, signatures: Signatures) -> tuple[Signature, Array]:
    """The signature of such blocks, and which values it makes: all that were ever wanted of them."""
    if len(kind.parts) == 1:
        return kind.parts[0], np.ones_like(wanted)
    key = (tuple(part.number for part in kind.parts), kind.wiring)
    known = signatures.blocks.get(key)
    if known is not None and not (wanted & ~known[1]).any():
        return known
    if known is not None:
        wanted = wanted | known[1]
    made = [like for part in kind.parts for like in part.makes]
    seen = [like for part in kind.parts for like in part.sees]
    codes = [code for part in kind.parts for code in part.codes]
    out = tuple(np.flatnonzero(wanted).tolist())
    sees = tuple(like for like, at in zip(seen, kind.wiring, strict=True) if at < 0)
    parameters = {name: like for part in kind.parts for name, like in part.parameters.items()}
    signature = Signature(
        number=len(signatures.numbered),
        function=_Chain(kind.parts, kind.wiring, out),
        arguments=tuple(Hole(index) for index in range(len(sees))),
        keywords={"parameters": {name: Shared(name) for name in parameters}},
        sees=sees,
        makes=tuple(made[at] for at in out),
        codes=tuple(codes[at] for at in out),
        container=tuple,
        parameters=parameters,
        shares=False,
        is_random=any(part.is_random for part in kind.parts),
    )
    signatures.numbered.append(signature)
    signatures.blocks[key] = (signature, wanted)
    return signature, wanted
