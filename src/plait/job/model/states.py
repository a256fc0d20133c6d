"""What arrays and generators of random numbers hold, and how far iterators are.

In: such an object. Out: its state as a plain value that can be compared, and the way back where there is one.
"""

import operator
import pickle
import random
import sys
import types
import warnings
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))
"""What is compared by value."""
_LARGEST_BYTES = 1 << 20
"""Of an array that is followed: larger ones are data."""


class Nameless(int):
    """A place that nobody can name: a position, a state, an entry of a cache."""


NAMELESS = Nameless(0)
"""The only one of its object."""


def numbers_of(value: Any) -> tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], Any]] | None:
    """How to read and write what arrays hold, and the states of generators of random numbers."""
    numpy, own = sys.modules.get("numpy"), NAMELESS
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: {own: repr(value.getstate())}, lambda old: value.setstate(state)
    if isinstance(value, array | bytearray):
        return lambda: {own: bytes(value)}, lambda old: _overwrite(value, old[own])
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.nbytes <= _LARGEST_BYTES and not value.dtype.hasobject:
        before = value.copy()
        return lambda: {own: value.tobytes()}, lambda old: numpy.copyto(value, before)
    if isinstance(value, numpy.random.Generator):
        first = value.bit_generator.state
        return lambda: {own: pickle.dumps(value.bit_generator.state)}, lambda old: setattr(
            value.bit_generator, "state", first
        )
    if isinstance(value, numpy.random.RandomState):
        found = value.get_state()
        return lambda: {own: pickle.dumps(value.get_state())}, lambda old: value.set_state(found)
    return None


def _overwrite(value: Any, old: bytes) -> None:
    with memoryview(value) as view, view.cast("B") as places:
        places[:] = old


def position_of(value: Any) -> str:
    """How far an iterator is, as far as Python tells."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "" if frame is None else f"{frame.f_lasti} {[position_of(v) for v in frame.f_locals.values()]}"
    if not hasattr(value, "__next__"):
        return f"{len(value)} {id(value)}" if isinstance(value, list | tuple) else str(id(value))
    known = {n: v for n, v in getattr(value, "__dict__", {}).items() if isinstance(v, PLAIN)}
    parts: Any = ()
    if type(value).__module__ in ("builtins", "itertools"):
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")  # later versions of Python do not tell where iterators are
            _, *parts = value.__reduce__()
    inner = [position_of(v) for part in parts for v in (part if isinstance(part, tuple) else (part,))]
    return f"{operator.length_hint(value, -1)} {known} {inner}"
