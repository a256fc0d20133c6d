"""Whole networks with every sample cut by rows or positions: losses and gradients as in one piece."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import graph_of
from tests.unit.program.in_mailboxes import run_graph
from tests.unit.run.training import CASES
from torch import Tensor, fx

from plait.graph.graph import Graph
from plait.graph.ops.random import random_key
from plait.program.local.communicate import COLLECTIVES
from plait.program.local.localize import localize
from plait.program.place.placement import AxisShares, Placement, Shard
from plait.program.place.propagate import Placements, propagate

SAMPLES = 7
CUT = {4: 2, 2: 1}
"""The dim of a batch tensor that is cut, by its number of dims: rows of images, positions of sequences."""


def place(graph: Graph, data: tuple[int, ...], ranks: int) -> list[Placements]:
    """Samples over `data`, rows or positions over `domain`."""
    batch = [(entry.node, graph.nodes()[entry.node].meta["val"]) for entry in graph.inputs_of("batch")]
    samples: dict[str, Placement] = {node: Shard(0) for node, _ in batch}
    rows: dict[str, Placement] = {
        node: Shard(CUT[value.ndim])
        for node, value in batch
        if value.ndim in CUT and value.shape[CUT[value.ndim]] % ranks == 0
    }
    first = propagate(graph, AxisShares(name="data", units=data), samples)
    domain = AxisShares(name="domain", units=(1,) * ranks)
    return [first, propagate(graph, domain, rows, others=[first])]


def values_of(graph: Graph, name: str) -> dict[str, Any]:
    """What enters the graph: a model and a batch of the case."""
    torch.manual_seed(0)
    model = CASES[name].model().double()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    batch = graph.batch.tensors(CASES[name].samples(SAMPLES, 5))
    entries = graph.inputs_of("batch")
    found: dict[str, Any] = {}
    for entry, tensor in zip(entries, batch, strict=True):
        found[entry.node] = tensor.double() if tensor.is_floating_point() else tensor
    for entry in graph.inputs:
        if entry.kind in ("parameter", "buffer"):
            found[entry.node] = held[entry.name].detach()
        elif entry.kind == "key":
            found[entry.node] = random_key(seed=1, step=0)
        elif entry.kind == "tangent":
            found[entry.node] = torch.tensor(0.25, dtype=torch.float64)
    return found


@torch.no_grad()
def run_whole(graph: Graph, inputs: dict[str, Any]) -> dict[str, Tensor]:
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    nodes = graph.nodes()
    leaving = {"total": graph.total, "weight": graph.weight}
    leaving |= {f"gradient:{k}": v for k, v in graph.gradients.items()}
    leaving |= {f"buffer:{k}": v for k, v in graph.new_buffers.items()}
    return {name: values[nodes[node]] for name, node in leaving.items()}


NAMES = (
    "small_batch_norm", "other_norms", "resnet_bn", "unet", "gpt", "gpt_tied", "encoder", "masked_gpt", "ignore_index",
    "hf_vit", "hf_bert", "lstm",
)  # fmt: skip


MESHES = [
    *((name, (4, 3), 2) for name in NAMES),
    *((name, (7,), 4) for name in ("unet", "gpt", "small_batch_norm", "ignore_index")),
]
"""A case, the samples of each rank of `data`, and the ranks of `domain`."""


@pytest.mark.parametrize(("name", "data", "ranks"), MESHES, ids=str)
def test_a_network_cut_by_rows(name: str, data: tuple[int, ...], ranks: int) -> None:
    graph = graph_of(name, SAMPLES)
    inputs = values_of(graph, name)
    found = run_graph(graph, place(graph, data, ranks), inputs)
    for key, wanted in run_whole(graph, inputs).items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-8, atol=1e-9, msg=lambda m: f"{key}: {m}")  # noqa: B023


def communication(name: str, ranks: int) -> Counter[str]:
    graph = graph_of(name, SAMPLES)
    local = localize(graph, place(graph, (7,), ranks), (0, 0), local_batch_norm=False)
    return Counter(node.target.__name__ for node in local.graph.nodes if node.target in COLLECTIVES)


def test_a_unet_only_exchanges_halos() -> None:
    assert set(communication("unet", 2)) == {"halo", "halo_add"}


def test_a_transformer_gathers_only_keys_and_values() -> None:
    found = communication("gpt", 2)
    assert found["all_gather"] <= 2 * 2 * 2, "keys and values of two blocks, forward and backward"


def test_local_statistics_are_those_of_a_rank_of_data_with_all_its_rows() -> None:
    """With samples over 2 ranks and rows over 2, as with the samples alone."""
    graph = graph_of("small_batch_norm", SAMPLES)
    inputs = values_of(graph, "small_batch_norm")
    apart, rows = place(graph, (4, 3), 2)
    found = run_graph(graph, [apart, rows], inputs, local_batch_norm=True)
    wanted = run_graph(graph, [apart], inputs, local_batch_norm=True)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-9, msg=lambda m: f"{key}: {m}")  # noqa: B023
    whole = run_whole(graph, inputs)
    assert not torch.allclose(found["total"], whole["total"], rtol=1e-6), (
        "the statistics are not those of all"
    )
