"""Hugging Face's Trainer on two ranks against transformers' own on one: weights, logs, evaluation, a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.own_loops.test_own_loop import close

import plait

transformers: Any = pytest.importorskip("transformers", reason="pip install 'plait[hf]'")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def samples() -> list[dict[str, Any]]:
    """Sentences of different lengths, some of whose words do not count."""
    torch.manual_seed(1)
    found = []
    for number in range(13):
        words = torch.randint(1, 17, (3 + number % 4,)).tolist()
        labels = [-100 if place < number % 3 else word for place, word in enumerate(words)]
        found.append({"input_ids": words, "labels": labels})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    longest = 6  # of all: what a model makes of padding is no affair of ours

    def filled(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])

    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}


def language() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


class Classes(torch.nn.Module):
    """A model whose loss is a mean of its own making; unequal shares of the last batch, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(17, 4).double()
        self.out = torch.nn.Linear(4, 2).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.words(input_ids).mean(1))
        return {
            "loss": torch.nn.functional.cross_entropy(logits, labels.clamp(min=0).sum(1) % 2),
            "logits": logits,
        }


def metrics(prediction: Any) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions)), "sum": float(prediction.predictions.sum())}


def trained(trainer: Any, model: Any, folder: str, batch: int, **more: Any) -> dict[str, Any]:
    def made(**changed: Any) -> Any:
        options = {
            "output_dir": folder, "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch,
            "num_train_epochs": 2, "learning_rate": 0.05, "max_grad_norm": 0.5, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
            "save_safetensors": False, **more, **changed,
        }  # fmt: skip
        known = transformers.TrainingArguments.__dataclass_fields__
        args = transformers.TrainingArguments(
            **{key: value for key, value in options.items() if key in known}
        )
        return trainer(
            model=model(), args=args, train_dataset=samples(), eval_dataset=samples()[:5],
            data_collator=collate, compute_metrics=metrics,
        )  # fmt: skip

    whole = made()
    whole.train()
    measured = whole.evaluate()
    stopped = made(save_strategy="steps", save_steps=1, max_steps=3)
    stopped.train()
    resumed = made()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    logs = [entry for entry in whole.state.log_history if "loss" in entry]
    return {
        "weights": [value.tolist() for value in whole.model.state_dict().values()],
        "resumed": [value.tolist() for value in resumed.model.state_dict().values()],
        "losses": [[entry["loss"], entry["grad_norm"]] for entry in logs],
        "measured": [measured["eval_loss"], measured["eval_rows"], measured["eval_sum"]],
    }


CASES: list[tuple[Any, dict[str, Any]]] = [
    (language, {"gradient_accumulation_steps": 2}),
    (language, {"label_smoothing_factor": 0.1}),
    (Classes, {"remove_unused_columns": False}),
]


def on_two(folder: str) -> list[Any]:
    from plait.hf import Trainer

    torch.manual_seed(torch.distributed.get_rank())
    return [
        trained(Trainer, model, f"{folder}/{number}", 2, **more) for number, (model, more) in enumerate(CASES)
    ]


def test_a_trainer_on_two_ranks_trains_as_on_one(tmp_path: Path) -> None:
    expected = [
        trained(transformers.Trainer, model, f"{tmp_path}/one{number}", 4, **more)
        for number, (model, more) in enumerate(CASES)
    ]
    for found in plait.launch(on_two, 2, str(tmp_path / "two")):
        for mine, theirs in zip(found, expected, strict=True):
            smoothed = mine is found[1]  # transformers smooths labels in float32
            for key in ("weights", "resumed"):
                for own, other in zip(mine[key], theirs[key], strict=True):
                    if smoothed:
                        assert torch.allclose(torch.tensor(own), torch.tensor(other), rtol=1e-3, atol=1e-4)
                    else:
                        close(own, other)
            assert mine["losses"] == [
                pytest.approx(pair, rel=1e-4) for pair in theirs["losses"]
            ]  # rounded by transformers
            assert mine["measured"] == pytest.approx(theirs["measured"], rel=1e-4 if smoothed else 1e-6)
