"""From the gradients of micro-batches to what the update takes: the instructions that fill, send and finish buckets.

In: instructions of a step, the values of its rank. Out: buckets in the store, and the step's total, weight and norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.program import instructions as ins
from plait.program.value import SQUARES, TOTAL, WEIGHT, Value
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.compression import Compressor
from plait.run.interpret.outcome import on_its_way
from plait.run.interpret.step import Step


class Sums:
    """What becomes of gradients on one rank."""

    def __init__(
        self, state: ModelState, store: GradientStore, compressor: Compressor, values: dict[Value, Any]
    ) -> None:
        self._state = state
        self._store = store
        self._compressor = compressor
        self._values = values
        self.loss: Callable[[], float] | None = None
        """Reads the loss of this step, once its sums are there."""
        self.norm: Tensor | None = None
        """Global norm of the gradients of this step before clipping, where it was computed."""
        self.handlers: dict[type, Callable[[Step, Any], None]] = {
            ins.Tally: self.tally,
            ins.Tangent: self.tangent,
            ins.Accumulate: self.accumulate,
            ins.Compress: self.compress,
            ins.Decompress: self.decompress,
            ins.Keep: self.keep,
            ins.SquareSum: self.square_sum,
            ins.Finish: self.finish,
            ins.Outcome: self.outcome,
        }

    def tally(self, now: Step, instruction: ins.Tally) -> None:
        """Add scalars up."""
        parts = [self._values[name] for name in instruction.reads]
        if not parts:
            zero = torch.zeros((), dtype=self._state.dtype, device=self._state.device)
            self._values[instruction.writes[0]] = zero
            return
        total = torch.stack(parts).sum() if len(parts) > 1 else parts[0].clone()
        self._values[instruction.writes[0]] = total

    def tangent(self, now: Step, instruction: ins.Tangent) -> None:
        """Make the factor of every gradient."""
        name = instruction.writes[0]
        if instruction.weight is None:
            self._values[name] = self._values[instruction.reads[0]].reciprocal()
        else:
            self._values[name] = torch.full(
                (), 1.0 / instruction.weight, dtype=self._state.dtype, device=self._state.device
            )
        if self._state.loss_scale is not None:
            self._values[name].mul_(self._state.loss_scale.factor)

    def accumulate(self, now: Step, instruction: ins.Accumulate) -> None:
        """Put gradients into a bucket."""
        bucket = now.own.buckets[instruction.bucket]
        tensors = [self._values[name] for name in instruction.reads]
        for name in instruction.frees:
            self._values.pop(name, None)
        self._store.add(bucket, tensors, fresh=instruction.fresh, begins=instruction.begins)
        self._values[instruction.writes[0]] = None

    def compress(self, now: Step, instruction: ins.Compress) -> None:
        """Make what is sent of a bucket."""
        bucket, before = now.own.buckets[instruction.bucket], [self._values[n] for n in instruction.reads[1:]]
        self._values[instruction.writes[0]] = self._compressor.compress(
            bucket, self._store.flat(bucket), now.program.plan.sync, instruction.part, *before or (None,)
        )

    def decompress(self, now: Step, instruction: ins.Decompress) -> None:
        """Make gradients of what all have sent."""
        bucket, sums = now.own.buckets[instruction.bucket], [self._values[name] for name in instruction.reads]
        self._compressor.decompress(bucket, self._store.flat(bucket), now.program.plan.sync, sums)

    def keep(self, now: Step, instruction: ins.Keep) -> None:
        """Keep this rank's shard of a summed bucket."""
        name = instruction.reads[0]
        part, self._values[name] = self._values[name], None
        self._store.keep(now.own.buckets[instruction.bucket], part, fresh=instruction.fresh)

    def square_sum(self, now: Step, instruction: ins.SquareSum) -> None:
        """Add up squares, for norms."""
        if instruction.parts:
            self._store.note_norms([now.own.buckets[index] for index in instruction.parts])
            self._values[instruction.writes[0]] = None
            return
        self._values[instruction.writes[0]] = self._store.squares(
            now.own.buckets, instruction.axes, instruction.clip
        )

    def finish(self, now: Step, instruction: ins.Finish) -> None:
        """Divide by a late weight, and clip; what is left is what the update takes."""
        weight, scale = self._weigh(now, late=instruction.late_weight), self._state.loss_scale
        late = weight if instruction.late_weight else None
        if scale is not None:
            late = (torch.ones_like(self._values[TOTAL]) if late is None else late) * scale.factor
        squares = self._values.get(SQUARES)
        self.norm = self._store.finish(
            now.own.buckets, late_weight=late, clip=instruction.clip, squares=squares
        )

    def outcome(self, now: Step, instruction: ins.Outcome) -> None:
        """Read total and weight where the gradients are the affair of servers."""
        self._weigh(now, late=instruction.late_weight)

    def _weigh(self, now: Step, *, late: bool) -> Any:
        """The weight of the step, which came with its gradients where it is `late`."""
        scalars = self._store.scalars(now.own.buckets)
        weight: Any = scalars["weight"].clone() if late else now.program.total_weight
        if weight is None:
            weight = self._values[WEIGHT]
        self._values[TOTAL], self._values[WEIGHT] = scalars["total"].clone(), weight
        self.loss = on_its_way(self._values[TOTAL] / weight)
        return weight
