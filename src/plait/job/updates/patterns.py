"""Which parameters are meant: names with wildcards, or a module with all that is in it.

Goes in: patterns, names of parameters. Comes out: who matches what. `encoder` means `encoder` and all below it;
`*.bias` is as a shell reads it. Where several patterns match, the first one counts.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from plait.errors import JobError


def matches(pattern: str, name: str) -> bool:
    """Whether a parameter is meant by a pattern."""
    return pattern == "*" or fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def first_of(patterns: Iterable[str], name: str) -> int | None:
    """The position of the first pattern that means a parameter; None: no one does."""
    return next((at for at, pattern in enumerate(patterns) if matches(pattern, name)), None)


def as_patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    """One or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def is_patterns(given: object) -> bool:
    """Whether that is what was given."""
    if isinstance(given, str):
        return bool(given)
    return (
        isinstance(given, Sequence)
        and bool(given)
        and all(isinstance(entry, str) and entry for entry in given)
    )


def check_known(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse a pattern that means no parameter: it is misspelt."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise JobError(
                f"{what}: no parameter is called {pattern!r}; there are {len(names)}: {few}.",
                fix="write a parameter's name, the path of a module, or wildcards such as 'encoder.*.bias'.",
            )
