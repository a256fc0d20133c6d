"""Values against a schema: the field, the line, what stands there, what was expected."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest

from plait.errors import CheckpointError
from plait.files.document import Document, Format, parse_yaml
from plait.files.shape import decode_json, decode_python_json, given_in, partial_of, shaped

FORM = Format(noun="a thing", error=CheckpointError, fix="mend it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    size: int = 1
    kind: Literal["round", "square"] = "round"
    names: tuple[str, ...] = ()


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    part: partial_of(Part) | None = None  # type: ignore[valid-type]
    rates: dict[str, float] = {}
    either: int | Literal["all"] = 1
    deep: dict[str, dict[str, list[int]]] = {}


def test_a_partial_knows_what_was_there() -> None:
    found = shaped(parse_yaml("name: x\npart: {names: [a, b]}", "f", FORM), Thing, FORM)
    assert found.part is not None
    assert given_in(found.part) == {"names": ("a", "b")}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: 5", "f, line 1: name=5: expected text"),
        ("part: {}", "f, line 1: `name` is missing"),
        ("name: x\npart:\n  size: two", "f, line 3: part.size='two': expected a whole number"),
        ("name: x\npart:\n  size: true", "f, line 3: part.size=true: expected a whole number"),
        ("name: x\npart: {kind: oval}", "f, line 2: part.kind='oval': expected one of round, square"),
        ("name: x\npart: {names: [a, 1]}", "f, line 2: part.names[1]=1: expected text"),
        ("name: x\npart:\n  sice: 1", "f, line 3: unknown key 'sice' in part"),
        ("name: x\nrates:\n  a: 1\n  b: fast", "f, line 4: rates.b='fast': expected a number"),
        ("name: x\neither: some", "f, line 2: either='some': expected one of all"),
        ("name: x\neither: [1]", "either=a list: expected a whole number or text (all)"),
        (
            "name: x\ndeep:\n  a: {b: [1]}\n  c:\n    d: [1]\n    e:\n    - 1\n    - x",
            "f, line 8: deep.c.e[1]='x'",
        ),
        ("name: " + "y" * 500 + "\nrates: 2", "rates=2: expected a table"),
        ("[1]", "f, line 1: expected a thing, a table; it holds a list"),
    ],
)
def test_refusals_name_field_line_and_expectation(text: str, told: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        shaped(parse_yaml(text, "f", FORM), Thing, FORM)
    assert told in raised.value.what


def test_an_unknown_key_is_told_with_those_that_are_known() -> None:
    with pytest.raises(CheckpointError) as raised:
        shaped(Document(values={"name": "x", "part": {"sice": 1}}, where="settings"), Thing, FORM)
    assert raised.value.fix == "use size, kind, names."


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"name":\n"x", "rates": {"a": NaN}}', "f, line 2: it is not JSON"),
        (b'{"name": "x", "rates": {"a": 1e999}}', "rates"),
        (b'{"name": "x"', "it is not JSON: Input data was truncated"),
        (b'{"name":\n\n3}', "f, line 3: name=3: expected text"),
        (b"\xff", "it is not JSON"),
        (b'{"name": "\xff"}', "it is not JSON"),
        (b'{"name": "\\ud800"}', "it is not JSON"),
    ],
)
def test_json_is_strict(data: bytes, told: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        decode_json(data, Thing, "f", FORM)
    assert told in raised.value.what


def test_deep_json_is_refused() -> None:
    for decode in (decode_json, decode_python_json):
        with pytest.raises(CheckpointError, match="nested too deep"):
            decode(b'{"a": ' * 100_000, dict[str, Any], "f", FORM)


def test_json_of_python_may_hold_infinities() -> None:
    found = decode_python_json(b'{"name": "x", "rates": {"best": Infinity}}', Thing, "f", FORM)
    assert found.rates == {"best": float("inf")}
    counts: Any = decode_python_json(b'{"0": 1, "7": 2}', dict[int, int], "f", FORM)
    assert counts == {0: 1, 7: 2}
    for data in (b'{"\xc2\xb2": 1}', b"[" * 5000, b'{"name": 3}', b'{"name": "\\ud800"}', b"9" * 5000):
        with pytest.raises(CheckpointError):
            decode_python_json(data, dict[int, int], "f", FORM)
