"""The architectures of transformers: one case a model type, with the first of its heads that gives a loss.

In: a model type. Out: a `Case`, or `UnbuildableError`. Configs are made small by rule (`small_config.py`), inputs
follow from the signature of `forward` and from the config (`inputs.py`); the first of a few sizes and labels that
gives a finite loss with a gradient is taken.
"""

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from bench.coverage_models.case import Case, UnbuildableError
from bench.coverage_models.inputs import Samples, kinds_of_labels
from bench.coverage_models.small_config import Shrinker

HEADS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ",
    "CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE", "TIME_SERIES_PREDICTION", "DEPTH_ESTIMATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "PRETRAINING", "VISUAL_QUESTION_ANSWERING",
    "MULTIMODAL_LM",
    "IMAGE_TO_IMAGE", "OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "TABLE_QUESTION_ANSWERING",
    "NEXT_SENTENCE_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION", "AUDIO_XVECTOR",
    "TEXT_TO_SPECTROGRAM",
)  # fmt: skip
"""Heads in the order in which they are looked for."""
SIZES = ((16, 32, 2), (8, 32, 2), (8, 64, 2), (4, 64, 2), (8, 128, 2), (8, 64, 4), (4, 224, 2), (1, 64, 4))
"""Factors of widths, sizes of images and numbers of blocks in the order in which they are tried."""
LARGEST = 40_000_000
"""Parameters of a small version, at most."""


def names() -> list[str]:
    """The model types whose class no earlier type has."""
    seen, found = set[str](), []
    for name in configuration_auto.CONFIG_MAPPING_NAMES:
        heads = tuple(_heads(name))
        if heads and heads[0] not in seen:
            seen.add(heads[0])
            found.append(name)
    return found


def _heads(model_type: str) -> Iterator[str]:
    for head in HEADS:
        known = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).get(model_type)
        yield from (known,) if isinstance(known, str) else known or ()


def case_of(model_type: str) -> Case:
    """The smallest version of the architecture that gives a loss."""
    reasons: list[str] = []
    for head in dict.fromkeys(_heads(model_type)):
        cls = getattr(transformers, head)
        if (
            inspect.signature(cls.forward)
            .parameters.keys()
            .isdisjoint(("labels", "return_loss", "start_positions", "future_values"))
        ):
            reasons.append(f"{head}: no labels")
            continue
        for factor, image, layers in SIZES:
            try:
                config = Shrinker(factor, image, layers).config(cls.config_class())
                with torch.device("meta"):
                    count = sum(p.numel() for p in cls(config).parameters())
                if count > LARGEST:
                    raise UnbuildableError(f"{count} parameters")
                return _with_labels(cls, config, f"{head} 1/{factor}, {count / 1e6:.1f} M")
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                reasons.append(f"{head} 1/{factor}: {type(error).__name__}: {first[:120]}")
    raise UnbuildableError("; ".join(reasons[-2:]) or "no head that gives a loss")


def _with_labels(cls: Any, config: Any, note: str) -> Case:
    torch.manual_seed(0)
    model = cls(config).train()
    failed: Exception | None = None
    for kind in kinds_of_labels(cls):
        samples = Samples(cls, config, kind)
        try:
            data = [samples.sample(index) for index in range(8)]
            batch = {name: torch.stack([entry[name] for entry in data[:2]]) for name in data[0]}
            objective = partial(loss_of, fixed=samples.fixed)
            loss = objective(model, batch)
            loss.backward()
        except Exception as error:
            failed = failed or error
            continue
        if bool(torch.isfinite(loss)) and loss.dim() == 0:
            return Case(
                model=partial(_build, cls, config), samples=data, objective=objective, note=f"{note}, {kind}"
            )
    raise failed if failed is not None else UnbuildableError("no finite loss")


def _build(cls: Any, config: Any) -> nn.Module:
    return cls(config)


def loss_of(model: Any, batch: dict[str, Tensor], fixed: dict[str, Any]) -> Tensor:
    """The loss that the head gives; inputs have the model's dtype, as people who shorten it give them."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    if dtype != torch.float32:
        batch = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = model(**batch, **fixed).loss
    if loss is None:
        raise UnbuildableError("gives no loss")
    return loss
