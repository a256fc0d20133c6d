"""What `plait` does around its own imports: nobody looks for garbage in what is being imported."""

import gc
import sys
from pathlib import Path

import pytest

import plait

IMPORTS_TORCH = "import gc, sys\nCOLLECTS = gc.isenabled()\nsys.modules['torch'] = sys\n"


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is noted when what lives is never looked at again; modules of the test's own can be imported."""
    noted: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gc, "freeze", lambda: noted.append("frozen"))
    return noted


def _has_torch(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    if not has:
        del sys.modules["torch"]


@pytest.mark.parametrize("has_torch", [False, True])
def test_what_is_imported_is_not_looked_through_for_garbage(
    has_torch: bool, frozen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever after only where the caller can have no tensors among it."""
    name = f"imports_torch_{has_torch}"
    (tmp_path / f"{name}.py").write_text(IMPORTS_TORCH)
    _has_torch(monkeypatch, has_torch)
    assert not plait._imported(name).COLLECTS
    assert gc.isenabled()
    assert frozen == ([] if has_torch else ["frozen"])


def test_garbage_is_collected_again_after_an_import_that_failed(frozen: list[str], tmp_path: Path) -> None:
    (tmp_path / "fails_to_import.py").write_text("raise ImportError('no')")
    with pytest.raises(ImportError, match="no"):
        plait._imported("fails_to_import")
    assert gc.isenabled() and not frozen


def test_who_collects_by_hand_goes_on_to(frozen: list[str], tmp_path: Path) -> None:
    (tmp_path / "imports_nothing.py").write_text("")
    gc.disable()
    try:
        plait._imported("imports_nothing")
        assert not gc.isenabled()
    finally:
        gc.enable()
