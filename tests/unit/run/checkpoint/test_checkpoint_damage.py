"""Torn, damaged and hostile checkpoints: found, named, and never believed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.run.checkpoint.checkpoint_states import (
    collect,
    damage,
    remake_manifest,
    rewrite_state,
    small_state,
)
from torch import Tensor, nn

import plait
from plait.errors import CheckpointError
from plait.run.checkpoint import format as checkpoint_format
from plait.run.checkpoint.state import (
    TrainingState,
    collect_optimizer,
)
from plait.run.checkpoint.store import export_checkpoint, load_checkpoint, save_checkpoint
from plait.run.parent.resume import continued_from


def test_optimizer_with_state_that_is_no_tensor_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match=r"LBFGS keeps '.*' of weight as list"):
        collect_optimizer(optimizer, model.named_parameters())


@pytest.mark.parametrize("name", checkpoint_format.FILES)
def test_damage_falls_back_to_the_one_before_with_a_notice(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state(1))
    newest = save_checkpoint(tmp_path, small_state(2))
    damage(newest / name)
    with pytest.warns(
        UserWarning, match=rf"step-00000002 is passed over .*{name} is damaged.*step-00000001 is used"
    ):
        assert load_checkpoint(tmp_path).step == 1
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        load_checkpoint(newest)


@pytest.mark.parametrize("name", [*checkpoint_format.FILES, "complete.json"])
@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_torn_checkpoint_is_passed_over_with_a_notice(name: str, how: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state(1))
    newest = save_checkpoint(tmp_path, small_state(2))
    if how == "truncated":
        (newest / name).write_bytes((newest / name).read_bytes()[:-7])
    else:
        (newest / name).unlink()
    notices: list[str] = []
    assert load_checkpoint(tmp_path, on_notice=notices.append).step == 1
    assert len(notices) == 1
    assert "step-00000002" in notices[0]
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(newest)
    save_checkpoint(tmp_path, small_state(2))
    assert load_checkpoint(tmp_path, on_notice=notices.append).step == 2
    assert len(notices) == 1


def test_nothing_to_load_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint\nFix: "):
        load_checkpoint(tmp_path)
    damage(save_checkpoint(tmp_path, small_state(1)) / "model.safetensors")
    with pytest.raises(CheckpointError, match="no complete checkpoint; damaged: step-00000001"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=99, plait="7.0"), "format 99, written by plait '7.0'"),
        (lambda data: data.pop("format"), "format None"),
        (lambda data: data.update(step="2"), "step='2': expected a whole number"),
        (lambda data: data.update(step=True), "step=true: expected a whole number"),
        (lambda data: data.update(step=-3), "whole number"),
        (lambda data: data.update(aliases={"../../x": "../../y"}), "which the checkpoint does not hold"),
        (lambda data: data.update(aliases={"x": ["w"]}), "aliases.x=a list: expected text"),
        (lambda data: data.update(buffers=["../../b"]), "which is not in model"),
        (lambda data: data.update(dtypes={"w": "float64", "b": "float32"}), "'w' is float32 in .*, float64"),
        (lambda data: data["optimizer"].update(values={"../w": {}}), "which is not a parameter"),
        (lambda data: data["optimizer"].update(groups=[3]), r"optimizer.groups\[0\]=3: expected a table"),
        (lambda data: data["optimizer"]["groups"][0].update(shapes=[]), "1 names and 0 shapes"),
        (lambda data: data.update(extra=[]), "extra=a list: expected a table"),
    ],
)
def test_hostile_state_files_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, small_state(2))
    rewrite_state(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_what_is_not_a_json_object_is_refused(text: str | bytes, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, small_state(2))
    (folder / "state.json").write_bytes(text.encode() if isinstance(text, str) else text)
    remake_manifest(folder)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04K\x01.", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"]
)
def test_what_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, small_state(2))
    (folder / "model.safetensors").write_bytes(content)
    remake_manifest(folder)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_checkpoint(tmp_path)


def test_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, small_state(2))
    manifest = json.loads((folder / "complete.json").read_text())
    manifest["files"]["../../../etc/hostname"] = manifest["files"].pop("state.json")
    (folder / "complete.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not list exactly"):
        load_checkpoint(folder)


def test_tensor_names_are_never_paths(tmp_path: Path) -> None:
    state = TrainingState(step=1, parameters={"../../evil": torch.ones(2)}, buffers={})
    save_checkpoint(tmp_path / "run", state)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    out = export_checkpoint(tmp_path / "run", to="safetensors", out=tmp_path / "out.safetensors")
    assert list(load_file(out)) == ["../../evil"]


def test_optimizer_state_of_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, small_state(1))
    save_file(
        {"w/exp_avg": torch.ones(4), "../../w/exp_avg": torch.ones(4)}, folder / "optimizer.safetensors"
    )
    remake_manifest(folder)
    with pytest.raises(CheckpointError, match=r"state of '\.\./\.\./w', which is not a parameter"):
        load_checkpoint(tmp_path)


def test_a_step_that_is_not_the_folders_is_refused(tmp_path: Path) -> None:
    """Samples would be left out, or all of training."""
    folder = save_checkpoint(tmp_path, small_state(4))
    rewrite_state(folder, lambda data: data.update(step=10**12))
    with pytest.raises(CheckpointError, match="1000000000000 steps are done, the name of its folder 4"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (torch.zeros(3), r"\(3,\) of torch.float32"),
        (torch.zeros(()), r"\(\) of torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), r"\(2, 3\) of torch.int64"),
        (None, "nothing"),
    ],
)
def test_state_that_the_optimizer_cannot_have_left_is_refused(
    changed: Tensor | None, told: str, tmp_path: Path
) -> None:
    job = plait.Job(
        model=lambda: nn.Linear(3, 2), data=[(torch.ones(3), torch.ones(2))] * 4, loss=nn.MSELoss(), batch=2, steps=2,
        seed=3, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )  # fmt: skip
    model = job.build_model()
    optimizer = job.build_optimizer(list(model.named_parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    said = {
        "seed": 3,
        "batch": 2,
        "epochs": None,
        "steps": 2,
        "shuffle": True,
        "drop_last": False,
        "num_samples": 4,
    }
    extra = said | {"progress": {}, "plan": "single"}
    folder = save_checkpoint(tmp_path, replace(collect(model, optimizer, step=1), extra=extra))
    assert continued_from(folder, job).step == 1
    tensors = load_file(folder / "optimizer.safetensors")
    del tensors["weight/exp_avg"]
    if changed is not None:
        tensors["weight/exp_avg"] = changed
    save_file(tensors, folder / "optimizer.safetensors")
    remake_manifest(folder)
    with pytest.raises(CheckpointError, match=rf"keeps 'exp_avg' of 'weight' as \(2, 3\).*has {told}"):
        continued_from(folder, job)
