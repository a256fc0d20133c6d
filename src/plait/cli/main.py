"""The command line: `plait run`, `plan`, `predict`, `verify`, `report`, ...: one command a file of this folder, or two.

Commands parse and print; what they do is in `plait`'s own functions, of the same names. Exit codes: 0 ok, 1 failed, 2
bad usage, 130 interrupted. A traceback is shown only with --debug.
"""

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # before torch: c10d warns of host names that do not matter here

from plait.cli.early import end_if_contradicted
from plait.files.write import NO_ROOM

if len(sys.argv) > 1:
    end_if_contradicted(sys.argv[1:], os.environ)  # in a moment, not after all of what follows

from plait.run.start.watch.interrupts import end_at_once, raised_in_safety

if (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, end_at_once)  # while all of this is imported

import typer
from typer.core import TyperCommand, TyperGroup

from plait.cli.doctor_command import doctor
from plait.cli.engine import COMMAND_LINE
from plait.cli.graph_command import graph
from plait.cli.links_command import links
from plait.cli.look_back import compare, export, report
from plait.cli.lr_command import lr
from plait.cli.plan_command import plan_
from plait.cli.predict_command import measure, predict
from plait.cli.run_command import FailedRunError, InterruptedRunError, run
from plait.cli.try_command import try_
from plait.cli.validate_command import validate
from plait.cli.verify_command import verify
from plait.errors import ClusterError, EchoError, JobError, PlaitError, PlanError, UsageError, lacks_memory
from plait.run.join.find import ask_again_after_fault, find_place
from plait.threads import MEMORY_FIX
from plait.version import VERSION

if signal.getsignal(signal.SIGINT) is end_at_once:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_BadCommandLine: Any = typer.BadParameter.__mro__[2]
"""ClickException: click's own, or that of the copy which newer versions of typer carry."""

_JOINING = ("run", "verify")
"""Commands that tasks of an engine do together."""
_CTRL_C = 130
"""What typer, and shells, make of Ctrl-C."""


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"plait {VERSION}")
        raise typer.Exit


class _PlainFlags:
    """Help shows no type for an option that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Those of a command, `--help` too."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in found:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        return found


class _Command(_PlainFlags, TyperCommand):
    """One of plait's commands."""


class _Commands(_PlainFlags, TyperGroup):
    """All of them."""


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    epilog="With --debug, anywhere, an error shows where in plait it came from.",
)  # fmt: skip


@app.callback()
def _plait(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_tell_version),
    ] = False,
) -> None:
    """Train one unmodified PyTorch model in every way the field knows."""


for _command in (
    run,
    try_,
    lr,
    graph,
    plan_,
    predict,
    measure,
    validate,
    verify,
    report,
    compare,
    export,
    doctor,
    links,
):
    app.command(name=_command.__name__.removesuffix("_"), cls=_Command)(_command)


def main() -> NoReturn:
    """Entry point: errors become one paragraph and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # arrows and lines, where the locale has none
    code = call(sys.argv[1:])
    _leave_status(code)
    if code == _CTRL_C:
        with suppress(OSError, PlaitError):
            ask_again_after_fault(os.environ)
    gc.freeze()  # as it ends, Python would look for garbage in all of torch, for a second of processor time
    sys.exit(code)


def _leave_status(code: int) -> None:
    """Where a script asks for it, task 0 writes down how it ended: engines mix that with how other tasks did."""
    name = os.environ.get("PLAIT_STATUS")
    with suppress(OSError, PlaitError):
        if name and ((place := find_place(os.environ)) is None or place.is_first):
            Path(name).write_text(f"{code}\n")


def call(arguments: Sequence[str]) -> int:
    """Do what the command line says and return its exit code."""
    debug = "--debug" in arguments
    try:
        given = [argument for argument in arguments if argument != "--debug"]
        COMMAND_LINE[:] = given
        with raised_in_safety(), _told_by_first(given):
            outcome: Any = app(args=given, prog_name="plait", standalone_mode=False)
        if outcome == _CTRL_C:
            raise KeyboardInterrupt
        return int(outcome) if isinstance(outcome, int) else 0
    except typer.Exit as done:
        if done.exit_code == _CTRL_C:
            print("interrupted", file=sys.stderr)
        return int(done.exit_code)
    except _BadCommandLine as error:
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return _CTRL_C
    except InterruptedRunError as stopped:
        if str(stopped):
            print(stopped, file=sys.stderr)
        return _CTRL_C
    except FailedRunError as failed:
        if debug:
            raise
        if not isinstance(failed.error, EchoError):
            _tell(failed.error)
        return 1
    except EchoError:
        if debug:
            raise
        return 1
    except PlaitError as error:
        if debug:
            raise
        _tell(error)
        return 2 if isinstance(error, (UsageError, ClusterError, PlanError, JobError)) else 1
    except Exception as error:
        if not debug and isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            print(
                f"what is printed cannot be written: {error.strerror}\nFix: print it elsewhere.",
                file=sys.stderr,
            )
            return 1
        if debug or not lacks_memory(error):
            raise
        print(
            f"MemoryError: the system gave this process no more memory ({error})\nFix: {MEMORY_FIX}",
            file=sys.stderr,
        )
        return 1


@contextmanager
def _told_by_first(words: Sequence[str]) -> Iterator[None]:
    """What is wrong with a command by which tasks of an engine join each other is told by the first of them."""
    try:
        yield
    except (PlaitError, _BadCommandLine) as error:
        try:
            joins = bool(words) and words[0] in _JOINING and find_place(os.environ) is not None
        except PlaitError:
            joins = False
        if not joins or any(word.startswith("--engine") for word in words):
            raise
        from plait.run.start.party import told_once  # torch takes seconds: others do not wait for it

        with told_once():
            if isinstance(error, PlaitError):
                raise
            raise UsageError(error.format_message(), fix=f"see plait {words[0]} --help.") from error


def _tell(error: PlaitError) -> None:
    """One paragraph; that of a worker ends with its own traceback, so that the first cause comes last."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
