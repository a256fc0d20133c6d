"""The families of torchvision, one case each: the smallest of their variants, with the smallest image that it takes."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import torchvision
from torch import nn

from bench.coverage_models.case import Case
from bench.coverage_models.images import CLASSES, image_case, smallest

FRAMES = 16
"""Of a video."""


def names() -> list[str]:
    """The modules of torchvision that define models; quantized copies are no architectures of their own."""
    modules = {_module_of(name) for name in torchvision.models.list_models()}
    return sorted(module for module in modules if "quantization" not in module)


def _module_of(name: str) -> str:
    return torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")


def _build(name: str, **more: int) -> nn.Module:
    takes = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    weights = {"weights_backbone": None} if "weights_backbone" in takes else {}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=CLASSES, **weights, **more
    )
    return model


def case_of(module: str) -> Case:
    """The smallest variant of a family."""
    name = smallest([n for n in torchvision.models.list_models() if _module_of(n) == module], _build)

    def ways(size: int) -> Iterator[Callable[[], nn.Module]]:
        yield partial(_build, name, image_size=size)
        yield partial(_build, name)

    return image_case(name, ways, (3, FRAMES) if module.startswith("video.") else (3,))
