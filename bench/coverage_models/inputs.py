"""Inputs of a model of transformers by the signature of its forward and its config; labels by the name of its head."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LENGTH = 12
"""Tokens of a sample."""
CLASSES = 2
"""Labels that every classifier has by default."""


def kinds_of_labels(cls: Any) -> Iterator[str]:
    """What labels may look like, the likely first."""
    name = cls.__name__
    by_name = (
        ("SequenceClassification", "class"), ("ImageClassification", "class"), ("VideoClassification", "class"),
        ("AudioClassification", "class"), ("MultipleChoice", "choice"), ("QuestionAnswering", "span"),
        ("Segmentation", "map"),
        ("DepthEstimation", "depth"), ("TokenClassification", "classes"), ("NextSentence", "class"), ("CTC", "text"),
        ("ObjectDetection", "boxes"), ("Prediction", "series"), ("XVector", "class"),
    )  # fmt: skip
    likely = [kind for part, kind in by_name if part in name]
    yield from dict.fromkeys(
        [
            *likely,
            "tokens",
            "text",
            "pairs",
            "class",
            "patches",
            "both",
            "map",
            "depth",
            "classes",
            "series",
            "none",
        ]
    )


def _found(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the fields that a config has, or one of its parts."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


class Samples:
    """Samples for one class, config and kind of labels."""

    def __init__(self, cls: Any, config: Any, kind: str) -> None:
        self.cls, self.config, self.kind = cls, config, kind
        self.accepts = inspect.signature(cls.forward).parameters
        self.main = getattr(cls, "main_input_name", "input_ids")
        self.fixed: dict[str, Any] = {}
        if "use_cache" in self.accepts:
            self.fixed["use_cache"] = False
        if kind in ("pairs", "both") and "return_loss" in self.accepts:
            self.fixed["return_loss"] = True

    def sample(self, index: int) -> dict[str, Tensor]:
        """One sample; every value from the index."""
        draw = torch.Generator().manual_seed(index)
        text = "input_ids" in self.accepts and (self.main == "input_ids" or "pixel_values" in self.accepts)
        found: dict[str, Tensor] = {}
        shape: tuple[int, ...] = (2, LENGTH) if self.kind == "choice" else (LENGTH,)
        vocabulary = min(100, int(_found(self.config, "vocab_size", default=100)))
        if text:
            found["input_ids"] = torch.randint(3, vocabulary, shape, generator=draw)
            if "attention_mask" in self.accepts:
                found["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        images = "pixel_values" in self.accepts and (
            not text or self.kind in ("pairs", "both") or self.main == "pixel_values"
        )
        size = self._image_size()
        if images:
            found["pixel_values"] = torch.randn(self._image_shape(size), generator=draw)
        if "input_values" in self.accepts:
            found["input_values"] = torch.randn(self._audio_shape(), generator=draw)
        elif "input_features" in self.accepts:
            found["input_features"] = torch.randn(self._feature_shape(), generator=draw)
        if "past_values" in self.accepts:
            found |= self._series(draw)
        found |= self._labels(draw, shape, vocabulary, size)
        return found

    def _labels(
        self, draw: torch.Generator, shape: tuple[int, ...], vocabulary: int, size: int
    ) -> dict[str, Tensor]:
        height, width = self._image_shape(size)[-2:]
        made: dict[str, Tensor] = {}
        match self.kind:
            case "tokens" | "both":
                made["labels"] = torch.randint(3, vocabulary, shape, generator=draw)
            case "text":
                made["labels"] = torch.randint(3, min(vocabulary, 20), (5,), generator=draw)
            case "class" | "choice":
                made["labels"] = torch.randint(CLASSES, (), generator=draw)
            case "classes":
                made["labels"] = torch.randint(CLASSES, shape, generator=draw)
            case "map":
                made["labels"] = torch.randint(CLASSES, (height, width), generator=draw)
            case "depth":
                made["labels"] = torch.rand((height, width), generator=draw)
            case "span":
                made |= {
                    name: torch.randint(LENGTH, (), generator=draw)
                    for name in ("start_positions", "end_positions")
                }
            case "patches":
                patch = int(_found(self.config, "patch_size", default=16))
                made["bool_masked_pos"] = torch.arange((height // patch) * (width // patch)) % 2 == index_of(
                    draw
                )
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in self.accepts and self.kind == "tokens":
                made[name] = torch.randint(2, (), generator=draw)
        return {name: value for name, value in made.items() if name in self.accepts}

    def _image_size(self) -> int:
        size = _found(self.config, "image_size", "img_size", "input_size", default=64)
        return int(size[0] if isinstance(size, (list, tuple)) else size)

    def _image_shape(self, size: int) -> tuple[int, ...]:
        channels = int(_found(self.config, "num_channels", "in_channels", "in_chans", default=3))
        frames = _found(self.config, "num_frames")
        video = "Video" in self.cls.__name__ and frames is not None
        return (int(frames), channels, size, size) if video else (channels, size, size)

    def _audio_shape(self) -> tuple[int, ...]:
        bins = _found(self.config, "num_mel_bins")
        frames = _found(self.config, "max_length")
        return (
            (int(frames), int(bins))
            if bins is not None and frames is not None and "max_length" in vars(self.config)
            else (1600,)
        )

    def _feature_shape(self) -> tuple[int, ...]:
        bins = int(
            _found(
                self.config,
                "num_mel_bins",
                "feature_size",
                "input_feat_per_channel",
                "feature_projection_input_dim",
                default=80,
            )
        )
        positions = _found(self.config, "max_source_positions")
        by_frames = (
            "SeamlessM4T" in self.cls.__name__
            or _found(self.config, "conv_kernel_sizes", "feature_projection_input_dim") is not None
        )
        return (32, bins) if positions is None or by_frames else (bins, 2 * int(positions))

    def _series(self, draw: torch.Generator) -> dict[str, Tensor]:
        context = int(_found(self.config, "context_length", default=32))
        lags = max(_found(self.config, "lags_sequence", default=[0]) or [0])
        ahead = int(_found(self.config, "prediction_length", default=8) or 8)
        width = int(_found(self.config, "num_input_channels", "input_size", default=1))
        past: tuple[int, ...] = (
            (context + lags, width) if "num_input_channels" in vars(self.config) else (context + lags,)
        )
        ahead_shape: tuple[int, ...] = (ahead, *past[1:])
        made = {
            "past_values": torch.randn(past, generator=draw),
            "future_values": torch.randn(ahead_shape, generator=draw),
        }
        features = int(_found(self.config, "num_time_features", default=0) or 0)
        made["past_time_features"] = torch.randn((*past[:1], features), generator=draw)
        made["future_time_features"] = torch.randn((ahead, features), generator=draw)
        made["past_observed_mask"] = torch.ones(past)
        return {name: value for name, value in made.items() if name in self.accepts}


def index_of(draw: torch.Generator) -> int:
    """0 or 1."""
    return int(torch.randint(2, (), generator=draw))
