"""What a forward asks of the world around it: what time it is, what is in a file.

In: code that runs inside of a block. Out: what it asked, as it asks it. A graph would know the answer of one moment.
"""

import builtins
import datetime
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any
from unittest import mock

from plait.folders import PLAIT, PYTHON, TORCH, is_package, is_standard

_CLOCKS = (
    *("time", "perf_counter", "monotonic", "process_time", "thread_time"),
    *("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns"),
)
"""Of Python's module `time`."""
LATER_S = 403 * 86_400 + 25_027.891
"""How far the clock is put forward to see whether it matters: another year, month, weekday, hour and fraction."""
_BUILD = f"{PLAIT}job/build.py"
_IMPORTS = ("<frozen importlib", f"{PYTHON}importlib/")


@dataclass(slots=True)
class Asked:
    """What was asked for, each with the line."""

    clocks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    """Of the system's random numbers."""


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

    def now(frame: FrameType) -> bool:
        line = _line(frame) if threading.get_ident() == thread else None
        if line is not None:
            asked.clocks.append(line)
        return line is not None

    def urandom(size: int, /) -> bytes:
        line = _line(sys._getframe(1)) if threading.get_ident() == thread else None
        if line is not None:
            asked.draws.append(line)
        return drawn(size)

    drawn = os.urandom
    noted = {name: clock(name) for name in own} | _calendars(own, later_s, now)
    dates = _dates(later_s, now)
    with ExitStack() as stack:
        for name, ask in noted.items():
            stack.enter_context(mock.patch.object(time, name, ask))
        for name, kind in dates.items():
            stack.enter_context(mock.patch.object(datetime, name, kind))
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", open_noted))
        stack.enter_context(mock.patch.object(os, "urandom", urandom))
        theirs: dict[int, Callable[..., Any]] = {id(drawn): urandom}
        theirs |= {id(own[name]): ask for name, ask in noted.items()}
        _put_in(stack, theirs | {id(_DATES[name]): kind for name, kind in dates.items()})
        yield asked


_DATES: Mapping[str, type[datetime.date]] = MappingProxyType(
    {"datetime": datetime.datetime, "date": datetime.date}
)
"""Python's own, which take no other methods."""
_NOW = ("now", "utcnow", "today")


def _calendars(
    own: dict[str, Callable[..., Any]], later_s: float, now: Callable[[FrameType], bool]
) -> dict[str, Callable[..., Any]]:
    """Functions of `time` that take the moment, or this one; what they were is added to `own`."""
    seconds, made = own["time"], dict[str, Callable[..., Any]]()

    def calendar(name: str, place: int, of_moment: Callable[[Any], Any]) -> Callable[..., Any]:
        plain = own[name] = getattr(time, name)

        def ask(*args: Any) -> Any:
            if len(args) > place or not now(sys._getframe(1)):
                return plain(*args)
            return plain(*args, of_moment(seconds() + later_s))

        return ask

    for name in ("localtime", "gmtime", "ctime"):
        made[name] = calendar(name, 0, lambda moment: moment)
    made["strftime"] = calendar("strftime", 1, own["localtime"])
    return made


def _dates(later_s: float, now: Callable[[FrameType], bool]) -> dict[str, type]:
    """Stand for Python's classes: what they make is of those, and they note who asks what time it is."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, cls.__mro__[1])

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, cls.__mro__[1])

    def noted(real: Any, name: str) -> Any:
        def ask(cls: Any, *args: Any, **kwargs: Any) -> Any:
            found = getattr(real, name)(*args, **kwargs)
            return found + datetime.timedelta(seconds=later_s) if now(sys._getframe(1)) else found

        return classmethod(ask)

    def stands_for(real: Any) -> type:
        methods = {name: noted(real, name) for name in _NOW if hasattr(real, name)}
        make = {"__new__": lambda cls, *args, **kwargs: real(*args, **kwargs), "__module__": "datetime"}
        return Kind(real.__name__, (real,), methods | make)

    return {name: stands_for(real) for name, real in _DATES.items()}


def _put_in(stack: ExitStack, asks: Mapping[int, Callable[..., Any]]) -> None:
    """Where people write `from time import perf_counter`."""
    for module in list(sys.modules.values()):
        held, file = getattr(module, "__dict__", {}), getattr(module, "__file__", None) or ""
        if file.startswith((PYTHON, PLAIT, TORCH)) or is_package(file):
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
        if file.startswith(PLAIT):
            return found
        loads = file.startswith(f"{TORCH}serialization")
        if file.startswith(TORCH) and not loads:
            return found
        if found is None and not (is_standard(file) or loads or file.startswith("<")):
            found = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return found
