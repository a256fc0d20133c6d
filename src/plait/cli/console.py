"""Where commands print: text of the user's (names, paths, metrics) is shown as it is, never taken for markup.

In: nothing. Out: rich consoles that know no markup and no emoji codes; what is to be coloured is a `Text`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


def plain_console(*, to_stderr: bool = False) -> Console:
    """A console that prints what it is given."""
    return Console(stderr=to_stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, for the block; the function that it gives says the next."""
    with console.status(Text(text)) as status:
        yield lambda following: status.update(Text(following))
