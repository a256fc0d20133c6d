"""`plait.doctor`: what is there is ok, what is not is absent with a fix, and nothing that is found raises."""

import shutil
import socket
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.api import doctor
from plait.api.doctor import Diagnosis, Finding
from plait.api.packages import ENGINES, OPTIONAL, REQUIRED, is_new_enough

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def named(found: Diagnosis, name: str) -> Finding:
    return next(finding for finding in found.findings if finding.name == name)


def test_this_machine() -> None:
    found = plait.doctor()
    assert found.ok and found.plait == plait.__version__
    assert torch.__version__ in named(found, "torch").what
    assert named(found, "sockets").ok and named(found, "cores").ok
    assert [finding.group for finding in found.findings] == sorted(
        (finding.group for finding in found.findings),
        key=["environment", "devices", "links", "engines", "optional"].index,
    )
    assert all(finding.what and (finding.ok or finding.fix) for finding in found.findings)


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = plait.doctor()
    assert not found.ok
    told = named(found, "torch")
    assert not told.ok and told.required and "pip install torch" in told.fix
    assert not named(found, "NCCL").ok and not named(found, "cuda").ok


def test_an_optional_part_that_is_absent_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = plait.doctor()
    assert found.ok
    assert not named(found, "pyarrow").ok and "pyarrow>=17.0" in named(found, "pyarrow").fix
    assert not named(found, "C++ compiler").ok and "no no-such-compiler" in named(found, "C++ compiler").what


def test_a_required_package_that_is_absent_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    found = plait.doctor()
    assert not found.ok and '"cloudpickle>=3.0"' in named(found, "packages").fix


def test_links_that_fail_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socketpair", refuse)
    told = named(plait.doctor(), "sockets")
    assert not told.ok and "Operation not permitted" in told.what and told.fix


@pytest.mark.parametrize(("size", "enough"), [(64 * 2**20, False), (2**33, True)])
def test_a_small_place_for_shared_memory_is_told(
    size: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size, 0, size))
    assert doctor._shm(tmp_path).ok is enough
    assert not doctor._shm(tmp_path / "none").ok


@pytest.mark.parametrize(
    ("found", "least", "enough"),
    [
        ("2.13.0+cpu", "2.11", True), ("2.9.1", "2.11", False), ("3", "3.0", True),
        ("2.12.0.dev2026", "2.11", True),
        ("0.4.5", "0.4.5", True), ("0.4.4", "0.4.5", False),
        ("of an unknown version", "1.0", True), (None, "1.0", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_number(found: str | None, least: str, enough: bool) -> None:
    assert is_new_enough(found, least) is enough


def test_it_looks_for_what_the_project_declares() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert [f"{name}>={least}" for name, least in REQUIRED.items()] == project["dependencies"]
    extras = {
        entry
        for name, entries in project["optional-dependencies"].items()
        if name not in ("bench", "coverage", "dev")  # ours, made of the others
        for entry in entries
    }
    assert {f"{name}>={least}" for name, (least, _) in (OPTIONAL | ENGINES).items()} == extras
