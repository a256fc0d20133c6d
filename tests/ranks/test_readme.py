"""The README's example runs as it stands and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.plan.named import NAMED

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(180)
def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = README.read_text()
    example = re.search(r"```python\n(import plait.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert example is not None
    script = tmp_path / "example.py"
    script.write_text(example[1])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == example[2]


def test_the_readme_comes_to_the_point() -> None:
    lines = README.read_text().splitlines()
    assert "make run" in "\n".join(lines[:8])
    assert "two processes compute what one does: True" in "\n".join(lines[:30])


def test_every_named_plan_has_a_row() -> None:
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    for name in NAMED:
        assert any(f"`{name}`" in row for row in rows), name


@pytest.mark.timeout(180)
def test_the_example_of_the_python_page_runs(tmp_path: Path) -> None:
    text = (README.parent / "docs" / "python.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    script = tmp_path / "page.py"
    script.write_text(example[1])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout
