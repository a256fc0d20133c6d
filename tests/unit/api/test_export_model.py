"""Trained models as other tools take them."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from torch import Tensor

import plait
from plait.errors import UsageError


def _language_model() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def _objective(model: torch.nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return found


def test_a_hugging_face_folder_is_what_from_pretrained_takes_and_a_run_begins_with(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    job = plait.Job(
        model=_language_model, data=torch.arange(32).reshape(8, 4) % 11, objective=_objective, batch=4, steps=2,
        collate=lambda samples: torch.stack([s if isinstance(s, Tensor) else s[0] for s in samples]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    result = plait.train(job, "single", out=tmp_path / "run")
    with pytest.raises(UsageError, match="does not say which job"):
        plait.export(result.folder, to="huggingface")
    folder = plait.export(result.folder, to="huggingface", job=job)
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    for name, value in result.weights.items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    again = plait.Job(
        model=_language_model, weights=folder, data=job.data, objective=_objective, batch=4, collate=job.collate,
        optimizer=job.optimizer,
    )  # fmt: skip
    assert torch.equal(
        again.build_model().state_dict()["transformer.wte.weight"], result.weights["transformer.wte.weight"]
    )


def test_what_other_tools_do_not_take_is_refused(tmp_path: Path) -> None:
    result = plait.train(jobs.plain(), "single", steps=1, out=tmp_path / "run")
    with pytest.raises(UsageError, match="no save_pretrained"):
        plait.export(result.folder, to="huggingface", job=jobs.plain())
    with pytest.raises(UsageError, match="use one of safetensors, state_dict, huggingface, onnx"):
        plait.export(result.folder, to="pickle")  # type: ignore[arg-type]


def test_onnx_computes_what_the_model_does_for_any_number_of_samples(tmp_path: Path) -> None:
    result = plait.train(jobs.dropout(), "single", steps=2, out=tmp_path / "run")
    if find_spec("onnx") is None or find_spec("onnxscript") is None:  # an extra: plait[onnx]
        with pytest.raises(UsageError, match=r"pip install 'plait\[onnx\]'"):
            plait.export(result.folder, to="onnx", job=jobs.dropout())
        return
    path = plait.export(result.folder, to="onnx", job=jobs.dropout())
    evaluator = import_module("onnx.reference").ReferenceEvaluator(str(path))
    model = jobs.network()
    model.load_state_dict(result.weights)
    model.eval()
    for count in (1, 5):
        inputs = torch.stack([sample for sample, _ in jobs.samples(count)])
        (found,) = evaluator.run(None, {evaluator.input_names[0]: inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(inputs).detach())
