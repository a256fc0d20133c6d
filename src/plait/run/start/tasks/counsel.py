"""What all tasks know of a run folder, before they know what to do: task 0 hears it, and decides.

In: what the others say of a folder, which each may have on a disk of its own. Out: their files, where task 0 wants
them, and its answer to all. It knows nothing of what is in such a folder.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import RunError, UsageError
from plait.run.start.tasks.agreement import name_tasks
from plait.run.start.tasks.members import Members, Other
from plait.run.start.tasks.trunk import Arrivals

_BRING_S = 3600.0
"""For another host to send a checkpoint, while it lives."""


@dataclass(kw_only=True, slots=True)
class Counsel:
    """The side of task 0."""

    members: Members
    late: Callable[[str], UsageError]
    """The error that says what did not come in time."""
    _answer: dict[str, Any] = field(default_factory=dict)
    """The last one, for tasks that come later."""
    _arrivals: tuple[int, Arrivals] | None = None
    """Who sends files, and where they go."""

    def hear(self, folder: str, patience_s: float) -> dict[int, Mapping[str, Any]]:
        """What each other task that is present says of the folder."""
        self.members.wait(
            lambda: all(o.said is not None or o.facts is not None for o in self.members.present()),
            patience_s,
            lambda: self.late(
                f"{name_tasks(o.task for o in self.members.present() if o.said is None)} did not come so far within "
                f"{patience_s:g} s"
            ),
        )
        found = {}
        for other in self.members.present():
            if other.said is None or other.said["folder"] != folder:
                does = "begins one" if other.said is None else f"with that in {other.said['folder']}"
                raise UsageError(
                    f"task 0 looks for the run in {folder} to go on with it; task {other.task} on {other.host} {does}.",
                    fix="start the same command on all hosts.",
                )
            found[other.task] = other.said
        return found

    def fetch(self, task: int, root: Path, what: str) -> None:
        """Have a task send what it has, into a folder here."""
        other = self.members.others[task]
        arrivals = Arrivals(root, task)
        self._arrivals, other.has_brought = (task, arrivals), False
        try:
            with suppress(OSError):
                other.trunk.send({"op": "bring", "what": what})
            self.members.wait(
                lambda: other.has_brought, _BRING_S, lambda: self.late(f"{what} of task {task} did not come")
            )
        finally:
            self._arrivals = None
            arrivals.close()

    def take_file(self, other: Other, head: dict[str, Any], body: bytes) -> None:
        """A piece of what was asked for."""
        if self._arrivals is not None and self._arrivals[0] == other.task:
            try:
                self._arrivals[1].take(head, body)
            except OSError as error:
                raise RunError(f"what it sends cannot be written: {error.strerror}") from error

    def answer(self, told: dict[str, Any]) -> None:
        """All hear what was decided."""
        self._answer = told
        for other in self.members.present():
            self.repeat(other)

    def repeat(self, other: Other) -> None:
        """One hears what was decided."""
        other.said = None
        with suppress(OSError):
            other.trunk.send({"op": "answer", **self._answer})
