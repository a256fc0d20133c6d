"""Where in the user's own files an exception came from.

Goes in: an exception. Comes out: `file.py:12`. Never names a line inside plait, Python or an installed package, if
the user's own code is on the way.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from plait.errors import JobError, PlaitError
from plait.folders import PLAIT, is_package, is_standard

RAISED = (Exception, SystemExit)
"""What code of the user's may raise: with sys.exit() a run would end, on one rank, without a word."""


def where(error: BaseException) -> str | None:
    """The innermost line of the user's own code, as file:line."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not is_installed(frame.filename)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else None


def told(error: BaseException) -> str:
    """Where, and what, to go on a sentence with."""
    line = where(error)
    return f"{f' at {line}' if line else ''}: {type(error).__name__}: {error}"


def fix_of(error: BaseException, otherwise: str | None = None) -> str:
    """What to do about an error of the user's code."""
    if any(word in str(error).lower() for word in ("cuda", "accelerator device", "nvidia driver")):
        return "leave devices out of the model: plait places its tensors; choose with --device."
    return otherwise or ("mend that line." if where(error) else "mend it.")


@contextmanager
def called(what: str, *, kind: type[PlaitError] = JobError, fix: str | None = None) -> Iterator[None]:
    """Around a call of the user's code: what it raises is told as theirs, with their line, by an error of this kind."""
    try:
        yield
    except PlaitError:
        raise
    except RAISED as error:
        raise kind(f"{what} failed{told(error)}", fix=fix_of(error, None if where(error) else fix)) from error


def is_installed(filename: str) -> bool:
    """Whether a file is Python's, an installed package's or plait's, and not the user's own."""
    return is_standard(filename) or is_package(filename) or filename.startswith(PLAIT)
