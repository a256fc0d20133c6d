"""Networks that take images: the smallest image with which one gives a finite loss, and the loss.

In: how it is built with a size of images. Out: a `Case`. Nothing is looked up by a network's name.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.coverage_models.case import Case, UnbuildableError

SIZES = (32, 64, 96, 128, 160, 224, 299)
"""Heights and widths of images in the order in which they are tried."""
CLASSES = 10
"""What networks tell apart."""
LARGEST = 40_000_000
"""Parameters at most."""
LAST_BITS = 2.0**-22
"""A relative change that float32 just sees."""
STEADY = 1e-3
"""How far it may move the gradients."""
_SMALL = (
    "test",
    "atto",
    "femto",
    "pico",
    "nano",
    "tiny",
    "mini",
    "xxs",
    "xs",
    "small",
    "_s",
    "lite",
    "050",
    "b0",
    "18",
    "11",
    "_t",
)
"""What names of small variants have in them, the smallest first."""
_SHORTLIST = 4
"""Variants of a family whose parameters are counted."""


def smallest(names: Sequence[str], build: Callable[[str], nn.Module]) -> str:
    """The variant with the fewest parameters among a few that sound small."""
    ranked = sorted(
        names, key=lambda name: next((i for i, part in enumerate(_SMALL) if part in name), len(_SMALL))
    )
    counts: dict[str, int] = {}
    for name in ranked[: 2 * _SHORTLIST]:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counts[name] = sum(p.numel() for p in build(name).parameters())
        except Exception:  # some cannot be built without memory
            continue
        if len(counts) == _SHORTLIST:
            break
    if counts and min(counts.values()) > LARGEST:
        raise UnbuildableError(f"the smallest variant has {min(counts.values()) / 1e6:.0f} M parameters")
    return min(counts, key=lambda name: counts[name]) if counts else ranked[0]


def image_case(
    name: str, ways: Callable[[int], Iterator[Callable[[], nn.Module]]], shape: tuple[int, ...] = (3,)
) -> Case:
    """The first size, and of that the first way to build, that gives a finite loss with gradients that mean something.

    Batch norm over two samples of one pixel each turns the last bits of its input into gradients; a larger image is
    taken then.
    """
    failed: Exception | None = None
    shaky: Case | None = None
    for size in SIZES:
        for build in ways(size):
            try:
                torch.manual_seed(0)
                model = build().train()
                data = [_sample(index, (*shape, size, size)) for index in range(8)]
                for kind in ("label", "map"):
                    objective = partial(loss_of, kind=kind)
                    batch = {key: torch.stack([entry[key] for entry in data[:2]]) for key in data[0]}
                    try:
                        loss = objective(model, batch)
                        loss.backward()
                    except Exception as error:
                        failed = failed or error
                        continue
                    if bool(torch.isfinite(loss)):
                        count = sum(p.numel() for p in model.parameters()) / 1e6
                        note = f"{name} {size} px, {count:.1f} M"
                        case = Case(model=build, samples=data, objective=objective, note=note)
                        if _is_steady(model, objective, batch):
                            return case
                        shaky = shaky or case
                        break
            except Exception as error:
                failed = failed or error
    if shaky is not None:
        return shaky
    raise UnbuildableError(f"{name}: {type(failed).__name__}: {str(failed).strip()[:200]}")


def _is_steady(model: nn.Module, objective: Callable[[Any, Any], Tensor], batch: dict[str, Tensor]) -> bool:
    """Whether gradients stay what they are when the last bits of the weights change."""
    given = [parameter for parameter in model.parameters() if parameter.grad is not None]
    first = []
    for change in (0.0, LAST_BITS):
        model.zero_grad()
        with torch.no_grad():
            for parameter in given:
                parameter.mul_(1 + change)
        torch.manual_seed(0)
        objective(model, batch).backward()
        first.append(torch.cat([p.grad.flatten() for p in given if p.grad is not None]))
    return first[0].shape == first[1].shape and bool((first[0] - first[1]).norm() < STEADY * first[0].norm())


def _sample(index: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(index)
    label = torch.randint(CLASSES, (), generator=draw)
    return {
        "image": torch.randn(shape, generator=draw),
        "label": label,
        "map": torch.randint(CLASSES, shape[-2:], generator=draw),
    }


def loss_of(model: Any, batch: dict[str, Tensor], kind: str) -> Tensor:
    """Cross-entropy of all outputs, auxiliary ones too."""
    found = list(_tensors(model(batch["image"])))
    losses = [F.cross_entropy(output, batch[kind]) for output in found]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
