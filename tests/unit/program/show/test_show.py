"""What `plait graph --placements` is made from: nothing that a program exchanges is missing, or invented."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.unit.program.compiled import graph_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.placements import AxisPlacements
from plait.program.compile import compile_program
from plait.program.instructions import Collective
from plait.program.place import propagate
from plait.program.place.placement import Shard
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.program.show.listing import Listing
from plait.program.show.show import list_placements
from plait.search.place.resolve import resolve_placements

SETTINGS = Settings(clip_norm=1.0, batch_norm="global", device=torch.device("cpu"))


Mesh = tuple[tuple[str, int], ...]


@cache
def listed(
    case: str, name: str, mesh: Mesh, said: AxisPlacements | None = None, sizes: tuple[int, ...] = (8,)
) -> tuple[Listing, Program]:
    return listing_of({size: graph_of(case, size) for size in set(sizes)}, name, mesh, said, sizes)


def listing_of(
    graphs: dict[int, Graph], name: str, mesh: Mesh, said: AxisPlacements | None, sizes: tuple[int, ...]
) -> tuple[Listing, Program]:
    plan = resolve(name, None, {}, dict(mesh))
    if said is not None:
        plan = replace(plan, placements=(said,))
    plan, _ = resolve_placements(graphs[sizes[0]], plan)
    program = compile_program(graphs, plan, sizes, SETTINGS)
    return list_placements(graphs[sizes[0]], plan, program), program


ON_DATA: Mesh = (("data", 2),)
ON_TENSOR: Mesh = (("tensor", 2),)
CASES = [
    ("mlp", "ddp", ON_DATA),
    ("mlp", "zero3", ON_DATA),
    ("gpt_tied", "megatron", ON_TENSOR),
    ("gpt_tied", "megatron", (("data", 2), ("tensor", 2))),
    ("unet", "domain", (("domain", 2),)),
]


@pytest.mark.parametrize(("case", "name", "mesh"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_collective_of_the_program_is_listed(case: str, name: str, mesh: Mesh) -> None:
    listing, program = listed(case, name, mesh)
    started = [i for i in program.of(0).instructions if isinstance(i, Collective)]
    wanted = Counter((i.op, i.axis, i.num_bytes) for i in started)
    shown: Counter[tuple[str, str, int]] = Counter()
    for entry in listing.transfers:
        if entry.collective != "none":
            shown[(entry.collective, entry.axis, entry.num_bytes)] += entry.count
    assert shown == wanted
    assert sum(total.count for total in listing.totals) == len(started)
    assert sum(total.num_bytes for total in listing.totals) == sum(i.num_bytes for i in started)


@pytest.mark.parametrize(("case", "name", "mesh"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_op_and_parameter_is_listed(case: str, name: str, mesh: Mesh) -> None:
    listing, _ = listed(case, name, mesh)
    graph = graph_of(case, 8)
    ops = [node for node in graph.ops() if "getitem" not in str(node.target)]
    assert sum(entry.count for entry in listing.ops) == len(ops)
    assert sum(entry.count for entry in listing.parameters) == len(graph.inputs_of("parameter"))
    assert all(len(entry.strategies) == len(listing.axes) for entry in listing.ops)


def test_repeated_blocks_are_one_entry() -> None:
    listing, _ = listed("gpt_tied", "megatron", ON_TENSOR)
    by_name = {entry.name: entry for entry in listing.parameters}
    up, fused = by_name["blocks.*.mlp.0.weight"], by_name["blocks.*.attention.qkv.weight"]
    assert (up.count, up.placements, up.shape, up.held) == (2, ("S(0)",), (128, 32), "[64, 32]")
    assert fused.placements == ("S(0/3)",)
    keys = {entry.key: entry for entry in listing.ops}
    assert keys["blocks.*.mlp.2 forward addmm 1"].strategies == ("P S(1) S(0) -> P",)
    sums = [e for e in listing.transfers if e.what == "blocks.*.mlp.2 forward view 2"]
    assert [(e.collective, e.count, e.change, e.user) for e in sums] == [
        ("all_reduce", 2, "P -> R", "blocks.* forward add 2")
    ]
    assert sums[0].source.rpartition("/")[2].startswith("zoo.py:")


def test_what_is_not_alike_in_all_blocks_is_not_folded() -> None:
    said = AxisPlacements(axis="tensor", parameters=(("blocks.1.mlp.*", "R"),))
    listing, _ = listed("gpt_tied", "megatron", ON_TENSOR, said)
    held = {(e.name, e.placements): e.count for e in listing.parameters if "mlp.0.weight" in e.name}
    assert held == {("blocks.0.mlp.0.weight", ("S(0)",)): 1, ("blocks.1.mlp.0.weight", ("R",)): 1}
    keys = {entry.key for entry in listing.ops}
    assert {"blocks.0.mlp.0 forward addmm 1", "blocks.1.mlp.0 forward addmm 1"} <= keys
    assert "blocks.*.mlp.0 forward addmm 1" not in keys


def test_parameters_of_zero3_are_parts_of_flat_tensors() -> None:
    listing, _ = listed("mlp", "zero3", ON_DATA)
    assert listing.zero == 3
    assert {entry.placements for entry in listing.parameters} == {("flat",)}
    assert listing.parameters[0].held == "1/2 of [32, 16]"
    assert any(e.what == "6 parameters" and e.collective == "all_gather" for e in listing.transfers)


def test_totals_are_those_of_all_micro_batches() -> None:
    one, _ = listed("gpt_tied", "megatron", ON_TENSOR)
    two, _ = listed("gpt_tied", "megatron", ON_TENSOR, sizes=(8, 8))
    totals = {(t.collective, t.axis): t.count for t in one.totals}
    again = {(t.collective, t.axis): t.count for t in two.totals}
    assert again[("all_gather", "tensor")] == 2 * totals[("all_gather", "tensor")]
    assert two.num_micro_batches == 2
    assert [e for e in two.transfers if e.user] == [e for e in one.transfers if e.user]


def test_a_tensor_that_is_gathered_for_want_of_a_rule_is_told_with_the_reason() -> None:
    said = AxisPlacements(
        axis="tensor",
        parameters=(("0.*", "S(0)"), ("2.*", "R"), ("4.*", "R")),
        ops=(("2 forward addmm 1", "R R R -> R"),),
    )
    listing, _ = listed("mlp", "megatron", ON_TENSOR, said)
    told = {(entry.key, entry.tensor): entry for entry in listing.fallbacks}
    entry = told[("2 forward addmm 1", "1 forward relu 1")]
    assert entry.num_bytes == 8 * 32 * 8
    assert entry.reason.startswith("whole is cheaper here than ")


class Inverse(nn.Module):
    """Needs 2 x 2 matrices whole, and inverts them with an op that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.up(x).view(-1, 2, 2) + 5 * torch.eye(2)
        return torch.linalg.inv_ex(matrices).inverse.sum((1, 2))


def graph_of_inverses() -> Graph:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8))
    job = Job(model=Inverse, data=data, loss=nn.MSELoss(), optimizer=torch.optim.SGD, batch=8, steps=1)
    return Captures(job).of_size(8)


def test_an_op_without_a_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "dtensor_strategies", lambda op: [])
    listing, _ = listing_of({8: graph_of_inverses()}, "ddp", ON_DATA, None, (8,))
    told = {entry.op: entry for entry in listing.fallbacks}
    entry = told["aten.linalg_inv_ex.default"]
    assert entry.reason == "no rule of ours or of torch's speaks for this op"
    assert (entry.num_bytes, entry.axis) == (8 * 2 * 2 * 4, "data")
    assert entry.source.rpartition("/")[2].startswith("test_show.py:")


def test_an_op_that_runs_by_a_rule_of_torchs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "dtensor_strategies", lambda op: [op.same(Shard(0))])
    listing, _ = listing_of({8: graph_of_inverses()}, "ddp", ON_DATA, None, (8,))
    (entry,) = (entry for entry in listing.fallbacks if entry.op == "aten.linalg_inv_ex.default")
    assert entry.reason == "by torch's rule for DTensor, as S(0) -> S(0) S(0): none of ours"
    assert (entry.tensor, entry.num_bytes) == ("", 0)


def test_a_dim_that_does_not_divide_is_told() -> None:
    said = AxisPlacements(axis="tensor", parameters=(("up.*", "S(0)"),))
    listing, _ = listing_of({8: graph_of_inverses()}, "megatron", (("tensor", 4),), said, (8,))
    reasons = {entry.key: entry.reason for entry in listing.fallbacks}
    assert reasons["forward view 1"] == "no rule takes [8, 4] cut as S(1) in 4 parts"
