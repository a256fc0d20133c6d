"""YAML that people hand us: plain values with their lines, or a refusal that says where."""

import os
from pathlib import Path
from typing import Any

import pytest
from bench.fuzz.mutate import BOMB

from plait.errors import PlanError
from plait.files import document
from plait.files.document import Format, parse_yaml, read_bytes, read_yaml

FORM = Format(noun="a plan", error=PlanError, fix="write it anew.", max_bytes=1000)


def values(text: str) -> Any:
    return parse_yaml(text, "x.yaml", FORM).values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [x, 2.5, true, ~]", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("a: 1e9\nb: -3\nc: 0x1f\nd: .5", {"a": 1e9, "b": -3, "c": 31, "d": 0.5}),
        ("a: 2024-01-01\nb: 12:30:45\nc: '5'", {"a": "2024-01-01", "b": "12:30:45", "c": "5"}),
        ("1: a\nyes: b\n2024-01-01: c\n²: ²", {"1": "a", "yes": "b", "2024-01-01": "c", "²": "²"}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("", None),
    ],
)
def test_plain_values(text: str, expected: Any) -> None:
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "x.yaml, line 2: it is not YAML"),
        ("a: 1\na: 2", "x.yaml, line 2: the key 'a' is there twice"),
        ("a: 1\nb: .nan", "x.yaml, line 2: .nan is not a finite number"),
        ("a: -.INF", "-.INF is not a finite number"),
        ("a: 1e999", "1e999 is not a finite number"),
        ("a: 9223372036854775808", "too large a number"),
        ("a: " + "9" * 5000, "too large a number"),
        ("? [a]\n: b", "x.yaml, line 1: a key is a list or a table"),
        ("? {a: b}\n: c", "a key is a list or a table"),
        ("a: &x 1\n? *x\n: b", "a key refers to something else"),
        ("a: *x", "refers to nothing that stands before it"),
        ("a: &x [*x]", "refers to nothing that stands before it"),
        (
            "a: !!python/object/apply:os.system [echo]",
            "the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("a: !!timestamp 2024-01-01", "means nothing here"),
        ("a: 1\n---\nb: 2", "x.yaml, line 2: a second document begins"),
        ("b: 1\na: " + "[" * 5000, "x.yaml, line 2: lists and tables are nested more than 32 deep"),
        ("{a: " * 40, "nested more than 32 deep"),
        ("a: \x00", "it is not YAML"),
        ("a: \ud800", "it is not YAML"),
    ],
)
def test_what_is_refused_says_where(text: str, told: str) -> None:
    with pytest.raises(PlanError) as raised:
        values(text)
    assert told in raised.value.what
    assert raised.value.fix == FORM.fix


def test_references_that_multiply_are_counted_in_full() -> None:
    with pytest.raises(PlanError, match="more than 200,000 values, references counted in full"):
        values(BOMB)


def test_many_values_are_refused_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_VALUES", 10)
    assert len(values("[" + "a, " * 9 + "]")) == 9
    with pytest.raises(PlanError, match="more than 10 values"):
        values("[" + "a, " * 10 + "]")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(PlanError, match=r"plan.yaml, line 2: byte 0xff is not UTF-8"):
        read_yaml(path, FORM)
    path.write_bytes(b"\xef\xbb\xbfa: 1")  # a mark that editors put there
    assert read_yaml(path, FORM).values == {"a": 1}
    path.write_bytes(b"x" * 1001)
    with pytest.raises(PlanError, match="it has 1001 B; a plan has at most 1000 B|it has 1001 B"):
        read_yaml(path, FORM)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent", "zero\x00"):
        with pytest.raises(PlanError, match="cannot be read|is not a file"):
            read_bytes(tmp_path / name, FORM)


def test_a_value_knows_its_line() -> None:
    found = parse_yaml("a:\n  b:\n  - 1\n  - c: 2\n", "x.yaml", FORM)
    assert found.at(("a", "b", 1, "c")) == "x.yaml, line 4"
    assert found.at(("a", "b", 1, "d")) == "x.yaml, line 4"  # of what is not there: where it would be
    assert found.at(()) == "x.yaml, line 1"
