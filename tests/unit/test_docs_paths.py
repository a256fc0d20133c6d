"""What documents and docstrings say of files is true: every file and folder that they name is there."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import plait

SOURCE = Path(plait.__file__).parent
ROOT = SOURCE.parents[1]
DOCUMENTS = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")] if path.name != "log.md"]
"""The log tells how things were."""
NAMED = re.compile(r"`([\w./-]+(?:\.py|\.md|/))`")
"""A file or a folder in a text."""
LINKED = re.compile(r"\]\(([\w./-]+\.\w+)(?:#[\w-]+)?\)")
NOT_OURS = {
    "plans/index.md",
    "troubleshooting.md",
    "job.py",
    "train.py",
    "path.py",
    "file.py",
    "my_job.py",
    "trace/",
    "checkpoints/",
    "run/trace/",
}
"""Pages that are made when the site is built; names in examples of what a user has, or what a run leaves behind."""


def missing(text: str, folder: Path) -> Iterator[str]:
    """Names in a text that are not there: below the root, the package, tests, or (bare names) anywhere."""
    for name in {*NAMED.findall(text), *LINKED.findall(text)} - NOT_OURS:
        wanted = name.rstrip("/")
        if any(
            (base / wanted).exists()
            for base in (folder, ROOT, SOURCE.parent, SOURCE, ROOT / "tests", ROOT / "examples")
        ):
            continue
        bare = "/" not in wanted
        if not (
            bare
            and any(True for base in (SOURCE, ROOT / "tests", ROOT / "bench") for _ in base.rglob(wanted))
        ):
            yield name


def test_documents_name_files_that_are_there() -> None:
    found = [f"{path.name}: {name}" for path in DOCUMENTS for name in missing(path.read_text(), path.parent)]
    assert not found


def test_docstrings_name_files_that_are_there() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                found += [f"{path.relative_to(SOURCE)}: {name}" for name in missing(text, path.parent)]
    assert not found


def test_names_that_are_not_there_are_found() -> None:
    text = (
        "`run/worker.py`, `program/timing/`, `no_such_file.py`, [x](nowhere.md); `run/loop/worker.py`, `cli/`"
    )
    assert set(missing(text, ROOT)) == {"run/worker.py", "program/timing/", "no_such_file.py", "nowhere.md"}


def test_the_architecture_lists_every_room_in_the_order_of_imports() -> None:
    """Each layer of a contract is a line of its folder's listing, highest first; the table has the folders."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    text = (ROOT / "docs" / "architecture.md").read_text()
    for contract in contracts:
        (container,) = contract["containers"]
        wanted = [{room.strip() for room in layer.split("|")} for layer in contract["layers"]]
        folder = container.removeprefix("plait").lstrip(".").replace(".", "/")
        if folder:
            section = text.partition(f"### {folder}/\n")[2].partition("\n### ")[0]
            lines = [line for line in section.splitlines() if line.startswith("    ")][: len(wanted)]
            rooms = [set(re.findall(r"(?<!\S)([a-z_]+)(?:/|\.py)(?!\S)", line)) for line in lines]
        else:
            rows = text.partition("| folder |")[2].partition("\n\n")[0].splitlines()[2:]
            rooms = [set(re.findall(r"`([a-z_]+)(?:/|\.py)`", row.split("|")[1])) for row in rows]
        assert rooms == wanted, container
