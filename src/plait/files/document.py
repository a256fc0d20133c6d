"""A file that somebody handed us, as plain values that know their lines.

In: a path, or text. Out: a `Document`: tables, lists, text, numbers, truth values and nothing; or an error of the kind
that the caller names, with the file, the line and what was expected. It never runs anything that a file says, reads at
most so many bytes, and builds at most so many values, however often they are referred to.

Numbers are finite and below 2**63; keys are text as they stand; a date is text.
"""

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from plait.errors import PlaitError
from plait.units import format_bytes

MAX_BYTES = 4 << 20
"""Of a file that people write."""
MAX_DEPTH = 32
"""Tables and lists within each other."""
MAX_VALUES = 200_000
"""In one document, those that are referred to counted each time."""

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and positions that lead to a value."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: Mapping[str, bool | None] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"))
    | {form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())}
    | {form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What a file holds."""

    values: Any
    """Plain values."""
    where: str
    """The file, for messages."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Where values stand; a value of which nothing is known stands where the one around it does."""

    def at(self, path: KeyPath) -> str:
        """`plan.yaml, line 3`."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.where}, line {self.lines[path[:length]]}"
        return self.where


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """What a kind of file is to its reader."""

    noun: str
    """`a plan`."""
    error: type[PlaitError]
    """What is raised."""
    fix: str
    """What to do about a file that is none."""
    max_bytes: int = MAX_BYTES

    def refusal(self, where: str, what: str, fix: str | None = None) -> PlaitError:
        """The error for a file; `where` is empty for a line whose number the caller tells."""
        return self.error(f"{where}: {what}." if where else f"{what}.", fix=fix or self.fix)


def read_bytes(path: Path, form: Format) -> bytes:
    """All of an ordinary file, unless it is larger than its kind may be."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise form.error(f"{path} cannot be read: {reason}.", fix="check the path.") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise form.error(f"{path} is not a file.", fix="check the path.")
        if status.st_size > form.max_bytes:
            size, limit = format_bytes(status.st_size), format_bytes(form.max_bytes)
            raise form.refusal(str(path), f"it has {size}; {form.noun} has at most {limit}")
        with os.fdopen(os.dup(file), "rb") as stream:
            return stream.read(form.max_bytes)
    except OSError as error:
        raise form.error(f"{path} cannot be read: {error.strerror}.", fix="check the path.") from error
    finally:
        os.close(file)


def as_text(data: bytes, where: str, form: Format) -> str:
    """Bytes as UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise form.refusal(
            f"{where}, line {line}",
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            "save the file as UTF-8 text.",
        ) from None


def read_yaml(path: Path, form: Format) -> Document:
    """A YAML file."""
    return parse_yaml(as_text(read_bytes(path, form), str(path), form), str(path), form)


def parse_yaml(text: str, where: str, form: Format) -> Document:
    """YAML text: its plain values."""
    builder = _Builder(where, form)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise form.refusal(f"{where}{line}", f"it is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        told = " ".join(str(error).split())
        raise form.refusal(where, f"it is not YAML: {told}") from None
    return Document(values=builder.root, where=where, lines=builder.lines)


@dataclass(slots=True)
class _Open:
    """A table or a list whose end has not come."""

    value: dict[str, Any] | list[Any]
    path: KeyPath
    anchor: str | None
    begun: int
    """Values that there were before it."""
    key: str | None = None
    """Of a table: the key whose value comes next."""


class _Builder:
    """Makes values of the parser's events, and counts."""

    def __init__(self, where: str, form: Format) -> None:
        self.root: Any = None
        self.lines: dict[KeyPath, int] = {}
        self._where, self._form = where, form
        self._open: list[_Open] = []
        self._known: dict[str, tuple[Any, int]] = {}
        """(value, how many values it is) by anchor."""
        self._count = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        """The next event."""
        line = event.start_mark.line + 1
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._refusal(line, "a second document begins; a file holds one")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._begin(event, line)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                done = self._open.pop()
                if done.anchor is not None:
                    self._known[done.anchor] = (done.value, self._count - done.begun)
            case yaml.ScalarEvent():
                self._scalar(event, line)
            case yaml.AliasEvent():
                self._alias(event, line)

    def _begin(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._refusal(line, f"the tag {event.tag} means nothing here")
        if len(self._open) >= MAX_DEPTH:
            raise self._refusal(line, f"lists and tables are nested more than {MAX_DEPTH} deep")
        value: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        begun = self._count
        path = self._put(value, line, 1)
        self._open.append(_Open(value=value, path=path, anchor=event.anchor, begun=begun))

    def _scalar(self, event: Any, line: int) -> None:
        if self._wants_key():
            around = self._open[-1]
            if event.value in around.value:
                raise self._refusal(line, f"the key {event.value!r} is there twice")
            around.key = event.value
            return
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise self._refusal(line, f"the tag {event.tag} means nothing here")
        plain = event.tag is None and event.implicit[0]
        value = self._resolved(event.value, line) if plain else event.value
        self._put(value, line, 1)
        if event.anchor is not None:
            self._known[event.anchor] = (value, 1)

    def _alias(self, event: Any, line: int) -> None:
        if self._wants_key():
            raise self._refusal(line, "a key refers to something else; keys are text")
        if event.anchor not in self._known:
            raise self._refusal(line, f"*{event.anchor} refers to nothing that stands before it")
        value, count = self._known[event.anchor]
        self._put(value, line, count)

    def _wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _put(self, value: Any, line: int, count: int) -> KeyPath:
        if self._wants_key():
            raise self._refusal(line, "a key is a list or a table; keys are text")
        self._count += count
        if self._count > MAX_VALUES:
            raise self._refusal(
                line, f"there are more than {MAX_VALUES:,} values, references counted in full"
            )
        path: KeyPath = ()
        if not self._open:
            self.root = value
        else:
            around = self._open[-1]
            if isinstance(around.value, dict):
                assert around.key is not None
                path = (*around.path, around.key)
                around.value[around.key], around.key = value, None
            else:
                path = (*around.path, len(around.value))
                around.value.append(value)
        self.lines[path] = line
        return path

    def _resolved(self, text: str, line: int) -> Any:
        """What plain text stands for."""
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > 20 or abs(value := int(text, 16 if "x" in text else 10)) >= 2**63:
                raise self._refusal(line, f"{text[:24]} is too large a number; they stay below 2**63")
            return -abs(value) if text.startswith("-") else abs(value)
        if _FLOAT.fullmatch(text):
            if text[-1] in "fFnN" or not math.isfinite(number := float(text)):  # .inf, .nan, 1e999
                raise self._refusal(line, f"{text[:24]} is not a finite number")
            return number
        return text

    def _refusal(self, line: int, what: str) -> PlaitError:
        return self._form.refusal(f"{self._where}, line {line}", what)
