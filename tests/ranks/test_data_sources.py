"""Data by worker processes, samplers and text in batches: two ranks train on what one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import plait


class Letters(Dataset[Any]):
    """A number and a text; one of them cannot be read; what is added at random is the sample's own."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        if index == 5:
            raise OSError("torn")
        return torch.full((3,), index / 20) + 0.1 * torch.rand(3), "ab"[index % 2] * (index % 3 + 1)


def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, words = batch
    assert len(words) == len(x) and all(isinstance(word, str) for word in words)
    lengths = torch.tensor([float(len(word)) for word in words], dtype=x.dtype)
    error = (model(x).flatten() - lengths) ** 2
    return error.sum(), torch.tensor(float(len(words)))


def trained(tmp_path: Path, name: str, ranks: int, workers: int, notices: list[str]) -> plait.Result:
    weights = [1.0] * 21
    loader = DataLoader(Letters(), batch_size=6, sampler=WeightedRandomSampler(weights, 20), drop_last=True)
    job = plait.Job(
        model=lambda: nn.Linear(3, 1), data=loader, objective=objective, workers=workers, skip_bad=1, epochs=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), evaluate=DataLoader(Letters(), batch_size=6),
    )  # fmt: skip
    return plait.train(
        job,
        "ddp" if ranks > 1 else "single",
        ranks,
        out=tmp_path / name,
        saving=plait.Saving(record_samples=True),
        watching=plait.Watching(
            listener=lambda event: notices.append(event["notice"]) if "notice" in event else None
        ),
    )


def test_a_sample_that_cannot_be_read_is_not_called_a_fault_of_the_model(tmp_path: Path) -> None:
    notices: list[str] = []
    job = plait.Job(
        model=lambda: nn.Linear(3, 1), data=Letters(), loss=nn.MSELoss(), batch=21, steps=1, shuffle=False,
        collate=lambda samples: (torch.stack([x for x, _ in samples]), torch.zeros(len(samples), 1)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )  # fmt: skip
    with pytest.raises(plait.PlaitError, match=r"sample 5 .*damaged"):
        plait.train(
            job,
            "single",
            out=tmp_path / "run",
            watching=plait.Watching(
                listener=lambda event: notices.extend([*event.get("notices", ()), event.get("notice", "")])
            ),
        )
    assert "capture not checked: a sample of the first step cannot be read." in notices


@pytest.mark.timeout(120)
def test_a_data_loader_trains_alike_on_any_ranks_and_workers(tmp_path: Path) -> None:
    notices: list[str] = []
    one = trained(tmp_path, "one", 1, 1, notices)
    two = trained(tmp_path, "two", 2, 2, notices)
    assert len(one.losses) == len(two.losses) == 6
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-5, atol=1e-6)
    ids = [(tmp_path / name / "samples.jsonl").read_text().count('"step"') for name in ("one", "two")]
    assert ids[0] == ids[1] == 6
    assert sum("sample 5" in line and "left out" in line for line in notices) >= 2
