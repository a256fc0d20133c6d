"""Where commands print: text of the user's (names, paths, metrics) is shown as it is, never taken for markup.

In: nothing. Out: rich consoles that know no markup and no emoji codes; what is to be coloured is a `Text`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from rich.console import Console
from rich.text import Text

from plait.api.display.progress import LastingConsole
from plait.run.join.find import find_place


def plain_console(*, to_stderr: bool = False, lasting: bool = False) -> Console:
    """A console that prints what it is given; lines where Open MPI gives tasks terminals of its own, wherever what they
    print goes. `lasting`: what it shows is not what the command is for, which goes on without."""
    is_terminal = False if "OMPI_COMM_WORLD_RANK" in os.environ else None
    kind = LastingConsole if lasting else Console
    return kind(stderr=to_stderr, markup=False, emoji=False, highlight=False, force_terminal=is_terminal)


def speaks_elsewhere() -> bool:
    """Whether another task of the same run, its first, tells people what happens."""
    place = find_place(os.environ)
    return place is not None and not place.is_first


@contextmanager
def prints_aside(aside: bool) -> Iterator[None]:
    """Where JSON is to be all of standard output: what the user's code prints goes to stderr, in processes too."""
    if not aside:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, for the block; the function that it gives says the next."""
    with console.status(Text(text)) as status:
        yield lambda following: status.update(Text(following))
