"""Parity of plans on meshes of several axes with one process, up to 8 ranks in this process; and wrong sums, wrong
gathers and wrong edges, which verification must see."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.unit.run.within.within import assert_equal, assert_refused, check, reference
from torch import Tensor

from plait.errors import PlanError
from plait.run.interpret import serial
from plait.run.link.links import with_halo

EIGHT: tuple[dict[str, int], ...] = ({"data": 2, "tensor": 4}, {"data": 4, "tensor": 2})
NAMES = (
    "mlp",
    "lstm",
    "gpt",
    "gpt_tied",
    "gpt_dropout",
    "masked_gpt",
    "graph_network",
    "moe_dense",
    "moe_capacity",
)
CUT_TWICE: tuple[tuple[str, dict[str, int]], ...] = (
    ("zero1", {"data": 2, "tensor": 2}),
    ("zero2", {"data": 4, "tensor": 2}),
    ("zero3", {"data": 2, "tensor": 2}),
    ("zero3", {"data": 2, "tensor": 4}),
    ("domain", {"data": 2, "domain": 2}),
    ("domain", {"data": 2, "domain": 4}),
    ("zero3", {"data": 2, "domain": 2}),
)
CUT_THRICE: tuple[tuple[str, dict[str, int]], ...] = (
    ("sequence", {"data": 2, "domain": 2, "tensor": 2}),
    ("zero3", {"data": 2, "domain": 2, "tensor": 2}),
)


@pytest.mark.parametrize(
    ("name", "mesh"), [(name, EIGHT[turn % len(EIGHT)]) for turn, name in enumerate(NAMES)], ids=str
)
def test_data_and_tensor_on_eight_ranks(name: str, mesh: dict[str, int]) -> None:
    """In turn: each of the meshes is tried on models of every kind, and each model on one."""
    assert_equal(check(reference(name), "megatron", mesh=mesh))


@pytest.mark.parametrize(("plan", "mesh"), [*CUT_TWICE, *CUT_THRICE], ids=str)
@pytest.mark.parametrize("name", ["gpt_dropout", "graph_network", "moe_capacity"])
def test_several_axes(name: str, plan: str, mesh: dict[str, int]) -> None:
    assert_equal(check(reference(name), plan, mesh=mesh))


@pytest.mark.parametrize("plan", ["sequence", "tensor"])
def test_choices_beside_data(plan: str) -> None:
    assert_equal(check(reference("gpt_tied"), plan, mesh={"data": 2, "tensor": 2}))


@pytest.mark.parametrize(("plan", "mesh"), [CUT_TWICE[2], CUT_TWICE[4], CUT_THRICE[1]], ids=str)
@pytest.mark.parametrize("name", ["masked_gpt", "lstm"])
def test_several_axes_with_micro_batches(name: str, plan: str, mesh: dict[str, int]) -> None:
    assert_equal(check(reference(name, 2), plan, mesh=mesh))


def test_an_axis_that_the_data_does_not_have_is_refused_on_a_mesh_too() -> None:
    with pytest.raises(PlanError) as caught:
        check(reference("mlp"), "zero3", mesh={"data": 2, "domain": 2})
    assert_refused(caught.value, "domain=2: nothing of the batch can be cut")


# --- planted faults -----------------------------------------------------------------------------------------


def forgets_the_last(tensors: Sequence[Tensor]) -> Tensor:
    """A sum without the last rank's part, of what is large enough to be no scalar."""
    kept = tensors[:-1] if tensors[0].numel() > 8 else tensors
    return torch.stack(list(kept)).sum(0)


@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        ("gpt", "zero1", {"data": 2}),
        ("gpt", "zero2", {"data": 2}),
        ("gpt", "zero3", {"data": 4}),
        ("gpt", "megatron", {"tensor": 2}),
        ("gpt", "sequence", {"tensor": 2}),
        ("unet", "domain", {"domain": 2}),
        ("mlp", "zero3", {"data": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_a_wrong_sum_is_seen(name: str, plan: str, mesh: dict[str, int]) -> None:
    known = reference(name, 1, 1)
    assert check(known, plan, mesh=mesh).ok
    found = check(known, plan, mesh=mesh, reduce=forgets_the_last)
    assert {difference.kind for difference in found.differences if not difference.ok} >= {
        "gradient",
        "weight",
    }
    assert found.first is not None


def _first_everywhere(pieces: Sequence[Tensor], *more: Any) -> Tensor:
    """A gather that forgets the last piece: it takes the one before it twice."""
    last = pieces[-2] if pieces[-2].shape == pieces[-1].shape else torch.zeros_like(pieces[-1])
    return _JOINED([*pieces[:-1], last], *more)


_JOINED = serial._joined


@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        ("gpt", "zero1", {"data": 2}),
        ("gpt", "zero3", {"data": 4}),
        ("gpt", "sequence", {"tensor": 2}),
        ("lstm", "domain", {"domain": 2}),
    ],
    ids=str,
)
def test_a_wrong_gather_is_seen(
    name: str, plan: str, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = reference(name, 1, 2)
    assert check(known, plan, mesh=mesh).ok
    monkeypatch.setattr(serial, "_joined", _first_everywhere)
    found = check(known, plan, mesh=mesh)
    assert "gradient" in {difference.kind for difference in found.differences if not difference.ok}


def test_wrong_edges_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring rows that are not there count as the border of the image."""
    known = reference("unet", 1, 1)
    exact = with_halo
    monkeypatch.setattr(serial, "with_halo", lambda own, before, after, c: exact(own, None, after, c))
    found = check(known, "domain", 2)
    assert "gradient" in {difference.kind for difference in found.differences if not difference.ok}
