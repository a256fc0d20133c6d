"""The documentation builds, without a link to nowhere, leaves nothing out, and says nothing that there is not."""

import ast
import inspect
import os
import pydoc
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from docs.plan_pages import families
from docs.troubleshooting import messages, page

import plait
from plait.cli.main import app
from plait.docstrings import docstrings
from plait.plan.named import NAMED
from plait.version import VERSION

ROOT = Path(plait.__file__).parents[2]
PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
"""The log tells how things were."""
MADE = {"troubleshooting.md"}
"""Pages of the list that are made when the site is built."""


def test_every_page_is_in_the_list() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed - MADE == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_reference_has_every_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert len(set(re.findall(r"^::: .*$", text, re.MULTILINE))) == text.count("\n::: "), "one is there twice"
    homes = {name: getattr(plait, name).__module__ for name in plait.__all__ if not name.startswith("_")}
    assert not [
        n for n, home in homes.items() if f"::: plait.{n}\n" not in text and f"::: {home}\n" not in text
    ]


def test_the_version_is_the_one_that_is_cited() -> None:
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"{{{VERSION}}}" in (ROOT / "docs" / "versions.md").read_text()


def test_help_shows_what_is_said_under_fields() -> None:
    for kind in (plait.Job, plait.Saving, plait.StepDone):
        text = pydoc.plain(pydoc.render_doc(kind))
        for name, said in docstrings(kind).items():
            assert f"    {name}\n" in text and said.split("\n")[0] in text, (kind, name)
    assert "A function that builds the network" in (plait.Job.__doc__ or "")


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for text in re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            yield path.name, text


def test_python_in_pages_names_what_there_is() -> None:
    """It parses, and every `plait.name` is there; those of the README and of python.md are run elsewhere."""
    seen = 0
    for where, text in blocks("python"):
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "plait"
            ):
                seen += 1
                assert hasattr(plait, node.attr), f"{where}: plait.{node.attr}"
    assert seen > 10


def commands() -> Iterator[tuple[str, str]]:
    """Command lines of plait in pages: in blocks of a shell, and indented."""
    fenced = [(where, line) for where, text in blocks("sh") for line in text.splitlines()]
    indented = [
        (path.name, line[4:])
        for path in PAGES
        for line in path.read_text().splitlines()
        if line[:4] == "    "
    ]
    for where, line in [*fenced, *indented]:
        if re.match(r"plait +[a-z]", line):
            yield where, line


def test_commands_in_pages_and_their_options_are_there() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = 0
    for where, line in commands():
        words = shlex.split(line.partition("#")[0].partition(" | ")[0].partition(";")[0])[1:]
        assert words[0] in known, f"{where}: {line}"
        options = {option for given in known[words[0]].params for option in given.opts}
        for word in words:
            if word.startswith("--"):
                seen += 1
                assert word.partition("=")[0] in options | {"--help", "--debug"}, f"{where}: {line}"
    assert seen > 30


def test_every_plan_has_its_place_and_every_error_its_words() -> None:
    assert sorted(name for names in families().values() for name in names) == sorted(NAMED)
    found = messages()
    assert all(inspect.getdoc(getattr(plait.errors, name)) for name in found)
    what = [text for pairs in found.values() for text, _ in pairs]
    assert any("there is no plan" in text for text in what) and len(what) > 300
    assert "| there is no plan {plan}. |" in page()


@pytest.mark.timeout(300)
def test_the_site_builds_offline(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs-material, which plait[dev] has")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "reference.html").read_text()
    assert "A function that builds the network" in page, "docstrings under fields are shown"
    front = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://(?:fonts|cdn|unpkg)', front), (
        "nothing is fetched from elsewhere"
    )
    for name in NAMED:
        page = (tmp_path / "site" / "plans" / f"{name}.html").read_text()
        assert f'src="{name}.svg"' in page and (tmp_path / "site" / "plans" / f"{name}.svg").exists(), name
    assert "there is no plan" in (tmp_path / "site" / "troubleshooting.html").read_text()
