"""The layers of torch_geometric: one case a layer, between two linear layers, on batches of small graphs.

In: the name of a layer. Out: a `Case`, or `UnbuildableError`. Arguments follow from the names in a layer's signature.
Graphs of a batch are joined to one, as the library's own batches are: nodes after each other, edges shifted.
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as geometric
from torch import Tensor, nn

from bench.coverage_models.case import Case, UnbuildableError

NODES = 6
"""Of a graph."""
EDGES = 14
"""Of a graph."""
WIDTH = 8
"""Features of a node."""

_ARGUMENTS: dict[str, Any] = {
    "in_channels": WIDTH, "out_channels": WIDTH, "hidden_channels": WIDTH, "channels": WIDTH, "num_layers": 2,
    "K": 2, "dim": 2,
    "kernel_size": 3, "edge_dim": None, "num_relations": 3, "heads": 2, "num_timesteps": 2, "alpha": 0.5,
    "theta": 0.5, "layer": 1,
    "num_heads": 2, "aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 1, 4, 1]),
    "num_nodes": NODES,
    "num_groups": 2, "num_types": 2, "space_dimensions": 2, "propagate_dimensions": 2, "k": 2, "size": WIDTH,
    "normalized_shape": WIDTH,
}  # fmt: skip
"""By the name of an argument without a default."""


def names() -> list[str]:
    """The layers that take nodes and edges, and norm layers."""
    layers = {*geometric.conv.__all__, *geometric.norm.__all__}
    return sorted(
        name
        for name in layers
        if inspect.isclass(getattr(geometric, name, None)) and name != "MessagePassing"
    )


class Around(nn.Module):
    """A layer between two linear ones, on graphs that are joined to one."""

    def __init__(self, layer: nn.Module, takes: tuple[str, ...]) -> None:
        super().__init__()
        self.before, self.layer, self.takes = nn.Linear(WIDTH, WIDTH), layer, takes
        self.after = nn.LazyLinear(3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        graphs = x.shape[0]
        shift = torch.arange(graphs, device=x.device).mul(NODES).view(-1, 1, 1)
        given: dict[str, Any] = {
            "x": self.before(x.flatten(0, 1)),
            "edge_index": (edges + shift).transpose(0, 1).flatten(1),
            "batch": torch.arange(graphs, device=x.device).repeat_interleave(NODES),
            "batch_size": graphs,
            "pos": x.flatten(0, 1)[:, :2],
            "edge_attr": x[:, :1, :2].expand(-1, EDGES, -1).flatten(0, 1),
            "pseudo": x[:, :1, :2].expand(-1, EDGES, -1).flatten(0, 1).sigmoid(),
            "edge_type": torch.arange(EDGES, device=x.device).remainder(3).repeat(graphs),
            "type_vec": torch.arange(NODES, device=x.device).remainder(2).repeat(graphs),
        }
        given["x_0"] = given["h"] = given["x"]
        found = self.layer(*(given[name] for name in self.takes))
        while not isinstance(found, Tensor):
            found = found[0]
        return self.after(found.reshape(graphs, NODES, -1))


def _build(name: str) -> nn.Module:
    cls = getattr(geometric, name)
    wanted = {
        key: _ARGUMENTS[key]
        for key, entry in inspect.signature(cls.__init__).parameters.items()
        if entry.default is inspect.Parameter.empty and key in _ARGUMENTS
    }
    for key, entry in inspect.signature(cls.__init__).parameters.items():
        if entry.default is inspect.Parameter.empty and key in ("nn", "local_nn", "mlp"):
            wanted[key] = nn.Sequential(nn.Linear(_inner(name), WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    layer = cls(**wanted)
    takes = [
        key
        for key, entry in inspect.signature(cls.forward).parameters.items()
        if key != "self"
        and (
            entry.default is inspect.Parameter.empty
            or (key in ("edge_attr", "edge_type") and "relations" in str(wanted))
        )
    ]
    model = Around(layer, tuple(takes))
    with torch.no_grad():
        sample = _sample(0)
        model(sample["x"][None].repeat(2, 1, 1), sample["edges"][None].repeat(2, 1, 1))
    return model


def _inner(name: str) -> int:
    return 2 * WIDTH if "Edge" in name else WIDTH


def _sample(index: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(index)
    return {
        "x": torch.randn(NODES, WIDTH, generator=draw),
        "edges": torch.randint(NODES, (2, EDGES), generator=draw),
        "y": torch.randint(3, (NODES,), generator=draw),
    }


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Every node is classified."""
    return F.cross_entropy(model(batch["x"], batch["edges"]).flatten(0, 1), batch["y"].flatten())


def case_of(name: str) -> Case:
    """One layer."""
    try:
        torch.manual_seed(0)
        model = _build(name)
        data = [_sample(index) for index in range(8)]
        loss = loss_of(model, {key: torch.stack([entry[key] for entry in data[:2]]) for key in data[0]})
        loss.backward()
    except Exception as error:
        raise UnbuildableError(f"{type(error).__name__}: {str(error).strip()[:200]}") from error
    return Case(model=partial(_build, name), samples=data, objective=loss_of, note=name)
