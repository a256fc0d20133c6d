"""Python state that a forward pass changes, which a graph cannot show.

In: the objects that a job's code can reach (its model, its loss or objective, its hooks). Out: what changed while a
piece of it ran, and the way back. Followed are attributes, lists, dicts, sets, closures, the globals that functions
name, attributes of the user's own classes, and the states of Python's and numpy's random numbers; never what libraries
hold.
"""

import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.torch_private.autograd import hooks_of, version_of
from plait.torch_private.modules import attributes_of, hooks_of_module, tables_of

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LIMIT = 50_000
"""Objects that are followed, at most."""
_LIBRARIES = tuple(
    {str(Path(p)) for p in sysconfig.get_paths().values()} | {str(Path(torch.__file__).parent)}
)
_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not what it was."""

    path: str
    """As the user would write it: `model.encoder.calls`."""
    tensor: Tensor | None
    """What is there now, where it is a tensor that was put there."""


@dataclass(frozen=True, slots=True)
class _Held:
    path: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    contents: dict[Any, Any]
    versions: dict[Any, int]


class Watch:
    """The state of everything that is reachable from `roots`, as it was when this was made."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self._held: list[_Held] = []
        self._seen: dict[int, Any] = {}
        for path, root in roots.items():
            self._visit(path, root)
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def changes(self) -> list[Change]:
        """What is different now."""
        found = []
        for held in self._held:
            now = held.read()
            for key in [*now, *(key for key in held.contents if key not in now)]:
                if not _same(held, key, now):
                    value = now.get(key)
                    found.append(Change(joined(held.path, key), value if isinstance(value, Tensor) else None))
        if random.getstate() != self._random:
            found.append(Change("the state of Python's `random`", None))
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            key, position = numpy.random.get_state()[1:3]
            if position != self._numpy[2] or (key != self._numpy[1]).any():
                found.append(Change("the state of `numpy.random`", None))
        return found

    def restore(self) -> None:
        """Put everything back; the contents of tensors excepted."""
        for held in self._held:
            if any(not _same(held, key, held.read()) for key in {*held.read(), *held.contents}):
                held.write(held.contents)
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def _visit(self, path: str, value: Any) -> None:
        stack = [(path, value)]
        while stack and len(self._seen) < _LIMIT:
            path, value = stack.pop()
            if isinstance(value, (*_PLAIN, Tensor, type, types.ModuleType)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            for entry in _contents(path, value):
                self._held.append(entry)
                stack.extend((joined(entry.path, key), inner) for key, inner in entry.contents.items())


def _same(held: _Held, key: Any, now: dict[Any, Any]) -> bool:
    if key not in now or key not in held.contents:
        return False
    before, after = held.contents[key], now[key]
    if isinstance(after, Tensor):
        return before is after and version_of(after) == held.versions.get(key)
    if isinstance(before, _PLAIN) and isinstance(after, _PLAIN):
        return type(before) is type(after) and (before == after or before != before)
    return before is after


def joined(path: str, key: Any) -> str:
    """What a place in something is called."""
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _contents(path: str, value: Any) -> Iterator[_Held]:
    """The places that an object has."""
    if isinstance(value, nn.Module):
        yield from _module(path, value)
    elif isinstance(value, dict):
        yield _held(path, lambda: dict(value), lambda old: _reset(value, old))
    elif isinstance(value, list | deque):
        yield _held(path, lambda: dict(enumerate(value)), lambda old: _refill(value, old))
    elif isinstance(value, tuple):
        yield _held(path, lambda: dict(enumerate(value)), lambda old: None)
    elif isinstance(value, set):
        yield _held(path, lambda: dict.fromkeys(value, True), lambda old: _reset(value, old))
    elif isinstance(value, functools.partial):
        inside = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield _held(path, lambda: inside, lambda old: None)
    elif isinstance(value, types.MethodType):
        yield _held(path, lambda: {"__self__": value.__self__, "__func__": value.__func__}, lambda old: None)
    elif isinstance(value, types.FunctionType):
        yield from _function(path, value)
    elif hasattr(value, "__dict__") and _is_users(type(value)):
        yield _held(path, lambda: dict(vars(value)), lambda old: _reset(vars(value), old))
        yield from _class(type(value))


def _module(path: str, module: nn.Module) -> Iterator[_Held]:
    def read() -> dict[str, Any]:
        parameters, _ = tables_of(module)
        own = attributes_of(module)
        own |= {f"{name}.requires_grad": p.requires_grad for name, p in parameters.items() if p is not None}
        return own | {f"hooks of {kind}": len(hooks) for kind, hooks in hooks_of_module(module).items()}

    def write(old: dict[str, Any]) -> None:
        known = vars(module)
        known.update({name: entry for name, entry in old.items() if name in known})

    yield _held(path, read, write)
    hooks = [hook for entries in hooks_of_module(module).values() for hook in entries]
    hooks += [hook for p in tables_of(module)[0].values() if p is not None for hook in hooks_of(p)]
    yield _held(f"{path}'s hooks", lambda: dict(enumerate(hooks)), lambda old: None)
    children = dict(module.named_children())
    yield _held(path, lambda: dict(children), lambda old: None)
    if _is_users(type(module)):
        yield from _class(type(module))


def _class(kind: type) -> Iterator[_Held]:
    """What a user's class holds, and what its functions can reach."""
    for base in kind.__mro__:
        if not _is_users(base):
            continue
        inside = {n: v for n, v in vars(base).items() if not n.startswith("__")}
        functions = {n: getattr(v, "__func__", v) for n, v in inside.items() if _is_function(v)}
        plain = [n for n, v in inside.items() if not _is_function(v) and not hasattr(v, "__get__")]

        def read(base: type = base, plain: list[str] = plain) -> dict[str, Any]:
            return {n: vars(base)[n] for n in plain if n in vars(base)}

        def write(old: dict[str, Any], base: type = base) -> None:
            for name, entry in old.items():
                setattr(base, name, entry)

        yield _held(base.__name__, read, write)
        yield _held(base.__name__, lambda functions=functions: functions, lambda old: None)  # type: ignore[misc]


def _function(path: str, function: types.FunctionType) -> Iterator[_Held]:
    """A user's function: its closure, and the globals that it names."""
    if not _is_users_file(function.__code__.co_filename):
        return
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read_cells() -> dict[str, Any]:
        return {n: c.cell_contents for n, c in cells.items() if n != "__class__" and _is_filled(c)}

    def write_cells(old: dict[str, Any]) -> None:
        for name, entry in old.items():
            cells[name].cell_contents = entry

    yield _held(path, read_cells, write_cells)
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    held = function.__globals__
    yield _held(
        function.__module__ or path,
        lambda: {n: held[n] for n in names if n in held and not isinstance(held[n], type | types.ModuleType)},
        lambda old: held.update(old),
    )
    defaults = dict(enumerate(function.__defaults__ or ()))
    yield _held(path, lambda: defaults, lambda old: None)


def _held(path: str, read: Callable[[], dict[Any, Any]], write: Callable[[dict[Any, Any]], Any]) -> _Held:
    contents = read()
    versions = {key: version_of(value) for key, value in contents.items() if isinstance(value, Tensor)}
    return _Held(path, read, write, contents, versions)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | staticmethod | classmethod)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _refill(values: Any, old: dict[int, Any]) -> None:
    values.clear()
    values.extend(old.values())


def _reset(values: Any, old: dict[Any, Any]) -> None:
    values.clear()
    values.update(old)


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and _is_users_file(file))


def _is_users_file(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _PACKAGE, "<frozen")) and "site-packages" not in file
