"""`plait doctor`: a table for people, JSON for programs, exit code 0 whatever was found."""

import json
import sys

import pytest

import plait
from plait.cli.main import call


def test_a_table_that_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert call(["doctor"]) == 0
    table, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert max(map(len, table.splitlines())) <= 80
    assert all(group in table for group in ("environment", "devices", "links", "optional", "absent", "Fix: "))
    assert last.startswith("plait can train here; absent") and "C++ compiler" in last


def test_json_has_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["plait"] == plait.__version__
    assert [entry["name"] for entry in told["findings"]] == [entry.name for entry in plait.doctor().findings]


def test_a_machine_without_torch_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert call(["doctor"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("plait cannot train here yet: torch.")
