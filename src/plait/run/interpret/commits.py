"""What a step writes over that the next one reads: buffers, and that weights are about to change.

In: `Commit` and `Stash` of a step. Out: new values of buffers. Where it is asked to, it keeps those of before, so that
a step whose weights have not changed yet can be undone.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.step import Step


class Commits:
    """The writes of one rank, and how far its step can be undone."""

    def __init__(self, state: ModelState, store: GradientStore, values: dict[Value, Any]) -> None:
        self.keeps_undo = False
        """Whether a step that does not come to its end can be undone."""
        self.on_update: Callable[[], None] = lambda: None
        """Is called before weights change: from then on the step cannot be undone."""
        self.is_updating = False
        """Whether weights are those of no step."""
        self._state, self._store, self._values = state, store, values
        self._before: dict[str, Tensor] = {}
        """Buffers that this step has changed, as they were."""
        self.handlers: dict[type, Callable[[Step, Any], None]] = {
            ins.Stash: self.stash,
            ins.Commit: self.commit,
        }

    def begin(self) -> None:
        """A step begins."""
        self._before.clear()

    def begin_update(self) -> None:
        """Weights are about to change."""
        self.on_update()
        self.is_updating = True

    def end(self) -> None:
        """A step is over."""
        self.is_updating = False
        self._before.clear()

    def undo(self) -> None:
        """Forget a step of which the weights have not changed yet."""
        assert not self.is_updating
        for name, before in self._before.items():
            self._held(name).copy_(before)

    def stash(self, now: Step, instruction: ins.Stash) -> None:
        """Keep values that an update would change."""
        for source, name in zip(instruction.reads, instruction.writes, strict=True):
            self._values[name] = self._values[source].clone()

    def commit(self, now: Step, instruction: ins.Commit) -> None:
        """Take new values of buffers."""
        for name, source in zip(instruction.buffers, instruction.reads, strict=True):
            new = self._store.buffer(name) if source.kind == "bucket" else self._values[source]
            if self.keeps_undo and name not in self._before:
                self._before[name] = self._held(name).clone()
            self._held(name).copy_(new)

    def _held(self, name: str) -> Tensor:
        """A buffer; or a parameter that the forward writes into."""
        buffer = self._state.buffers.get(name)
        return buffer if buffer is not None else self._state.parameters[name].detach()
