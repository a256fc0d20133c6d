"""The connection between the parents of two tasks: messages both ways, and files.

In: heads of JSON with bytes behind them. Out: the same on the other side. The first task has one to each other task.
Both have proven the run's token before; names of files are checked all the same, so that nothing is written outside
of a folder.
"""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.errors import RunError
from plait.run.wire.frames import Incoming, pack

_READ_BYTES = 1 << 18
"""Read at once."""
_CHUNK_BYTES = 4 << 20
"""Of a file in one message: others can pass in between."""
_SILENT_S = 3.0
"""After which nobody waits for what a task would say, once the run has failed."""
_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._+-]{1,200}")
"""A part of a path that a task may send."""

Message = tuple[dict[str, Any], bytes]


class Trunk:
    """One end. Any thread may send; one reads."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._lock = threading.Lock()
        self._incoming = Incoming()
        self._heard_at = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether the other side, which says every half second how its ranks are, has said nothing for seconds: it was
        stopped, or does not come to it."""
        return time.monotonic() - self._heard_at > _SILENT_S

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message; a ConnectionError where the other side is gone."""
        with self._lock:
            self.socket.sendall(pack(head, body))

    def read(self) -> list[Message]:
        """What has come; waits for something."""
        piece = self.socket.recv(_READ_BYTES)
        if not piece:
            raise ConnectionError("its connection was closed")
        self._heard_at = time.monotonic()
        return self._incoming.feed(piece)

    def messages(self) -> Iterator[Message]:
        """All that comes until the connection ends."""
        while True:
            yield from self.read()

    def send_file(self, root: Path, path: Path, over: threading.Event | None = None) -> None:
        """Send a file below `root`, in pieces, unless it is `over` before; `place` puts it where it belongs."""
        name = path.relative_to(root).as_posix()
        with path.open("rb") as file:
            self.send({"op": "file", "path": name, "start": True}, file.read(_CHUNK_BYTES))
            while (over is None or not over.is_set()) and (piece := file.read(_CHUNK_BYTES)):
                self.send({"op": "file", "path": name, "start": False}, piece)

    def send_tree(self, root: Path, top: Path, over: threading.Event | None = None) -> None:
        """Send a file, or a folder with all that is in it, which appears there at once; not where it is `over`."""
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not path.is_symlink():
                self.send_file(root, path, over)
        if over is None or not over.is_set():
            self.send({"op": "place", "path": top.relative_to(root).as_posix()})

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Mirror:
    """Checkpoints of a run folder, which the other side is to have too for as long as they are there."""

    def __init__(self, trunk: Trunk, root: Path, over: threading.Event | None = None) -> None:
        """`over`: when nothing more is to be sent."""
        self._trunk, self._root, self._over = trunk, root, over
        self._sent: set[str] = set()

    def look(self) -> None:
        """Send those that are new, and word of those that are gone."""
        found = sorted((self._root / "checkpoints").glob("step-*"))
        for path in found:
            if path.name not in self._sent:
                self._sent.add(path.name)
                with suppress(FileNotFoundError):  # one that has made way for another meanwhile
                    self._trunk.send_tree(self._root, path, self._over)
        for name in sorted(self._sent - {path.name for path in found}):
            self._sent.discard(name)
            self._trunk.send({"op": "drop", "path": f"checkpoints/{name}"})


class Arrivals:
    """Files that another task sends into a folder of this one."""

    def __init__(self, root: Path, task: int) -> None:
        self._root = root
        self._aside = root / f".from-task-{task}"

    def take(self, head: dict[str, Any], body: bytes) -> None:
        """A piece of a file, or the word that it is whole."""
        name = Path(*_parts(head["path"]))
        aside, goal = self._aside / name, self._root / name
        if head["op"] == "file":
            aside.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb" if head["start"] else "ab") as file:
                file.write(body)
        elif head["op"] == "folder":
            goal.mkdir(parents=True, exist_ok=True)
        elif head["op"] == "drop":
            shutil.rmtree(goal, ignore_errors=True)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            if goal.is_dir():
                shutil.rmtree(goal)
            os.replace(aside, goal)

    def close(self) -> None:
        """Forget what did not come to its end."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def discard(self) -> None:
        """Forget all that came, and the folder where nothing else is in the one above it."""
        shutil.rmtree(self._root, ignore_errors=True)
        with suppress(OSError):
            self._root.parent.rmdir()


def _parts(path: object) -> list[str]:
    parts = str(path).split("/")
    if not all(_NAME.fullmatch(part) for part in parts):
        raise RunError(
            f"another task wants to write to {str(path)[:200]!r}, which is no place in a run folder."
        )
    return parts
