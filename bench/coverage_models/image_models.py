"""The families of timm, one case each: the smallest of their variants, with the smallest image that it takes."""

from collections.abc import Callable, Iterator
from functools import partial

import timm
from torch import nn

from bench.coverage_models.case import Case
from bench.coverage_models.images import CLASSES, image_case, smallest


def names() -> list[str]:
    """The modules of timm that define models."""
    return list(timm.list_modules())


def case_of(module: str) -> Case:
    """The smallest variant of a family."""
    name = smallest(timm.list_models(module=module), partial(timm.create_model, num_classes=CLASSES))

    def ways(size: int) -> Iterator[Callable[[], nn.Module]]:
        yield partial(timm.create_model, name, num_classes=CLASSES, img_size=size)
        yield partial(timm.create_model, name, num_classes=CLASSES)

    return image_case(name, ways)
