"""A function of Horovod's kind on a cluster of Ray: in a process of each rank, which may use `plait.horovod`.

In: a function. Out: what it returned on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from plait.run.engines.ray_calls import call_everywhere

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    num_proc: int = 1,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks, one a CPU of Ray; what each returned, by rank."""
    return call_everywhere(partial(fn, *args, **kwargs), num_proc)
