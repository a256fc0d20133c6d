"""Groups of options become options of a command, and nothing about them is written twice."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from plait.cli.flatten import Text, flattened
from plait.cli.options import TEXTS, How, Reading
from plait.docstrings import docstrings
from plait.options import Changes, Elsewhere, Limits, Saving, Search, Trial, Tries

GROUPS = (Changes, Saving, Limits, Trial, Search, Tries, Elsewhere, How, Reading)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some options."""

    limit_s: float = 2.5
    """How long it may take."""
    is_loud: bool = False
    """Whether it shouts."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How large things are."""
    hidden: int = field(default=7, metadata={"python_only": True})
    """Of no use on a command line."""


def application(heard: list[dict[str, Any]]) -> typer.Typer:
    def read(text: str) -> dict[str, int]:
        name, _, size = text.partition("=")
        return {name: int(size)}

    app = typer.Typer()

    @app.command()
    @flattened({"sizes": Text(type=str, metavar="NAME=N", read=read, option="--size")})
    def command(name: str, *, group: Group, given: frozenset[str]) -> None:
        heard.append({"name": name, "group": group, "given": given})

    return app


def test_fields_are_options() -> None:
    heard: list[dict[str, Any]] = []
    app = application(heard)
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    assert CliRunner().invoke(app, ["x", "--limit-s", "2.5", "--is-loud", "--size", "a=3"]).exit_code == 0
    assert CliRunner().invoke(app, ["x", "--hidden", "1"]).exit_code == 2
    assert heard[0] == {"name": "x", "group": Group(), "given": {"name"}}
    assert heard[1]["group"] == Group(limit_s=2.5, is_loud=True, sizes={"a": 3})
    assert heard[1]["given"] == {"name", "limit_s", "is_loud", "sizes"}, "also where it is the default"


def test_a_command_may_leave_fields_out() -> None:
    heard, app = [], typer.Typer()

    @app.command()
    @flattened(without=("limit_s", "sizes"))
    def command(*, group: Group) -> None:
        heard.append(group)

    assert CliRunner().invoke(app, ["--is-loud"]).exit_code == 0
    assert CliRunner().invoke(app, ["--limit-s", "3"]).exit_code == 2
    assert heard == [Group(is_loud=True)]


def test_help_is_the_docstring_and_shows_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("NO_COLOR", "1")
    text = CliRunner().invoke(application([]), ["--help"]).output
    for words in ("--limit-s", "How long it may take.", "[default: 2.5]", "--is-loud", "--size", "NAME=N"):
        assert words in text


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_has_help(group: Any) -> None:
    told = docstrings(group)
    assert set(told) == {entry.name for entry in fields(group)}
    assert all(text.endswith(".") or "1=3" in text or text[-1].isalnum() for text in told.values())
    assert set(TEXTS) <= {entry.name for kind in GROUPS for entry in fields(kind)}
