"""What `--resume` imports is said, and refused where the user cannot know it."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.api.inputs.trust import check_remembered, fingerprint, seal
from plait.errors import UsageError


def sealed(stored: dict[str, Any]) -> dict[str, Any]:
    return stored | seal(stored)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_folder_that_was_handed_over_calls_nothing(tmp_path: Path, home: Path) -> None:
    """It holds no code, but may name any: here a function of Python's own, with arguments of its choice."""
    word = f"{subprocess.__file__}:getoutput"
    stored: dict[str, Any] = {"job": word, "args": ["cmd=touch x"], **fingerprint(word)}
    assert check_remembered(tmp_path, stored, trust=False)  # who has never started a run cannot know his own
    assert seal({"job": "mine.py"})
    for forged in (stored, stored | {"job_seal": "é"}, stored | seal({**stored, "args": ["cmd=ls"]})):
        with pytest.raises(UsageError, match=r"does not bear your seal.* \(cmd=touch x\)"):
            check_remembered(tmp_path, forged, trust=False)
        assert check_remembered(tmp_path, forged, trust=True)
    assert check_remembered(tmp_path, sealed(stored), trust=False)
    (home / ".plait" / "key").unlink()
    seal(stored)  # a new key
    with pytest.raises(UsageError, match="your seal"):
        check_remembered(tmp_path, {**stored, "job_seal": "0" * 64}, trust=False)


def test_a_job_that_changed_is_imported_only_if_the_user_says_so(tmp_path: Path) -> None:
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    folder.mkdir()
    file.write_text("def job(): ...")
    stored = sealed({"job": f"{file}:job", **fingerprint(f"{file}:job")})
    told = check_remembered(folder, stored, trust=False)
    assert told == f"imports {file}, as {folder}/environment.json says"
    file.write_text("import os")
    with pytest.raises(UsageError, match="has changed since the run") as raised:
        check_remembered(folder, stored, trust=False)
    assert f"plait run {file}:job --resume {folder}" in (raised.value.fix or "")
    assert check_remembered(folder, stored, trust=True) == told
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        check_remembered(folder, stored, trust=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_believed(tmp_path: Path) -> None:
    file, folder = tmp_path / "theirs.py", tmp_path / "run"
    folder.mkdir()
    file.write_text("")
    stored = {"job": str(file), **fingerprint(str(file))}
    os.chown(folder, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        check_remembered(folder, stored, trust=False)
    assert check_remembered(folder, stored, trust=True)


def test_a_module_is_known_by_its_file() -> None:
    assert fingerprint("json:loads")["job_file"].endswith("json/__init__.py")
    assert fingerprint("no_such_module:job") == {}
