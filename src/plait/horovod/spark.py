"""Horovod's `run` for Spark: a function in a process of each barrier task, which may use `plait.horovod`.

In: a function. Out: what it returned on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from plait.run.engines.spark import call_everywhere, session_here

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    num_proc: int | None = None,
    session: Any = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks of the session at hand; what each returned, by rank."""
    found = session if session is not None else session_here(None, num_proc or 1)
    ranks = num_proc if num_proc is not None else found.sparkContext.defaultParallelism
    return call_everywhere(found, partial(fn, *args, **kwargs), ranks)
