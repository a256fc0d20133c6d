"""Samples that cannot be read: named by index and file, and a few of them left out where that is allowed.

Goes in: an exception of the user's dataset. Comes out: a DataError that says which sample and which file, or, as long
as no more than `allowed` are damaged, a line for the user. Never guesses which sample of a batch it was.
"""

import os
import traceback
from typing import Any

from plait.errors import DataError, PlaitError
from plait.job.origin import where


class Damage:
    """The damaged samples that were met."""

    def __init__(self, allowed: int = 0) -> None:
        self.allowed = allowed
        self._found: dict[int, str] = {}
        self._news: dict[int, str] = {}
        self._told: set[int] = set()

    def take(self, index: int, error: BaseException, of: str = "") -> str:
        """Another one, in words; raises when there are more than allowed, or where it is not the sample's fault."""
        if isinstance(error, MemoryError):
            raise error
        if index not in self._found:
            self.add({index: named(index, error, of)}, error)
        return self._found[index]

    def add(self, news: dict[int, str], cause: BaseException | None = None) -> None:
        """More of them, in words: what a worker met."""
        for index, what in news.items():
            if index not in self._told:
                self._found[index] = self._news[index] = what
            if len(self._found) > self.allowed:
                error = self._error(what)
                del self._found[index]  # it is not left out: whoever reads it again is told again
                self._news.pop(index, None)
                raise error from cause

    def news(self) -> dict[int, str]:
        """Those that nobody was told of yet."""
        found, self._news = self._news, {}
        return found

    def lines(self) -> list[str]:
        """For the user: those that nobody was told of yet."""
        news = self.news()
        self._told.update(news)
        return [f"{what}; left out." for what in news.values()]

    def _error(self, what: str) -> DataError:
        if not self.allowed:
            return DataError(what, fix="mend it, or leave out damaged samples: --skip-bad 10 allows ten.")
        return DataError(
            f"{len(self._found)} samples are damaged, {self.allowed} are allowed; the last: {what}",
            fix=f"mend them, or --skip-bad {2 * self.allowed}.",
        )


def named(index: int, error: BaseException, of: str = "") -> str:
    """Which sample, in which file, at which line, and why."""
    if isinstance(error, PlaitError):
        return (
            error.what if f"sample {index} " in error.what else f"sample {index}{of} is damaged: {error.what}"
        )
    line, file = where(error), file_of(error)
    return (
        f"sample {index}{of} {f'(file {file}) ' if file else ''}is damaged{f', read at {line}' if line else ''}: "
        f"{type(error).__name__}: {error}"
    )


def file_of(error: BaseException) -> str | None:
    """The file that was being read: the innermost path or open file among the variables on the way to the error."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return error.filename
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in reversed(list(frame.f_locals.values())):
            if (found := _path_of(value)) is not None and found != frame.f_code.co_filename:
                return found
    return None


def _path_of(value: Any) -> str | None:
    path = value if isinstance(value, str | os.PathLike) else getattr(value, "name", None)
    if not isinstance(path, str | os.PathLike):
        return None
    try:
        return os.fspath(path) if os.path.isfile(path) else None
    except (OSError, ValueError, TypeError):
        return None
