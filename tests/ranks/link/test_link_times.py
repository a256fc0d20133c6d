"""`plait links` on real processes, in small: every algorithm is timed, every backend tried."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import plait
from plait.cli.main import call
from plait.errors import UsageError
from plait.run.measure.links.backend_table import BACKENDS, OPERATIONS
from plait.run.measure.links.link_times import LinkReport, LinkTime

pytestmark = pytest.mark.timeout(90)


def test_links_are_timed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # which does not decide where we listen
    picture = tmp_path / "links.svg"
    assert call(["links", "--ranks", "2", "--operations", "all_reduce", "--svg", str(picture), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    algorithms = {entry["algorithm"] for entry in told["times"]}
    assert algorithms == {"gloo", "shared", "ring", "tree"}  # on two ranks the others are the same as these
    assert all(entry["seconds"] > 0 and entry["ranks"] == 2 for entry in told["times"])
    assert all(f">{name}" in picture.read_text() for name in algorithms)
    cells = {(entry["backend"], entry["operation"]): entry["works"] for entry in told["tried"]}
    assert len(cells) == len(BACKENDS) * len(OPERATIONS)
    has_mpi = shutil.which("mpirun") is not None and find_spec("mpi4py") is not None
    working = ("gloo", "plait_shm", "mpi") if has_mpi else ("gloo", "plait_shm")
    assert [(b, name) for b in working for name in OPERATIONS if not cells[b, name]] == []


def test_fits_and_crossovers() -> None:
    times = [
        LinkTime(
            operation="all_reduce", algorithm=name, ranks=4, num_bytes=size, seconds=latency + size * per_byte
        )
        for name, latency, per_byte in (("tree", 1e-5, 4e-9), ("ring", 1e-4, 1e-9))
        for size in (1 << 10, 1 << 20, 1 << 23)
    ]
    report = LinkReport(times=tuple(times), tried=())
    assert report.best("all_reduce", 4) == [(1 << 10, "tree"), (1 << 20, "ring"), (1 << 23, "ring")]
    fit = report.fits()["all_reduce", "ring", 4]
    assert fit.start_s == pytest.approx(1e-4) and fit.per_unit_s == pytest.approx(1e-9)


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(UsageError, match="fewer than 2"):
        plait.links([1])
    with pytest.raises(UsageError, match="no collective"):
        plait.links([2], operations=["sum"])
