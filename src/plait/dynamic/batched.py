"""`Batched`: a module written for one sample, evaluated for many at once.

In: a module whose forward takes one sample, with any Python in it: recursion, branches on the sample's structure. Out:
one that takes a list of samples. What the forward does is written down for each sample, operations that are alike run
together. Where the code does what cannot be written down, samples run one by one, and it is said why.
"""

import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.dynamic.cells import plain_cells
from plait.dynamic.counts import Scheduled, Scheduling
from plait.dynamic.evaluate import evaluated
from plait.dynamic.recorded.agenda import GIVEN, Agenda, Planned
from plait.dynamic.recorded.blocks import condensed
from plait.dynamic.recorded.lazy import Lazy
from plait.dynamic.recorded.leaves import whole_leaves
from plait.dynamic.recorded.recording import Recorder, Recording
from plait.dynamic.recorded.signatures import CannotBatchError, Signature, Signatures, name_of
from plait.dynamic.row_graphs import RowFunction
from plait.dynamic.rows import row_function
from plait.dynamic.structure import refuse_tracing
from plait.errors import DataError, located
from plait.torch_private import pytree

_MOST_SIGNATURES = 4096
"""Signatures that are kept; beyond, all are forgotten and met again."""


class Batched(Scheduled):
    """Evaluates `module`, whose forward takes one sample, for all samples of a batch together.

    Called with a list of samples, it gives what the module gives for each, stacked where shapes are equal, else a list.
    Further arguments are given to every call. Operations of all samples that are alike, the same function of the same
    shapes, run as one. Code that branches on a number gets it, at the price of computing it for that sample alone.

        model = plait.Batched(TreeModel())          # its forward(tree) calls itself for subtrees
        logits = model([tree_1, tree_2, tree_3])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._why: str | None = None
        self._forget_signatures()

    def _forget_signatures(self) -> None:
        self._signatures = Signatures()
        self._functions: dict[Any, RowFunction] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {k: v for k, v in kept.items() if k not in ("_signatures", "_functions")} | {"last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget_signatures()

    def forward(self, samples: Iterable[Any], *arguments: Any, **keywords: Any) -> Any:
        refuse_tracing()
        samples = list(samples)
        if not samples:
            raise DataError("there is no sample in the batch.", fix="give at least one.")
        why: Exception | None = None
        if self.batched and self._why is None:
            try:
                return _stacked(self._together(samples, arguments, keywords))
            except (
                Exception
            ) as error:  # of the code itself, or of values that are not there yet: now it is seen which
                why = error
        made = [self._called(number, samples, arguments, keywords) for number in range(len(samples))]
        if why is not None:
            told = str(why) if isinstance(why, CannotBatchError) else f"{type(why).__name__}: {why}"
            self._why = told.splitlines()[0]
            warnings.warn(f"samples run one by one: {self._why}", stacklevel=2)
        return _stacked(made)

    def _called(self, number: int, samples: Sequence[Any], arguments: Any, keywords: Any) -> Any:
        """The module's own result for one sample."""
        try:
            return self.module(samples[number], *arguments, **keywords)
        except RecursionError as error:
            raise DataError(
                f"sample {number} of the batch: the code calls itself more than {sys.getrecursionlimit():,} deep; "
                "the sample is that deep, or goes in a circle.",
                fix="give plait.Vertices a function of one vertex, which knows no depth; or sys.setrecursionlimit().",
            ) from error
        except Exception as error:
            raise located(error, f"sample {number} of the batch")  # noqa: B904 - the same error

    def _together(self, samples: Sequence[Any], arguments: Any, keywords: Any) -> list[Any]:
        if len(self._signatures.tokens) > _MOST_SIGNATURES:
            self._forget_signatures()
        shared = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        began = time.perf_counter()
        recording = Recording(shared, self._signatures)
        with Recorder(recording), whole_leaves(self.module, recording):
            outs = []
            for number in range(len(samples)):
                recording.begins.append(len(recording.kinds))
                outs.append(self._called(number, samples, arguments, keywords))
        lazies = [value for value in pytree.tree_leaves(outs) if type(value) is Lazy]
        blocks = condensed(recording, [value._number for value in lazies])
        planned = Planned(blocks, Agenda.of(blocks))
        self._note(
            Scheduling(
                num_vertices=len(recording.kinds),
                group_sizes=tuple(group.num_rows for group in planned.groups),
                schedule_s=time.perf_counter() - began,
            )
        )
        functions = {
            family: self._function(family, recording.parameters, planned) for family in planned.num_rows
        }
        read = [planned.where(int(blocks.now[value._number]), value._like) for value in lazies]
        work = planned.work(functions, read)
        buffers = evaluated(work, recording.parameters, planned.inputs) if planned.groups else ()

        # All results of one buffer at once: each alone would have a gradient as large as the buffer.
        found: dict[int, Tensor] = {}
        for buffer in {place[0] for place in work.read or ()}:
            places = {
                id(lazy): row for lazy, (at, row) in zip(lazies, work.read or (), strict=True) if at == buffer
            }
            taken = buffers[buffer].index_select(
                0, torch.tensor(list(places.values()), device=buffers[buffer].device)
            )
            found |= dict(zip(places, taken.unbind(), strict=True))
        return [pytree.tree_map(lambda value: found.get(id(value), value), out) for out in outs]

    def _function(self, family: Any, parameters: Mapping[str, Tensor], planned: Planned) -> RowFunction:
        if not isinstance(family, Signature):
            assert family[0] == GIVEN
            example = planned.inputs[family][0][0].detach()
            key: Any = (GIVEN, tuple(example.shape), example.dtype, example.device)
            if key not in self._functions:
                self._functions[key] = row_function(
                    lambda _, own, __: (own[0],), {}, [example], [], None, [example]
                )
            return self._functions[key]
        needed = {name: parameters[name] for name in family.parameters}
        key = (family.number, self.training, tuple(value.requires_grad for value in needed.values()))
        if key not in self._functions:
            try:
                with plain_cells(self.module):
                    self._functions[key] = row_function(
                        lambda known, _, states: family.call(states, known),
                        needed, [], family.sees, None, family.makes,
                    )  # fmt: skip
            except Exception as error:  # an op that torch cannot batch
                raise CannotBatchError(
                    f"{name_of(family.function)} cannot be batched: {str(error).splitlines()[0]}"
                ) from error
        return self._functions[key]


def _stacked(made: Sequence[Any]) -> Any:
    """Results of all samples as tensors with a first dim of samples, where shapes allow."""
    flat = [pytree.tree_flatten(each) for each in made]
    leaves, spec = flat[0]
    if any(other != spec for _, other in flat[1:]):
        return list(made)
    joined = []
    for parts in zip(*(each for each, _ in flat), strict=True):
        if not all(isinstance(part, Tensor) and part.shape == parts[0].shape for part in parts):
            return list(made)
        joined.append(torch.stack(parts))
    return pytree.tree_unflatten(joined, spec) if leaves else list(made)
