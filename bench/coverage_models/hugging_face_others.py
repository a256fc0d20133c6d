"""The architectures of transformers with other heads and other configs than `hugging_face.py` takes.

In: `model_type/HeadClass/variant`. Out: a `Case`, or `UnbuildableError`. Each head of a model type that gives a loss
is a case under every variant of its small config; there are thousands, of which a sweep draws some by a seed.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from bench.coverage_models import hugging_face
from bench.coverage_models.case import Case, UnbuildableError
from bench.coverage_models.small_config import Shrinker

LABELS = ("labels", "return_loss", "start_positions", "future_values")
"""A forward that takes one of these may give a loss."""
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_INNER = ("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A config and those in it."""
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for inner in nested for part in _parts(inner))]


def _as_it_is(config: PretrainedConfig) -> None:
    """Nothing is changed."""


def _plain_attention(config: PretrainedConfig) -> None:
    """Attention written out instead of the fused one."""
    config._attn_implementation = "eager"


def _other_tying(config: PretrainedConfig) -> None:
    """Tied embeddings where they are not, and the other way round."""
    for part in _parts(config):
        if hasattr(part, "tie_word_embeddings"):
            part.tie_word_embeddings = not part.tie_word_embeddings


def _three_layers(config: PretrainedConfig) -> None:
    """As many layers as no number of ranks divides."""
    for part in _parts(config):
        for name in _LAYERS:
            if getattr(part, name, None) == 2:
                setattr(part, name, 3)
        if getattr(part, "layer_types", None):
            part.layer_types = [*part.layer_types, part.layer_types[-1]][:3]


def _odd_widths(config: PretrainedConfig) -> None:
    """Three heads of six, an odd width within."""
    for part in _parts(config):
        heads = [name for name in _HEADS if isinstance(getattr(part, name, None), int)]
        widths = [name for name in _WIDTHS if isinstance(getattr(part, name, None), int)]
        for name in heads if widths else ():
            setattr(part, name, 3)
        for name in widths if heads else ():
            setattr(part, name, 18)
        if getattr(part, "num_key_value_heads", None) and heads and widths:
            part.num_key_value_heads = 1
        if getattr(part, "head_dim", None) and heads and widths:
            part.head_dim = 6
        for name in _INNER:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 37)


def _other_dropout(config: PretrainedConfig) -> None:
    """Dropout where there is none, and none where there is."""
    for part in _parts(config):
        for name, value in vars(part).items():
            if name.endswith(("dropout", "_pdrop", "dropout_prob")) and isinstance(value, float):
                setattr(part, name, 0.3 if value == 0.0 else 0.0)


VARIANTS: Mapping[str, Callable[[PretrainedConfig], None]] = {
    "same": _as_it_is,
    "attention": _plain_attention,
    "tying": _other_tying,
    "layers": _three_layers,
    "widths": _odd_widths,
    "dropout": _other_dropout,
    "checkpointing": _as_it_is,
    "bfloat16": _as_it_is,
}
"""What is done to a small config; `checkpointing` and `bfloat16` are asked of the model."""


def names() -> list[str]:
    """Every model type with every head that gives a loss, under every variant; not what `hugging_face.py` has."""
    found = []
    for model_type in hugging_face.names():
        for number, head in enumerate(dict.fromkeys(hugging_face._heads(model_type))):
            found += [f"{model_type}/{head}/{variant}" for variant in VARIANTS if number or variant != "same"]
    return found


def case_of(name: str) -> Case:
    """The smallest version of it that gives a loss."""
    _, head, variant = name.split("/")
    cls = getattr(transformers, head)
    if inspect.signature(cls.forward).parameters.keys().isdisjoint(LABELS):
        raise UnbuildableError(f"{head}: no labels")
    reasons: list[str] = []
    for factor, image, layers in hugging_face.SIZES:
        try:
            config = Shrinker(factor, image, layers).config(cls.config_class())
            VARIANTS[variant](config)
            return _built(cls, config, variant, f"{head} 1/{factor}")
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            reasons.append(f"{head} 1/{factor}: {type(error).__name__}: {first[:120]}")
    raise UnbuildableError("; ".join(reasons[-2:]))


def _built(cls: Any, config: PretrainedConfig, variant: str, note: str) -> Case:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > hugging_face.LARGEST:
        raise UnbuildableError(f"{count} parameters")
    if variant == "checkpointing":
        if not cls.supports_gradient_checkpointing:
            raise UnbuildableError("no checkpointing")
        cls = _Asked(cls, lambda model: model.gradient_checkpointing_enable())
    if variant == "bfloat16":
        cls = _Asked(cls, lambda model: model.bfloat16())
    return hugging_face._with_labels(cls, config, f"{note}, {count / 1e6:.1f} M")


class _Asked:
    """A class of models that something is asked of once they are built; otherwise it is that class."""

    def __init__(self, cls: Any, ask: Callable[[Any], Any]) -> None:
        self._cls, self._ask = cls, ask

    def __call__(self, config: PretrainedConfig) -> Any:
        model = self._cls(config)
        self._ask(model)
        return model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)
