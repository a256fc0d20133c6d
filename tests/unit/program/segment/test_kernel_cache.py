"""Compiled code is kept where nobody else can write, and is compiled by one process of a host."""

import fcntl
import getpass
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from plait.torch_private.inductor import Like, compile_graph

compiles = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a compiler: apt install g++"
)


def doubled_and(more: float) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (twice, more)),))
    return fx.GraphModule({}, graph)


@pytest.fixture(autouse=True)
def _without_headers() -> Iterator[None]:
    """They take half a minute in every new folder."""
    from torch._inductor import config

    with config.patch(cpp_cache_precompile_headers=False):
        yield


def results(more: float) -> list[float]:
    x = torch.tensor([1.0, 2.0])
    (found,) = compile_graph(doubled_and(more), [Like.of(x)], {})([x])
    assert isinstance(found, Tensor)
    return [float(value) for value in found]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "plait" / "inductor"


@compiles
def test_it_is_in_a_folder_of_this_users_alone(home: Path) -> None:
    assert results(0.25) == [2.25, 4.25]
    assert home.stat().st_mode & 0o777 == 0o700
    assert any(path.is_file() for path in home.rglob("*") if "plait-locks" not in path.parts)


@compiles
def test_a_folder_that_others_can_write_to_is_not_used(home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    assert results(0.5) == [2.5, 4.5]
    assert not list(home.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(home)


@compiles
def test_a_folder_that_the_user_names_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
    assert results(0.75) == [2.75, 4.75]
    assert list((tmp_path / "named").iterdir())


def test_nor_is_it_where_others_can_write_when_nothing_is_compiled(tmp_path: Path) -> None:
    """Torch looks into the folder whenever it traces, and somebody else has made it."""
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    code = "from plait.torch_private.fake import FakeTensorMode; FakeTensorMode()"
    clean = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    subprocess.run(
        [sys.executable, "-c", code], env=clean | {"TMPDIR": str(tmp_path)}, check=True, timeout=60
    )


@compiles
def test_who_comes_later_waits(home: Path) -> None:
    assert results(1.5) == [3.5, 5.5]
    (lock,) = (home / "plait-locks").iterdir()
    done = threading.Thread(target=results, args=(1.5,), daemon=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done.start()
        done.join(0.5)
        assert done.is_alive()
    done.join(60)
    assert not done.is_alive()
