"""Arguments of a job function: `--arg lr=3e-4`.

In: a function, and values by name, as Python gives them or as text. Out: the values that it is called with, text read
as the parameter's own type: that of its annotation, else of its default. What does not fit is refused with the
function's parameters.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from plait.errors import UsageError

_WORDS = {"true": True, "false": False, "none": None}
_PLAIN = (bool, int, float, str, types.NoneType)
"""Types of values that text can be read as."""


def bound_arguments(function: Callable[..., Any], args: Mapping[str, Any], noun: str) -> dict[str, Any]:
    """What to call the function with; refused where it has no such parameter, or the value is of another type."""
    parameters = _parameters(function)
    shown = f"{noun}({', '.join(_shown(one) for one in parameters.values())})"
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {
        name: one
        for name, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    for name in args:
        if name not in named and not takes_any:
            fix = (
                f"use {', '.join(named)}."
                if named
                else f"write it as `def {noun.rpartition(':')[2]}({name}=...)`."
            )
            raise UsageError(f"--arg {name}: {shown} has no such parameter.", fix=fix)
    missing = [name for name, one in named.items() if one.default is one.empty and name not in args]
    if missing:
        fix = " ".join(f"--arg {name}=VALUE" for name in missing)
        raise UsageError(f"{shown} needs {', '.join(missing)}.", fix=f"give {fix}, or a default.")
    return {name: _fitting(name, value, _kinds(named.get(name)), shown) for name, value in args.items()}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError):  # a builtin, which does not say
        return {}
    except Exception:  # annotations whose names are only there for a type checker
        plain = inspect.signature(function).parameters
        return {name: one.replace(annotation=one.empty) for name, one in plain.items()}


def _shown(parameter: inspect.Parameter) -> str:
    return str(parameter).replace("typing.", "")


def _kinds(parameter: inspect.Parameter | None) -> tuple[Any, ...]:
    """What a value may be: types and, of a Literal, values; nothing where the function does not say."""
    if parameter is None:
        return ()
    if parameter.annotation is not parameter.empty:
        return _alternatives(parameter.annotation)
    if parameter.default is parameter.empty or parameter.default is None:
        return ()
    return (type(parameter.default),)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for one in typing.get_args(annotation) for kind in _alternatives(one))
    if origin is typing.Literal:
        return typing.get_args(annotation)
    return (types.NoneType if annotation is None else annotation,)


def _fitting(name: str, value: Any, kinds: tuple[Any, ...], shown: str) -> Any:
    """The value as one of the kinds."""
    candidates = [value]
    if isinstance(value, str):
        candidates = [
            read for kind in (bool, types.NoneType, int, float) if (read := _read(value, kind)) is not _NOT
        ]
        candidates.append(value)
    for found in candidates:
        for kind in kinds:
            if kind is float and type(found) is int:
                return float(found)
            if kind is Any or (type(found) is kind if isinstance(kind, type) and kind in _PLAIN else False):
                return found
            if not isinstance(kind, type) and type(found) is type(kind) and found == kind:
                return found
    if not kinds:
        return candidates[0]
    for kind in (kind for kind in kinds if isinstance(kind, type) and kind not in _PLAIN):
        if isinstance(value, kind):
            return value
        with suppress(Exception):  # Path, an Enum, a type of the user's own
            return kind(value)
    wanted = " or ".join(kind.__name__ if isinstance(kind, type) else repr(kind) for kind in kinds)
    given = repr(value) if isinstance(value, str) else f"the {type(value).__name__} {value!r}"
    raise UsageError(
        f"--arg {name}: {shown} takes {wanted}, not {given}.",
        fix=f"give {name} as {wanted}.",
    )


_NOT = object()
"""Text that is no value of a type."""


def _read(text: str, kind: type) -> Any:
    if kind in (bool, types.NoneType):
        word = _WORDS.get(text.lower(), _NOT)
        return word if type(word) is kind else _NOT
    try:
        return kind(text)
    except ValueError:
        return _NOT
