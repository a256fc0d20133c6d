"""The numbers that describe a model on paper, and the text in which people write them.

In: `gpt:layers=96,hidden=12288,heads=96` or a well-known name, with or without changes after a colon. Out: a checked
`TransformerShape` or `ImageShape`. Never builds a module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from plait.errors import JobError, did_you_mean

Family = Literal["gpt", "bert", "llama"]
Attention = Literal["fused", "plain"]
Precision = Literal["fp32", "bf16"]


def _check_positive(shape: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(shape, name) < 1:
            raise JobError(
                f"{name}={getattr(shape, name)} of a model on paper.", fix=f"set {name} to 1 or more."
            )


def _check_choice(shape: Any, name: str, allowed: tuple[Any, ...]) -> None:
    if getattr(shape, name) not in allowed:
        raise JobError(
            f"{name}={getattr(shape, name)!r} of a model on paper is unknown.",
            fix=f"use one of {', '.join(map(str, allowed))}.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerShape:
    """A transformer: equal blocks between an embedding and a head over the vocabulary."""

    family: Family
    """gpt: learned positions, norms before; bert: an encoder, norms after; llama: rotary positions, gated MLP."""
    layers: int
    """Blocks."""
    hidden: int
    """Width of the stream between blocks."""
    heads: int
    """Attention heads; they divide `hidden`."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    ffn: int = 0
    """Width inside the MLP; 0: four times `hidden`."""
    seq: int
    """Positions of a sample."""
    vocab: int
    """Words, with whatever padding there is."""
    attention: Attention = "fused"
    """fused: one kernel; plain: the scores are written out, as systems of 2021 did."""
    tied: bool = True
    """Whether the embedding and the head are one matrix."""
    dropout: float = 0.0
    """Chance to drop an activation after attention and MLP, and a plain attention weight."""
    bias: bool = True
    """Whether linear layers and norms have one."""
    precision: Precision = "bf16"
    """What the job computes in."""

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn == 0:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        _check_positive(self, ("layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab"))
        _check_choice(self, "family", get_args(Family))
        _check_choice(self, "attention", get_args(Attention))
        _check_choice(self, "precision", get_args(Precision))
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise JobError(
                f"hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads} do not divide one another.",
                fix="let heads divide hidden, and kv_heads divide heads.",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise JobError(f"dropout={self.dropout} is no chance.", fix="use a number from 0 to below 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShape:
    """A network that puts images into classes."""

    family: Literal["resnet", "alexnet"]
    """Which network."""
    layers: int = 50
    """Of resnet: 50, 101 or 152."""
    image: int = 224
    """Rows and columns of an image."""
    classes: int = 1000
    """Classes."""
    dropout: float = 0.5
    """Of alexnet: before its two wide layers."""
    precision: Precision = "fp32"
    """What the job computes in."""

    def __post_init__(self) -> None:
        _check_positive(self, ("layers", "image", "classes"))
        _check_choice(self, "precision", get_args(Precision))
        if self.family == "resnet":
            _check_choice(self, "layers", (50, 101, 152))
        if self.family == "alexnet" and self.image < 63:
            raise JobError(
                f"image={self.image} is too small for alexnet's three poolings.", fix="use 63 or more."
            )


Shape = TransformerShape | ImageShape


def _gpt(layers: int, hidden: int, heads: int, *, seq: int = 1024, vocab: int = 50257) -> TransformerShape:
    return TransformerShape(family="gpt", layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=vocab)


def _bert(layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(
        family="bert", layers=layers, hidden=hidden, heads=heads, seq=512, vocab=30522,
        dropout=0.1, attention="plain", precision="fp32",
    )  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> TransformerShape:
    return TransformerShape(
        family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, seq=8192, vocab=128256,
        tied=False, bias=False,
    )  # fmt: skip


KNOWN: Mapping[str, Shape] = MappingProxyType(
    {
        "gpt": _gpt(12, 768, 12),
        "gpt2": _gpt(12, 768, 12),
        "gpt2-medium": _gpt(24, 1024, 16),
        "gpt2-large": _gpt(36, 1280, 20),
        "gpt2-xl": _gpt(48, 1600, 25),
        "gpt3-175b": _gpt(96, 12288, 96, seq=2048, vocab=51200),
        "bert-base": _bert(12, 768, 12),
        "bert-large": _bert(24, 1024, 16),
        "llama": _llama(32, 4096, 32, 14336),
        "llama3-8b": _llama(32, 4096, 32, 14336),
        "llama3-70b": _llama(80, 8192, 64, 28672),
        "llama3-405b": _llama(126, 16384, 128, 53248),
        "resnet50": ImageShape(family="resnet"),
        "alexnet": ImageShape(family="alexnet"),
    }
)
"""Models by name, from their papers; GPT-3's vocabulary is padded as Megatron pads it."""


def read_shape(text: str) -> Shape:
    """`NAME` or `NAME:key=value,...`: what it does not say is as in the model that it names."""
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in KNOWN:
        raise JobError(
            f"there is no model on paper called {name!r}.",
            fix=f"{did_you_mean(name, KNOWN)}choose one of {', '.join(KNOWN)}.",
        )
    base = KNOWN[name]
    types = {field.name: type(getattr(base, field.name)) for field in fields(base) if field.name != "family"}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in types:
            raise JobError(
                f"the model {text!r} has no option {part.strip()!r}.",
                fix=f"write NAME:key=value,... with keys among {', '.join(types)}.",
            )
        given[key] = _parsed(key, value, types[key])
    if isinstance(base, TransformerShape):
        # The widths that follow from others in the named model follow from the new ones too.
        if ("hidden" in given or "heads" in given) and "kv_heads" not in given and base.family != "llama":
            given["kv_heads"] = 0
        if "hidden" in given and "ffn" not in given and base.family != "llama":
            given["ffn"] = 0
    return replace(base, **given)


def _parsed(key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise JobError(f"{key}={value!r} is neither true nor false.", fix="set it to true or false.")
        return value.lower() in ("true", "1")
    try:
        return kind(value)
    except ValueError as error:
        raise JobError(f"{key}={value!r} is not a number.", fix=f"give {key} a number.") from error
