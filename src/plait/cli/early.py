"""What contradicts itself in the environment and the command line alone, told before anything slow is imported.

In: the words of the command line, the environment. Out: nothing; or the line that says what is wrong, from one task,
and the process ends. What takes the job, the plan or other tasks to see is found by the run itself.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from plait.errors import UsageError
from plait.run.join.find import find_place

_ONE_COMMAND = ("srun", "Open MPI", "MPICH")
"""Engines that start the same command everywhere, as a rule: what task 0 says is said for all."""


def end_if_contradicted(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """End this process where its ranks cannot be those of the tasks that an engine has started."""
    ranks = _ranks(words)
    if ranks is None:
        return
    place = None
    try:
        place = find_place(environment)
        if place is not None:
            place.ranks_each(ranks)
    except UsageError as error:
        if place is not None and place.engine not in _ONE_COMMAND and place.local_tasks < place.tasks:
            return  # the commands of other hosts may be others: tasks meet first
        if place is None or place.is_first:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
        from plait.run.start.party import told_once  # torch takes seconds: others do not wait for it

        with suppress(UsageError), told_once():  # task 0 tells this one's, where it has not ended by its own
            raise
        sys.exit(1)


def _ranks(words: Sequence[str]) -> int | None:
    """The ranks that a command names which joins others; those of an elastic run follow the tasks."""
    if (
        not words
        or words[0] not in ("run", "verify")
        or any(w.startswith(("--elastic", "--engine")) for w in words)
    ):
        return None
    for word, after in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        text = value if equals else after
        if name == "--ranks" and text.isdigit():
            return int(text)
    return None
