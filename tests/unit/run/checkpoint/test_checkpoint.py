"""Writing, keeping, finding and exporting checkpoints."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tests.unit.run.checkpoint.checkpoint_states import (
    Tied,
    assert_equal,
    collect,
    small_state,
    train,
)

from plait.errors import CheckpointError
from plait.run.checkpoint import files as checkpoint_files
from plait.run.checkpoint import format as checkpoint_format
from plait.run.checkpoint.state import (
    TrainingState,
)
from plait.run.checkpoint.store import export_checkpoint, load_checkpoint, locate_checkpoint, save_checkpoint


def test_round_trip_of_dtypes_views_and_empty_tensors(tmp_path: Path) -> None:
    bucket = torch.arange(12.0)
    parameters = {
        "a/b.c": bucket[:4].view(2, 2),
        "transposed": bucket[4:].view(2, 4).t(),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "double": torch.randn(3, dtype=torch.float64),
        "complex": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor(2.5),
    }
    buffers = {"count": torch.tensor(2**40), "mask": torch.tensor([True, False])}
    state = TrainingState(step=0, parameters=parameters, buffers=buffers, extra={"ü": [None, 1.5, "x"]})
    save_checkpoint(tmp_path, state)
    assert_equal(load_checkpoint(tmp_path), state)


def test_values_that_are_not_json_are_refused_where_they_stand(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.extra\.position\[1\] is a tuple"):
        save_checkpoint(tmp_path, replace(small_state(1), extra={"position": [0, (1, 2)]}))
    with pytest.raises(CheckpointError, match=r"state\.schedule has the key 3"):
        save_checkpoint(tmp_path, replace(small_state(1), schedule={3: 1}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="w is complex128"):
        save_checkpoint(
            tmp_path,
            TrainingState(step=1, parameters={"w": torch.ones(1, dtype=torch.complex128)}, buffers={}),
        )
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, small_state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    with pytest.raises(CheckpointError, match="keep=0"):
        save_checkpoint(tmp_path, small_state(5), keep=0)


def test_a_step_saved_again_is_the_newest_also_when_it_is_an_earlier_one(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, small_state(step), keep=3)
    again = replace(small_state(20), extra={"again": True})
    assert save_checkpoint(tmp_path, again, keep=3).name == "step-00000020.1"
    assert load_checkpoint(tmp_path).extra == {"again": True}
    save_checkpoint(tmp_path, small_state(15), keep=1)
    assert load_checkpoint(tmp_path).step == 15
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000015"]


@pytest.mark.parametrize("mode", ["calls", "random"])
def test_kill_at_any_moment_leaves_the_last_good_one(mode: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("checkpoint_crash.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoints"), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def fill(at: str) -> None:
        def no_space(*_arguments: object, **_options: object) -> None:
            if at == "tensors":
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, "No space left on device")

        if at == "tensors":
            monkeypatch.setattr(checkpoint_format, "save_file", no_space)
        else:
            monkeypatch.setattr(checkpoint_files if at == "manifest" else checkpoint_format, "sync", no_space)

    return fill


@pytest.mark.parametrize("at", ["tensors", "files", "manifest"])
def test_full_disk_keeps_the_last_good_one(at: str, tmp_path: Path, full_disk: Callable[[str], None]) -> None:
    save_checkpoint(tmp_path, small_state(1))
    full_disk(at)
    with pytest.raises(
        CheckpointError, match=r"step 2 .*No space left.* needs 12\.0 MiB and .* is free"
    ) as raised:
        save_checkpoint(tmp_path, replace(small_state(2), parameters={"w": torch.zeros(3 * 2**20)}))
    assert raised.value.fix is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_equal(load_checkpoint(tmp_path), small_state(1))


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """A limit that the operating system enforces on each file this process writes."""
    limit = 100_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_refused_by_the_system_keeps_the_last_good_one(tmp_path: Path, file_size_limit: int) -> None:
    save_checkpoint(tmp_path, small_state(1))
    with pytest.raises(CheckpointError, match=r"step 2 .*File too large"):
        save_checkpoint(tmp_path, small_state(2, size=file_size_limit))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_checkpoint(tmp_path / "file" / "checkpoints", small_state(1))


def test_save_over_its_time_limit_is_given_up_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state(1))
    with pytest.raises(CheckpointError, match=r"step 2 .* took over 0 ns"):
        save_checkpoint(tmp_path, small_state(2), time_limit_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_run_folder_checkpoints_folder_and_one_checkpoint_are_all_understood(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path / "checkpoints", small_state(1))
    second = save_checkpoint(tmp_path / "checkpoints", small_state(2))
    assert locate_checkpoint(tmp_path) == locate_checkpoint(tmp_path / "checkpoints") == second
    assert load_checkpoint(first).step == 1


def test_complaint_17_tied_weights_are_exported_once(tmp_path: Path) -> None:
    model = Tied()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=range(2))
    state = collect(model, torch.optim.SGD(model.parameters(), lr=0.1), step=2)
    assert state.aliases == {"head.weight": "embed.weight"}
    assert state.transient == ("calls",)
    checkpoint = save_checkpoint(tmp_path, state)
    assert "head.weight" not in load_file(checkpoint / "model.safetensors")

    out = export_checkpoint(tmp_path, to="safetensors", out=tmp_path / "new" / "weights.safetensors")
    exported = load_file(out)
    assert exported.keys() == model.state_dict().keys() - {"head.weight"}
    with safe_open(out, framework="pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}
    other = Tied()
    result = other.load_state_dict(exported, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.weight"], [])
    assert torch.equal(other.head.weight, model.head.weight)


def test_exported_state_dict_loads_strictly_and_ties_share_memory(tmp_path: Path) -> None:
    model = Tied()
    save_checkpoint(tmp_path / "run", collect(model, torch.optim.SGD(model.parameters(), lr=0.1), step=0))
    out = export_checkpoint(tmp_path / "run", to="state_dict", out=tmp_path)
    assert out == tmp_path / "model.pt"
    exported = torch.load(out, weights_only=True)
    assert exported["head.weight"].data_ptr() == exported["embed.weight"].data_ptr()
    other = Tied()
    other.load_state_dict(exported)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    export_checkpoint(tmp_path / "run", to="state_dict", out=tmp_path / "plain")  # a name without a dot
    assert torch.load(tmp_path / "plain", weights_only=True).keys() == exported.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "plain", "run"]


def test_export_to_what_it_cannot_write_is_an_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", small_state(1))
    with pytest.raises(CheckpointError, match="cannot export to 'onnx'"):
        export_checkpoint(tmp_path / "run", to="onnx", out=tmp_path / "x")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_checkpoint(tmp_path / "run", to="state_dict", out=tmp_path / "file" / "x.pt")


def test_records_are_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk that turns read-only keeps the checkpoint and loses the records of the steps that led to it."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")
    os.mkfifo(tmp_path / "handed-over.jsonl")  # nobody is waited for there
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    save_checkpoint(tmp_path / "checkpoints", small_state(1))
    first = synced.index("complete.json")
    assert {"metrics.jsonl", "samples.jsonl", tmp_path.name} <= set(synced[:first])
