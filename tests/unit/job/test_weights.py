"""A model begins with weights from files that others wrote, whatever the plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.ranks import jobs
from torch import Tensor, nn

import plait
from plait.errors import JobError
from plait.job.model.weights import load_weights
from plait.run.verify import verify


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(4)


def _weights(seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean = torch.randn(4)
    return dict(model.state_dict())


def _written(folder: Path, kind: str) -> Path:
    held = {name: value for name, value in _weights().items() if name != "head.weight"}
    if kind == "safetensors":
        save_file(held, folder / "w.safetensors")
        return folder / "w.safetensors"
    if kind == "state_dict":
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in held.items()}}, folder / "w.pt")
        return folder / "w.pt"
    names = list(held)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, own in parts.items():
        save_file({name: held[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "state_dict", "folder with an index"])
def test_every_format_gives_every_tensor(tmp_path: Path, kind: str) -> None:
    model = Tied()
    found = load_weights(model, _written(tmp_path, kind))
    assert (found.missing, found.unexpected) == ((), ()) and model.head.weight is model.words.weight
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, _weights()[name], rtol=0, atol=0)


def test_what_a_file_is_is_told_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    held = {name: value for name, value in _weights().items() if name != "head.weight"}
    save_file(held, tmp_path / "a")
    torch.save(held, tmp_path / "b.safetensors")
    torch.save(held, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("a", "b.safetensors", "old.bin"):
        assert load_weights(Tied(), tmp_path / name).found == len(held)
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "a").read_bytes()[:100])
    for name in ("empty.safetensors", "torn.safetensors"):
        with pytest.raises(JobError, match=f"{name} cannot be read as weights"):
            load_weights(Tied(), tmp_path / name)


def test_what_is_missing_or_unknown_is_told_and_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    held = {"words.weight": torch.ones(5, 4), "old.bias": torch.ones(2)}
    save_file(held, tmp_path / "some.safetensors")
    model = Tied()
    found = load_weights(model, tmp_path / "some.safetensors")
    assert found.unexpected == ("old.bias",) and "norm.weight" in found.missing
    assert "head.weight" not in found.missing and float(model.words.weight.detach().sum()) == 20
    assert any("not in the model: old.bias" in line for line in found.lines())
    save_file({"words.weight": torch.ones(6, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(JobError, match=r"words.weight is \[6, 4\]"):
        load_weights(model, tmp_path / "other.safetensors")
    save_file({"nothing": torch.ones(1)}, tmp_path / "none.safetensors")
    with pytest.raises(JobError, match="none of the 1 tensors"):
        load_weights(model, tmp_path / "none.safetensors")
    (tmp_path / "bad.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(JobError, match="cannot be read as weights"):
        load_weights(model, tmp_path / "bad.pt")
    with pytest.raises(JobError, match="holds no weights"):
        load_weights(model, tmp_path / "..")


def test_a_run_begins_with_them_and_says_so(tmp_path: Path) -> None:
    first = plait.train(jobs.plain(), "single", steps=3, out=tmp_path / "first")
    weights = plait.export(first.folder)
    told: list[str] = []

    def listen(event: dict[str, object]) -> None:
        told.extend(map(str, event.get("notices", ())))  # type: ignore[call-overload]

    again = replace(jobs.plain(), weights=weights)
    plait.train(again, "single", steps=1, out=tmp_path / "second", watching=plait.Watching(listener=listen))
    assert any("tensors begin as in" in line for line in told)
    model = again.build_model()
    for name, value in first.weights.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    assert verify(again, "zero3", 2, steps=2, serial=True).ok


@pytest.mark.parametrize("parts", ['{"a": 3}', '{"a": ""}', '{"a": "../b"}', "[" * 5000, "3"])
def test_an_index_that_is_none_is_refused(parts: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {parts}}}')
    with pytest.raises(JobError, match=r"model\.safetensors\.index\.json"):
        load_weights(nn.Linear(1, 1), index)
