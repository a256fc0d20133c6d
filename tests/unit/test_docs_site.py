"""The documentation builds, without a link to nowhere, and leaves nothing out."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait

ROOT = Path(plait.__file__).parents[2]


def test_every_page_is_in_the_list() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_reference_has_every_function() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    functions = [name for name in plait.__all__ if inspect.isfunction(getattr(plait, name))]
    assert not [name for name in functions if f"::: plait.{name}\n" not in text]


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
