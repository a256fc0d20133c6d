"""Single ops that Python takes over, at no cost to all others. Private to torch (`torch._C`).

A key of torch's dispatcher that nothing in torch uses (`Fake`: it is torchdistx's; it lies below autograd, just above
modes) is switched on by thread, as modes are, in the threads of autograd too. All ops pass over it but those that were
made takable: a mode costs 5 to 20 us an op, this nothing (`x + x`, a small `linear`).
"""

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

from plait.torch_private.ops import arguments_of

_NAME = "Fake"
_KEY = cast(torch._C.DispatchKey, torch._C._parse_dispatch_key(_NAME))
_SLOT = "plait.intercepted"
"""Under which torch keeps the takers of a thread."""

Taker = Callable[[OpOverload, Mapping[str, Any], Callable[[], Any]], Any]
"""(an op, its arguments by name, the call as it was) -> its result. Ops that it calls itself are torch's own."""
Takers = tuple[tuple[frozenset[OpOverload], Taker], ...]
"""Who takes which of the `takable` ops; the last one that names an op has it."""
_stances: list[Any] = []
"""One for each that is in `_as_written`: torch's stance is of the whole process, and threads leave in any order."""


@contextmanager
def intercepted(takers: Takers) -> Iterator[None]:
    """While active, in this thread and in backward passes that it begins, these ops are the takers'.

    What torch.compile has made runs as it was written meanwhile: inside of its kernels nothing can be taken.
    """
    if not takers:
        yield
        return
    outer = _active()
    _stash(_SLOT, (*outer, *takers))
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY), _as_written():
            yield
    finally:
        _stash(_SLOT, outer)


def _active() -> Takers:
    return torch._C._get_obj_in_tls(_SLOT) if torch._C._is_key_in_tls(_SLOT) else ()


def _stash(slot: str, value: object) -> None:
    """Keep it in torch's memory of this thread, which torch hands on to the threads of autograd."""
    torch._C._stash_obj_in_tls(slot, value)
    if _takes_the_callers_reference():
        _refer(value)


def _refer(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@cache
def _takes_the_callers_reference() -> bool:
    """As torch 2.11 does, and lets go of it where another object takes its place; later ones count their own."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_SLOT}.probe", probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        _refer(probe)
    return takes


@contextmanager
def _as_written() -> Iterator[None]:
    """While any thread is in here, nothing that torch.compile has made is used."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _stances.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        stance = _stances.pop()
        if not _stances:
            stance.__exit__(None, None, None)


def takable(ops: Iterable[OpOverload]) -> frozenset[OpOverload]:
    """Ops that may be taken from now on, in this process; to be called once for each."""
    made = frozenset(ops)
    for op in made:
        _library(op.namespace).impl(op, _kernel(op), _NAME)  # type: ignore[no-untyped-call]
    return made


def _kernel(op: OpOverload) -> Callable[..., Any]:
    own = torch._C.DispatchKeySet(_KEY)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(own):
            taker = next((taker for ops, taker in reversed(_active()) if op in ops), None)
            if taker is None or _only_shapes((*args, *kwargs.values())):
                return op(*args, **kwargs)
            return taker(op, arguments_of(op, args, kwargs), lambda: op(*args, **kwargs))

    return kernel


def _only_shapes(given: tuple[Any, ...]) -> bool:
    """Whether nothing is computed: the call is traced, or of tensors without values."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(isinstance(entry, Tensor) and entry.is_meta for entry in given)


@cache
def _library(namespace: str) -> Library:
    """For kernels of ours; `_`: for the rule that all other ops pass on. It lasts as long as the process."""
    made = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    if namespace == "_":
        made.fallback(fallthrough_kernel, _NAME)  # type: ignore[no-untyped-call]
    else:
        _library("_")
    return made


@cache
def drawing_ops() -> frozenset[OpOverload]:
    """All that draw from torch's generators, takable; those that are made of others are seen as those."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        known = torch._C._get_operation_overload(name, overload)
        if known is None or torch.Tag.nondeterministic_seeded not in known[2]:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
            space, _, plain = name.partition("::")
            found.append(getattr(getattr(getattr(torch.ops, space), plain), overload or "default"))
    return takable(found)
