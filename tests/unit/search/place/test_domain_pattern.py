"""Which tensors of a batch are cut by rows or positions, and what is said where none can be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import PlanError
from plait.graph.graph import Graph, Input
from plait.search.place.domain_pattern import domain_batch


def graph_with(*tensors: Tensor, samples: int = 4) -> Graph:
    """As much of a graph as the pattern looks at."""
    entries = tuple(Input(kind="batch", name=f"batch.{i}", node=f"arg{i}") for i in range(len(tensors)))
    nodes = {f"arg{i}": SimpleNamespace(meta={"val": tensor}) for i, tensor in enumerate(tensors)}
    counts = tuple(tensor.ndim > 0 and tensor.shape[0] == samples for tensor in tensors)
    graph: Any = SimpleNamespace(
        inputs_of=lambda kind: entries, nodes=lambda: nodes, batch=SimpleNamespace(has_samples=counts)
    )
    return graph


IMAGES, VOLUMES = torch.zeros(4, 3, 16, 12), torch.zeros(4, 1, 16, 8, 8)
TOKENS, FEATURES = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, 5)
CLASSES, MAP = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 16, 12, dtype=torch.int64)
MASK, VECTORS = torch.zeros(4, 16, dtype=torch.bool), torch.zeros(4, 10)


@pytest.mark.parametrize(
    ("tensors", "cut"),
    [
        ((IMAGES, CLASSES), {"batch.0": "S(2)"}),
        ((VOLUMES, VOLUMES), {"batch.0": "S(2)", "batch.1": "S(2)"}),
        ((IMAGES, MAP), {"batch.0": "S(2)", "batch.1": "S(1)"}),
        ((TOKENS, TOKENS, MASK), {"batch.0": "S(1)", "batch.1": "S(1)", "batch.2": "S(1)"}),
        ((FEATURES, CLASSES), {"batch.0": "S(1)"}),
        ((FEATURES, torch.zeros(4, 16)), {"batch.0": "S(1)", "batch.1": "S(1)"}),
        ((TOKENS, VECTORS), {"batch.0": "S(1)"}),
    ],
)
def test_by_kind(tensors: tuple[Tensor, ...], cut: dict[str, str]) -> None:
    assert dict(domain_batch(graph_with(*tensors), 2, None)) == cut


def test_by_the_plans_own_dim() -> None:
    """The largest tensor decides what belongs together."""
    assert dict(domain_batch(graph_with(IMAGES, CLASSES), 2, 3)) == {"batch.0": "S(3)"}
    assert dict(domain_batch(graph_with(VECTORS, TOKENS), 2, 1)) == {"batch.1": "S(1)"}


def test_nothing_to_cut_is_refused_with_the_shapes() -> None:
    with pytest.raises(
        PlanError, match=r"nothing of the batch can be cut: it has batch.0 \[4, 10\], batch.1 \[4\]"
    ):
        domain_batch(graph_with(VECTORS, CLASSES), 2, None)
    with pytest.raises(PlanError, match=r"nothing of the batch can be cut on dim 4"):
        domain_batch(graph_with(IMAGES), 2, 4)


def test_rows_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        PlanError, match=r"dim 2 of batch.0 \[4, 3, 16, 12\] has 16, which 3 does not divide"
    ) as refusal:
        domain_batch(graph_with(IMAGES), 3, None)
    assert refusal.value.fix is not None and "18" in refusal.value.fix
