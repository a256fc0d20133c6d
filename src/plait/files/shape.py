"""Plain values checked against a schema, the one way in which any file's content becomes ours.

In: a `Document`, or JSON, and a type (structs, dataclasses, dicts, lists, literals). Out: a value of it, or an
error that names file, line, field, what stands there and what was expected. Nothing is converted on the way: a
number in quotes is text. Why msgspec: one wheel without dependencies, strict by default, types as the schema, and it
decodes a trace of a hundred megabytes straight into them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType, inspect

from plait.errors import PlaitError
from plait.files.document import Document, Format, KeyPath, as_text, parse_yaml, read_bytes

T = TypeVar("T")

_TOLD = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[(\.\.\.)\]")
_NAMES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
    "null": "nothing",
    "None": "nothing",
}
_SHOWN = 60
"""Characters of a value in a message."""
_SMALL = 4 << 20
"""Bytes of JSON in which lines are looked for."""


def partial_of(kind: type) -> type[msgspec.Struct]:
    """A schema with the fields of a dataclass, none of which need be there; no other may."""
    hints = get_type_hints(kind)
    entries = [(one.name, hints[one.name] | UnsetType, UNSET) for one in fields(kind)]
    return msgspec.defstruct(kind.__name__, entries, forbid_unknown_fields=True, kw_only=True, frozen=True)


def given_in(partial: msgspec.Struct) -> dict[str, Any]:
    """What of a partial was there."""
    values = msgspec.structs.asdict(partial)
    return {name: value for name, value in values.items() if value is not UNSET}


def shaped(document: Document, schema: type[T], form: Format) -> T:
    """The document's values as `schema`."""
    try:
        return msgspec.convert(document.values, schema)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), document, schema, form) from None
    except RecursionError:
        raise form.refusal(document.where, "lists and tables are nested too deep") from None


def read_json(path: Path, schema: type[T], form: Format) -> T:
    """A JSON file, strictly: no NaN, no infinity."""
    return decode_json(read_bytes(path, form), schema, str(path), form)


def decode_json(data: bytes, schema: type[T], where: str, form: Format) -> T:
    """JSON, strictly: no NaN, no infinity."""
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), _document(data, where, form), schema, form) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error, data, where, form) from None


def decode_python_json(data: bytes, schema: type[T], where: str, form: Format) -> T:
    """JSON as Python's own module writes it: NaN and infinities are numbers, as in the state of some schedules."""
    try:
        values = json.loads(as_text(data, where, form))
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a character (\\ud800) is no text
    except (ValueError, RecursionError) as error:
        raise _not_json(error, data, where, form) from None
    try:
        return msgspec.convert(values, schema, str_keys=True)
    except msgspec.ValidationError as error:
        document = _document(data, where, form)
        told = Document(values=values, where=where, lines=document.lines)
        raise _refusal(str(error), told, schema, form) from None
    except RecursionError as error:
        raise _not_json(error, data, where, form) from None


def _document(data: bytes, where: str, form: Format) -> Document:
    """JSON that did not fit, with its lines where they can be found: it is YAML too, mostly."""
    if len(data) <= _SMALL:
        try:
            return parse_yaml(as_text(data, where, form), where, form)
        except PlaitError:
            pass
    try:
        return Document(values=json.loads(data), where=where)
    except (ValueError, RecursionError):
        return Document(values=None, where=where)


def _not_json(error: Exception, data: bytes, where: str, form: Format) -> PlaitError:
    if isinstance(error, RecursionError):
        return form.refusal(where, "lists and objects are nested too deep")
    told = str(error).removeprefix("JSON is malformed: ")
    position = re.search(r"\((?:byte|char) (\d+)\)|position (\d+)", told)
    if position is not None and where:
        line = data.count(b"\n", 0, int(position[1] or position[2])) + 1
        where = f"{where}, line {line}"
    return form.refusal(where, f"it is not JSON: {told[:200]}")


def _refusal(told: str, document: Document, schema: Any, form: Format) -> PlaitError:
    match = _TOLD.fullmatch(told)
    assert match is not None
    path = _path(match["path"] or "", document.values, schema)
    what = match["what"]
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        around, path = path, (*path, unknown[1])
        allowed = ", ".join(_known_fields(_info_at(schema, around)))
        in_ = f" in {_written(around)}" if around else ""
        return form.refusal(document.at(path), f"unknown key {unknown[1][:_SHOWN]!r}{in_}", f"use {allowed}.")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        in_ = f" in {_written(path)}" if path else ""
        return form.refusal(document.at(path), f"`{missing[1]}` is missing{in_}")
    stands = _short(_value_at(document.values, path))
    expected = _expected(what, _info_at(schema, path))
    if not path:
        return form.refusal(document.at(path), f"expected {form.noun}, {expected}; it holds {stands}")
    return form.refusal(document.at(path), f"{_written(path)}={stands}: expected {expected}")


def _expected(what: str, info: Any) -> str:
    """What should have stood there, in words."""
    choices = [
        str(value)
        for kind in _alternatives(info)
        if isinstance(kind, inspect.LiteralType)
        for value in kind.values
    ]
    if expected := re.match(r"Expected `([^`]*)`(.*)", what, re.DOTALL):
        if expected[2].startswith(", got"):
            kinds = [_NAMES.get(kind.strip(), kind.strip()) for kind in expected[1].split("|")]
            names = [kind for kind in kinds if kind != "nothing"] or kinds
            return " or ".join(names) + (f" ({', '.join(choices)})" if choices else "")
        return f"{_NAMES.get(expected[1], expected[1])}{expected[2]}"
    if choices:
        return f"one of {', '.join(choices)}"
    return what[0].lower() + what[1:]


def _path(told: str, values: Any, schema: Any) -> KeyPath:
    """The keys and positions in msgspec's path, which says `[...]` where it went through a table by any key."""
    path: list[str | int] = []
    for name, index, any_key in _STEP.findall(told):
        if any_key:
            around = _value_at(values, tuple(path))
            found = _first_wrong(values, tuple(path), schema) if isinstance(around, Mapping) else None
            if found is None:
                return tuple(path)
            path.append(found)
        else:
            path.append(name or int(index))
    return tuple(path)


def _first_wrong(values: Any, path: KeyPath, schema: Any) -> str | None:
    """The key of the table at `path` that is refused: the document is tried with one of its keys after the other."""
    table: Mapping[str, Any] = _value_at(values, path)
    for key, value in table.items():
        try:
            msgspec.convert(_with(values, path, {key: value}), schema)
        except msgspec.ValidationError:
            return str(key)
    return None


def _with(values: Any, path: KeyPath, table: Mapping[str, Any]) -> Any:
    if not path:
        return table
    if isinstance(values, Mapping):
        return {**values, path[0]: _with(values[path[0]], path[1:], table)}
    at = path[0]
    assert isinstance(at, int)
    return [*values[:at], _with(values[at], path[1:], table), *values[at + 1 :]]


def _value_at(values: Any, path: KeyPath) -> Any:
    for step in path:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _info_at(schema: Any, path: KeyPath) -> Any:
    """What msgspec knows of the type at a path; None where it cannot be told."""
    kinds = [inspect.type_info(schema)]
    for step in path:
        following = []
        for kind in (one for outer in kinds for one in _alternatives(outer)):
            if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
                following += [entry.type for entry in kind.fields if entry.encode_name == step]
            elif isinstance(kind, inspect.DictType):
                following.append(kind.value_type)
            elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
                following.append(kind.item_type)
        kinds = following
    return kinds[0] if kinds else None


def _alternatives(info: Any) -> tuple[Any, ...]:
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def _known_fields(info: Any) -> list[str]:
    return [
        entry.encode_name
        for kind in _alternatives(info)
        if isinstance(kind, (inspect.StructType, inspect.DataclassType))
        for entry in kind.fields
    ]


def _written(path: KeyPath) -> str:
    """`device.peak_flops`, `cut[1]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text[:200]


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = "nothing" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
