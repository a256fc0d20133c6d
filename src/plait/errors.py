"""Every error that a user can see.

    PlaitError
    ├── UsageError        the command line or an argument cannot be understood
    ├── JobError          the job contradicts itself, or its model, loss or optimizer cannot be used
    │   ├── DataError     the data cannot be opened, read or collated
    │   └── OutcomeError  the user's code raises at what a value is; becomes a StepError
    ├── CaptureError      the model cannot be captured as a graph
    ├── ClusterError      a cluster cannot be read, or its numbers make no sense
    ├── PlanError         the plan does not exist, or does not fit the job or the ranks
    │   └── MisfitError   the plan needs more memory than there is
    ├── ProgramError      a compiled program is not sound (a bug of ours, never of the user's model)
    ├── RunError          training started and failed
    │   ├── WorkerError   one rank raised or died; names the rank and carries its traceback
    │   │   └── LostError  ranks are lost of a run that can go on with those that are left
    │   ├── HangError     ranks wait for each other; names the operation, who waits and who is missing
    │   ├── DiskError     a file of the run cannot be written: no room, or no permission
    │   ├── StepError     an op of a captured step raised or made NaN; names the user's line, module and samples
    │   └── SpoiledError  a step gave what cannot be right: a loss that is no number, weights that differ between ranks
    ├── EchoError         another task of the run has told what is wrong
    └── CheckpointError   a checkpoint cannot be written or read

A message says what is wrong, with the numbers; `fix` says what to do about it.
"""

import collections.abc
from difflib import get_close_matches
from errno import ENOMEM


class PlaitError(Exception):
    """What went wrong, and how to mend it."""

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return self.what if self.fix is None else f"{self.what}\nFix: {self.fix}"


def did_you_mean(word: str, known: collections.abc.Iterable[str]) -> str:
    """The nearest of the names that there are, to begin a fix with; nothing where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def located(error: Exception, where: str) -> Exception:
    """The error, which says now where it was: in its message, or in a note where it is not one of ours."""
    if isinstance(error, PlaitError):
        error.what = f"{where}: {error.what}"
        error.args = (error.what,)
    else:
        error.add_note(f"At {where}.")
    return error


def lacks_memory(error: BaseException) -> bool:
    """Whether the system gave this process no more memory; CPython may lose the error that says so."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM):
        return True
    text = str(error)
    if isinstance(error, SystemError):
        return "without exception set" in text or "without setting an exception" in text
    return isinstance(error, RuntimeError) and ("t allocate memory" in text or "bad_alloc" in text)


class UsageError(PlaitError):
    """The command line or an argument cannot be understood."""


class JobError(PlaitError):
    """The job contradicts itself, or one of its parts cannot be used."""


class DataError(JobError):
    """The data cannot be opened, read or collated."""


class CaptureError(PlaitError):
    """The model cannot be captured; `where` is the user's own file and line."""

    def __init__(self, what: str, *, fix: str | None = None, where: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.where = where


class ClusterError(PlaitError):
    """A cluster cannot be read, or its numbers make no sense."""


class PlanError(PlaitError):
    """The plan does not exist, or does not fit the job or the ranks."""


class MisfitError(PlanError):
    """The plan needs more memory than there is."""


class ProgramError(PlaitError):
    """A compiled program is not sound."""


class RunError(PlaitError):
    """Training started and failed."""


class EchoError(PlaitError, SystemExit):
    """The run failed, and its first task has told why: nothing is left to say here. A script that does not catch it
    ends without a word, with exit status 1."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.code = 1


class WorkerError(RunError):
    """One rank raised or died."""

    def __init__(self, what: str, *, rank: int, traceback: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.rank = rank
        self.traceback = traceback


class LostError(WorkerError):
    """Ranks are lost, and others are left with whom the run can go on."""

    def __init__(self, cause: RunError, *, lost: tuple[int, ...], seen_s: float, handed: str | None) -> None:
        super().__init__(cause.what, rank=lost[0], fix=cause.fix)
        self.cause = cause
        self.lost = lost
        self.seen_s = seen_s  # when it was seen, on the monotonic clock
        self.handed = handed  # the checkpoint that a rank which is left has written of what it held


class HangError(RunError):
    """Ranks wait for each other and nothing moves."""

    def __init__(
        self, what: str, *, waiting: tuple[int, ...], missing: tuple[int, ...], fix: str | None = None
    ) -> None:
        super().__init__(what, fix=fix)
        self.waiting = waiting
        self.missing = missing


class DiskError(RunError):
    """A file cannot be written."""


class OutcomeError(JobError):
    """The user's code raises at what a value is; told by whoever knows the samples as a `StepError`."""


class StepError(RunError):
    """An op of a captured step raised, or made NaN; `where` is the user's own file and line."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None,
        module: str | None,
        step: int,
        micro_batch: int | None,
        ids: tuple[int, ...],
        op: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, fix=fix)
        self.op = op
        self.where = where
        self.module = module
        self.step = step
        self.micro_batch = micro_batch
        self.ids = ids


class SpoiledError(RunError):
    """A step gave what cannot be right; what came after it is worthless."""

    def __init__(self, what: str, *, step: int, cause: str, fix: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.step = step
        self.cause = cause  # loss or weights


class CheckpointError(PlaitError):
    """A checkpoint cannot be written or read."""
