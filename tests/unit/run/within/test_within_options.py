"""Every pair of options of a job and a plan: verified on a small network, or refused before launch with a fix.

A greedy generator picks rows in which all pairs occur that can be used together; each pair that cannot is a row of its
own, with everything else as it comes.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from tests.ranks.jobs import Layerwise
from tests.zoo import LENGTH, OPTIMIZERS, unstack
from torch import Tensor, nn

from plait.errors import PlanError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.verify import Verification, verify

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "tensor": (False, True),
    "domain": (False, True),
    "sequence": (False, True),
    "accumulate": (1, 2),
    "clip_norm": (None, 0.05),
    "batch_norm": ("global", "local"),
    "optimizer": ("sgd", "adamw", "adagrad", "layerwise"),
    "precision": ("fp32", "bf16"),
    "captured": (True, False),
}
"""The first value of each is the one that a row has where it does not matter."""
Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def refusal(row: Row) -> str | None:
    """What the error says where a row cannot be used; by what its options mean, not by what the code does."""
    if row["sequence"] and not row["tensor"]:
        return "tensor.sequence cuts sequences along the axis tensor"
    if not row["captured"] and (row["tensor"] or row["domain"]):
        return "needs the inside of the model"
    if row["optimizer"] == "layerwise" and (row["tensor"] or (row["zero"] and not row["captured"])):
        return "cannot update parts"
    return None


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(row.items(), 2))


def all_pairs() -> list[Pair]:
    return [
        pair
        for first, second in combinations(OPTIONS, 2)
        for pair in product(((first, a) for a in OPTIONS[first]), ((second, b) for b in OPTIONS[second]))
    ]


def default(**changes: Any) -> Row:
    needed = {"tensor": True} if changes.get("sequence") else {}
    return {name: values[0] for name, values in OPTIONS.items()} | needed | changes


def covering_rows() -> Iterator[Row]:
    """Rows that can be used, until every pair that can be used has occurred; each adds as many pairs as it can."""
    left = {pair for pair in all_pairs() if refusal(default(**dict(pair))) is None}
    while left:
        row = default(**dict(min(left, key=str)))
        for name, values in OPTIONS.items():
            if not any(name in dict(pair) and set(pair) <= set(row.items()) for pair in left):
                tried = [row | {name: value} for value in values]
                row = max((r for r in tried if refusal(r) is None), key=lambda r: len(pairs_of(r) & left))
        left -= pairs_of(row)
        yield row


USED = tuple(covering_rows())
REFUSED = tuple(row for pair in all_pairs() if refusal(row := default(**dict(pair))) is not None)


def identity(row: Row) -> str:
    return (
        " ".join(f"{name}={value}" for name, value in row.items() if value != OPTIONS[name][0]) or "default"
    )


class Network(nn.Module):
    """Two layers of a block with a norm over samples and positions between them, then a norm over features."""

    def __init__(self, *, batch_norm: bool, captured: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 24, bias=False), nn.Linear(24, 16)
        self.between: nn.Module = nn.BatchNorm1d(24) if batch_norm else nn.Identity()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 6)
        self.captured = captured

    def forward(self, x: Tensor) -> Tensor:
        if not self.captured and float(x.sum()) > 1e9:
            return self.head(x)
        h = self.between(self.inner(x).transpose(1, 2)).transpose(1, 2).relu()
        return self.head(self.norm(x + self.outer(h)))


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(14, LENGTH, 16, generator=generator)
    return unstack((inputs, torch.randint(0, 6, (14, LENGTH), generator=generator)))


def job_of(row: Row, *, batch_norm: bool) -> Job:
    optimizer = Layerwise if row["optimizer"] == "layerwise" else OPTIMIZERS[row["optimizer"]]
    return Job(
        model=partial(Network, batch_norm=batch_norm, captured=row["captured"]),
        data=samples,
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=optimizer,
        batch=7,
        steps=2,
        accumulate=row["accumulate"],
        clip_norm=row["clip_norm"],
        batch_norm=row["batch_norm"],
        precision=row["precision"],
    )


def plan_of(row: Row) -> Plan:
    mesh = {"data": 2} | {axis: 2 for axis in ("domain", "tensor") if row[axis]}
    settings = {"tensor": {"sequence": row["sequence"]}, "sync": {"bucket_mib": 0.001}}
    return resolve(f"zero{row['zero']}" if row["zero"] else None, None, settings, mesh)


def verified(row: Row, *, batch_norm: bool) -> Verification:
    job = job_of(row, batch_norm=batch_norm)
    return verify(job, plan_of(row), steps=2, serial=True, fp32=job.precision == "bf16")


def test_every_pair_is_used_or_refused() -> None:
    used = set().union(*(pairs_of(row) for row in USED))
    refused = {pair for row in REFUSED for pair in pairs_of(row)}
    assert set(all_pairs()) <= used | refused
    assert all(refusal(row) is None for row in USED)
    assert len(USED) < 40


@pytest.mark.parametrize("row", USED, ids=identity)
def test_pairs_that_are_used_compute_the_same(row: Row) -> None:
    """Statistics of each rank alone (local), and of a share of the batch (run eagerly), are other statistics."""
    whole = row["captured"] and row["batch_norm"] == "global"
    if row["captured"] and not whole:
        assert any("batch_norm='local'" in notice for notice in verified(row, batch_norm=True).notices)
    found = verified(row, batch_norm=whole)
    assert found.ok, found.first


@pytest.mark.parametrize("row", REFUSED, ids=identity)
def test_pairs_that_are_refused_say_what_to_do(row: Row) -> None:
    said = refusal(row)
    assert said is not None
    with pytest.raises(PlanError, match=said) as caught:
        verified(row, batch_norm=True)
    assert caught.value.fix
    assert "\n" not in caught.value.what


MENDED = [row for row in REFUSED if row["tensor"] or not row["sequence"]]


@pytest.mark.parametrize("row", MENDED[:: max(1, len(MENDED) // 3)], ids=identity)
def test_a_refused_row_is_refused_by_nothing_else(row: Row) -> None:
    """The same row with an elementwise optimizer and a model that can be captured is used."""
    assert verified(row | {"optimizer": "adamw", "captured": True}, batch_norm=True).ok
