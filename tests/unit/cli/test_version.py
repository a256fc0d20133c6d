"""`plait --version`, and the one place where the version is said."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import plait
from plait.cli.main import call

ROOT = Path(plait.__file__).parents[2]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"plait {plait.__version__}\n"


def test_a_source_tree_knows_its_version_without_being_installed_and_without_torch() -> None:
    """`-S` leaves out site-packages: neither metadata of an installation nor torch can be found."""
    told = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import plait; print(plait.__version__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", told], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{plait.__version__}\n"), done.stderr


def test_the_build_takes_it_from_the_same_file() -> None:
    pyproject = ROOT / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("plait is installed: there is no pyproject.toml beside it")
    written = tomllib.loads(pyproject.read_text())
    assert written["project"]["dynamic"] == ["version"]
    file = ROOT / written["tool"]["hatch"]["version"]["path"]
    assert f'VERSION = "{plait.__version__}"' in file.read_text()
