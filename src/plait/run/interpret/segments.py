"""What was captured, run: a share of the batch taken, segments of the local graph on it.

In: `Load` and `Compute` instructions of a step. Out: the values that they write. A segment runs as it is written,
compiled, or as a CUDA graph; where it raises, or makes NaN where that is looked for, the line at fault is found.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from plait.errors import OutcomeError, PlaitError
from plait.graph.ops.random import random_key
from plait.job.origin import RAISED
from plait.plan.plan import DATA
from plait.program import instructions as ins
from plait.program.segment.compiled import CompiledSegments
from plait.program.sized import Numbers
from plait.program.value import Value
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.blame import blame, blame_outcome, find_nan
from plait.run.interpret.captured import CapturedComputes
from plait.run.interpret.step import Step, leaves_of


class Segments:
    """Runs segments, for one rank."""

    def __init__(
        self,
        rank: int,
        state: ModelState,
        store: GradientStore,
        values: dict[Value, Any],
        compiled: CompiledSegments | None,
    ) -> None:
        self._rank, self._state, self._store, self._values = rank, state, store, values
        self.compiled = compiled
        """Runs segments, where they are compiled; None: as they are written."""
        self.captured: CapturedComputes | None = None
        """Runs segments as CUDA graphs, where that is wanted."""
        self.detect_nan = False
        """Whether what each segment makes is searched for NaN."""
        self.handlers: Mapping[type, Callable[[Step, Any], None]] = {
            ins.Load: self._load,
            ins.Compute: self._compute,
        }

    def _load(self, now: Step, instruction: ins.Load) -> None:
        number = instruction.micro_batch
        assert number is not None
        share = now.shares[number]
        for index, leaf in enumerate(leaves_of(share)):
            self._values[Value.batch(index, number)] = self._state.to_device(leaf)
        key = Value.key(number)
        if key not in instruction.frees:  # nobody reads it where the model draws no random numbers
            self._values[key] = random_key(
                seed=self._state.job.seed,
                step=now.number,
                micro_batch=number,
                first_sample=share.offset,
                device=self._state.device,
            )
        for axis, coordinate in now.coordinates:
            self._values[Value.offset(axis, number)] = share.offset if axis == DATA else coordinate

    def _compute(self, now: Step, instruction: ins.Compute) -> None:
        values = self._values
        segment = now.own.segments[instruction.segment]
        run, numbers = self._plain(now, instruction)
        if self.compiled is not None:
            if now.own.sized is None:
                run = self.compiled.run_of(segment)
            else:
                self.compiled.leave_out(segment)
        args = [values[name] for name in instruction.reads]
        kept = list(args) if self.detect_nan else None
        for name in instruction.frees:  # the segment drops its inputs one by one; nobody else may hold them
            values.pop(name, None)
        into: Sequence[Tensor | None] = ()
        if segment.fillable:
            wanted = [now.known.places.get(instruction.writes[position]) for position in segment.fillable]
            into = [self._store.slot(*at) if at else None for at in wanted]
        try:
            if self.captured is None or numbers or kept is not None:
                results = run(args, into, *numbers)
            else:
                results = self.captured.run(instruction, run, args, into)
        except OutcomeError as error:
            raise blame_outcome(error, now, self._rank, instruction) from error
        except PlaitError:
            raise
        except RAISED as error:
            raise blame(
                error, now, self._rank, instruction, partial(self._again, now, instruction, kept)
            ) from error
        if kept is not None:
            find_nan(now, self._rank, instruction, results, partial(self._again, now, instruction, kept))
        values.update(zip(instruction.writes, results, strict=True))

    def _plain(
        self, now: Step, instruction: ins.Compute
    ) -> tuple[Callable[..., tuple[Any, ...]], tuple[Numbers, ...]]:
        """What runs a segment as it is written, and the numbers that it takes last."""
        own = now.own
        if own.sized is None or instruction.segment not in own.sized.runs:
            return own.segments[instruction.segment].run, ()
        assert instruction.micro_batch is not None
        return own.sized.runs[instruction.segment], (now.numbers[instruction.micro_batch],)

    def _again(self, now: Step, instruction: ins.Compute, kept: Sequence[Any] | None) -> tuple[Any, ...]:
        """What a segment makes of the same inputs, in memory of its own; a KeyError where they are gone."""
        run, numbers = self._plain(now, instruction)
        if kept is None:
            for load in now.instructions:  # samples are still there to be loaded
                if isinstance(load, ins.Load) and load.micro_batch == instruction.micro_batch:
                    self._load(now, load)
        given = kept if kept is not None else [self._values[name] for name in instruction.reads]
        into = [None] * len(now.own.segments[instruction.segment].fillable)
        return run(list(given), into, *numbers)
