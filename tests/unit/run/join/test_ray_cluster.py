"""Which cluster of Ray a run takes: none that another user has put where Ray looks for one."""

import os
import signal
import stat
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import RunError
from plait.run.engines.ray import RayRun
from plait.run.engines.ray_cluster import connected
from plait.run.start.watch.interrupts import Interrupts


class FakeRay:
    """Is connected where somebody listens; remembers how."""

    def __init__(self, *living: str) -> None:
        self._living = ("local", *living)
        self.told: dict[str, Any] | None = None
        self.shut_down = 0

    def is_initialized(self) -> bool:
        return self.told is not None

    def init(self, **told: Any) -> None:
        if told["address"] not in self._living:
            raise ConnectionError("nobody listens")
        self.told = told

    def shutdown(self) -> None:
        assert self.told is not None
        folder = self.told.get("_temp_dir")
        assert folder is None or Path(folder).parent.is_dir()  # it is there for as long as its processes are
        self.shut_down += 1


@pytest.fixture(autouse=True)
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which Ray looks for a cluster."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "ray").mkdir()
    path = tmp_path / "ray" / "ray_current_cluster"
    path.write_text("10.0.0.1:6379\n")
    return path


def test_one_that_this_user_has_started_is_taken() -> None:
    ray, said = FakeRay("10.0.0.1:6379"), list[str]()
    with connected(ray, None, 2, said.append):
        assert ray.told is not None and ray.told["address"] == "10.0.0.1:6379"
    assert (ray.shut_down, said) == (1, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_one_of_another_user_is_not(named: Path) -> None:
    os.chown(named, 65534, 65534)
    ray, said = FakeRay("10.0.0.1:6379"), list[str]()
    with connected(ray, None, 2, said.append):
        assert ray.told is not None and ray.told["address"] == "local"
    assert "of another user (id 65534)" in said[0]


def test_one_of_its_own_is_nobody_elses(named: Path) -> None:
    named.unlink()
    ray = FakeRay()
    with suppress(ValueError), connected(ray, None, 2, print):
        assert ray.told is not None
        folder = Path(ray.told["_temp_dir"]).parent  # Ray lets everybody write to its own
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
        raise ValueError
    assert not folder.exists()
    assert ray.shut_down == 1


def test_one_that_was_named_and_is_not_there_is_told() -> None:
    with (
        pytest.raises(RunError, match="no cluster of Ray at elsewhere"),
        connected(FakeRay(), "elsewhere", 2, print),
    ):
        raise AssertionError("connected")


def test_a_signal_to_the_command_is_passed_on_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each, and the command ends as the run does."""
    sent: list[int] = []
    first = SimpleNamespace(
        code=None, is_lost=False, actor=SimpleNamespace(signal=SimpleNamespace(remote=sent.append))
    )
    run: Any = object.__new__(RayRun)
    run._members, run._interrupts, looks = [first], 0, iter((None, None, 130))
    monkeypatch.setattr(RayRun, "_look", lambda self, member, say, show: setattr(member, "code", next(looks)))
    with Interrupts() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert run._follow(asked, print, print) == 130
    assert sent == [signal.SIGTERM]
