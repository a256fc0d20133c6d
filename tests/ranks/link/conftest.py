"""What tests of shared memory start from: each of the two cores."""

from pathlib import Path

import pytest

from plait.run import native
from plait.run.link.shm import core


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The compiled core, where there is a compiler."""
    library = tmp_path_factory.mktemp("core") / "core.so"
    return library if native.build(library) else None


@pytest.fixture(params=["compiled", "python"])
def either_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built: Path | None) -> str:
    """Both executors of shared memory."""
    library = None
    if request.param == "compiled":
        if built is None:
            pytest.skip("no C compiler: install gcc")
        library = native.load(built)
    monkeypatch.setattr(core, "compiled", lambda: library)
    return str(request.param)
