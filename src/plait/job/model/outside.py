"""What a forward asks of the world around it: what time it is, what is in a file.

In: code that runs inside of a block. Out: what it asked, as it asks it. A graph would know the answer of one moment.
"""

import builtins
import io
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

_CLOCKS = (
    *("time", "perf_counter", "monotonic", "process_time", "thread_time"),
    *("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns"),
)
"""Of Python's module `time`."""
LATER_S = 1_234_567.891
"""How far the clock is put forward to see whether it matters."""
_TORCH, _PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2])
_BUILD = str(Path(__file__).resolve().parents[1] / "build.py")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_IMPORTS = ("<frozen importlib", f"{_STANDARD_LIBRARY}/importlib")


@dataclass(slots=True)
class Asked:
    """What was asked for, each with the line."""

    clocks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


@contextmanager
def noted_asks(later_s: float = 0.0) -> Iterator[Asked]:
    """Note questions of this thread for the time, which it is `later_s` later, and files that it opens."""
    asked, thread = Asked(), threading.get_ident()
    own = {name: getattr(time, name) for name in _CLOCKS if hasattr(time, name)}

    def clock(name: str) -> Callable[[], Any]:
        later = int(later_s * 1e9) if name.endswith("_ns") else later_s

        def ask() -> Any:
            line = _line(sys._getframe(1)) if threading.get_ident() == thread else None
            if line is None:
                return own[name]()
            asked.clocks.append(line)
            return own[name]() + later

        return ask

    opened = builtins.open

    def open_noted(*args: Any, **kwargs: Any) -> Any:
        line = _line(sys._getframe(1)) if threading.get_ident() == thread else None
        if line is not None:
            asked.files.append(line)
        return opened(*args, **kwargs)

    noted = {name: clock(name) for name in own}
    with ExitStack() as stack:
        for name, ask in noted.items():
            stack.enter_context(mock.patch.object(time, name, ask))
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", open_noted))
        _put_in(stack, {id(own[name]): ask for name, ask in noted.items()})
        yield asked


def _put_in(stack: ExitStack, asks: dict[int, Callable[[], Any]]) -> None:
    """Where people write `from time import perf_counter`."""
    for module in list(sys.modules.values()):
        held, file = getattr(module, "__dict__", {}), getattr(module, "__file__", None) or ""
        if file.startswith((_STANDARD_LIBRARY, _PACKAGE, _TORCH)) or "site-packages" in file:
            continue
        for name, value in list(held.items()):
            if id(value) in asks and module is not time:
                stack.enter_context(mock.patch.dict(held, {name: asks[id(value)]}))


def _line(frame: FrameType | None) -> str | None:
    """Whose question it is; None: torch's, ours, or that of an import, of what is known of a package, or of who makes
    a model, which is no part of a step."""
    found = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_IMPORTS) or file == _BUILD:
            return None
        if file.startswith(_PACKAGE):
            return found
        loads = file.startswith(f"{_TORCH}/serialization")
        if file.startswith(_TORCH) and not loads:
            return found
        inside = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if found is None and not (inside or loads or file.startswith("<")):
            found = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return found
