"""Checkpoints of weights that servers hold.

In: a server after each of its updates; where weights hold shares of several steps, when all workers wait for a save.
Out: whole checkpoints, written by the first server; the others send it their parts. Saved are the start, every so many
steps, and the end. The first server waits for the parts of the others, who reach the same update without it; where one
does not come, the checkpoint is skipped and that is told.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plait.errors import CheckpointError
from plait.run.checkpoint.saver import Notice, Saver
from plait.run.checkpoint.store import save_checkpoint
from plait.run.hold.server_shards import Given, Taken
from plait.run.link.wire import Head, MessageKind
from plait.run.loop.task import Task
from plait.run.serve.service import Service
from plait.run.start.launch import Seat

SAVE_EVERY = 200
"""Steps between two checkpoints where the user names none: a server that dies takes what came after the last one."""
_PATIENCE_S = 5.0
"""For which a save waits for servers that are busy."""
_LAST_PATIENCE_S = 60.0
"""The same for the last save of a run, after which there is no other."""


def steps_between_saves(task: Task) -> int:
    """Of a run with servers."""
    return task.checkpoint_every or SAVE_EVERY


class Keeper:
    """Saves what one server holds, or sends it to the one who saves."""

    def __init__(
        self, server: Service, task: Task, tell: Callable[[dict[str, Any]], None], progress: dict[str, Any]
    ) -> None:
        """`tell` is told what the user should know; `progress` is of the checkpoint from which the run went on."""
        self._server, self._task = server, task
        self._tell = tell
        self._every = steps_between_saves(task)
        self._saved = -1
        self._extra = task.kept(progress)
        first = server.shard == 0
        self._saver = (
            Saver(
                task.folder / "checkpoints",
                keep=task.keep,
                resumed=task.resume,
                time_limit_s=task.checkpoint_timeout_s,
            )
            if first
            else None
        )

    def after_update(self) -> Iterator[None]:
        """Save where it is time to."""
        step = self._server.state.steps_done
        if step % self._every == 0 and step != self._saved:
            yield from self.save(_PATIENCE_S)

    def before(self, step: int) -> Iterator[None]:
        """Save all before a step: everybody waits there."""
        self._server.state.steps_done = step
        if step != self._saved:
            yield from self.save(_PATIENCE_S)

    def save(self, patience_s: float) -> Iterator[None]:
        """Save, or send; yields while parts of others are missing."""
        server, state = self._server, self._server.state
        step = self._saved = state.steps_done
        holding = state.holding
        if holding is None:
            assert self._saver is not None
            self._tell_all(
                self._saver.poll()
            )  # of those before: what becomes of this one is asked at the end
            self._saver.submit(state.to_checkpoint(self._extra))
            return
        first = server.plan.mesh.size
        if server.shard > 0:
            given = Given(holding.layout)
            state.to_checkpoint(self._extra, given)
            server.streams.send(first, Head(kind=MessageKind.STATE, step=step), *given.shards)
            return
        others = [(shard, step) for shard in range(1, server.plan.sync.servers)]
        limit = time.monotonic() + patience_s
        while any(key not in server.states for key in others):
            if time.monotonic() > limit:
                why = f"a server's shard did not come in {patience_s:g} s."
                self._tell({"notice": f"the checkpoint of step {step} is skipped: {why}"})
                self._saved = -1
                return
            if not server.poll():
                yield
        taken = Taken(holding.layout, lambda shard: server.states[shard, step])
        assert self._saver is not None
        self._tell_all(self._saver.poll())
        self._saver.submit(state.to_checkpoint(self._extra, taken))
        server.states = {key: value for key, value in server.states.items() if key[1] > step}

    def hand_over(self, seat: Seat) -> dict[str, Any]:
        """Workers are lost: say which updates this only server holds, and write them down when asked to."""
        assert self._saver is not None
        self._tell_all(self._saver.close())
        state, task = self._server.state, self._task
        seat.emit({"holds": state.steps_done})
        seat.wait_to_give()
        saved = state.to_checkpoint(self._extra)
        seat.emit({"handed": str(save_checkpoint(task.folder / "checkpoints", saved, keep=task.keep))})
        return {}

    def close(self) -> Iterator[None]:
        """Save the end, and wait for the disk; an error where it could not be written."""
        step = self._server.state.steps_done
        if step != self._saved:
            yield from self.save(_LAST_PATIENCE_S)
        if self._saver is None:
            return
        notices = self._saver.close()
        self._tell_all(notices)
        lost = [n.message for n in notices if n.kind != "saved" and n.step == step]
        if lost or self._saved != step:
            reason = lost[-1] if lost else "a server's shard did not come."
            raise CheckpointError(f"the last checkpoint was not saved: {reason}")

    def _tell_all(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self._tell(notice.event())
