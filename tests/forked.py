"""Commands of plait in processes of their own that start at once: forked from the one that tests, torch and all.

In: the words of a command line. Out: a `Popen` as if they had been typed. What a fresh interpreter does (imports, the
first moments of a command) is not among what these tests see; `test_examples.py` and others start real ones.
"""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.cli import main as command_line
from plait.run.start.processes import release_openmp

_MOST_FILES = 1 << 16


def plait(
    *words: str | Path, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """`plait WORDS`, with the options of `Popen`; its output is read through pipes where nothing else is said."""

    def main() -> None:
        sys.argv = ["plait", *map(str, words)]
        command_line.main()

    return forked(main, environment, **options)


def forked(
    main: Callable[[], None], environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """A process that calls `main`, and ends as an interpreter would that had begun with it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    release_openmp()  # whose threads a child does not have, and would wait for
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        return subprocess.Popen(
            ["never executed"],
            preexec_fn=lambda: _be(main, {"OMP_NUM_THREADS": "1", **(environment or os.environ)}),
            restore_signals=False,  # SIGPIPE is an error to write for Python, not the end
            **(pipes | options),
        )


def _be(main: Callable[[], None], environment: Mapping[str, str]) -> None:
    """What `Popen` calls before it executes a program, which never comes: the process ends here."""
    code = 1
    try:
        os.closerange(3, _MOST_FILES)  # also that by which the other side waits for the program
        _forget_the_test(environment)
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget_the_test(environment: Mapping[str, str]) -> None:
    """Be as a process that has just begun: no capture of output, no handlers, warnings as ever."""
    gc.freeze()
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.disable()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
