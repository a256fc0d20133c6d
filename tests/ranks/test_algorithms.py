"""Plans whose sums and gathers go hop by hop: the same numbers as one process, serially and between processes."""

import pytest
from tests.ranks import jobs

import plait
from plait.errors import PlanError, UsageError
from plait.plan.named import resolve
from plait.run.setup.device import check_suits_device

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("plan", "ranks", "algorithm"),
    [
        ("ddp", 3, "ring"),
        ("zero3", 4, "recursive-halving"),
        ("zero1", 3, "double-tree"),
        ("megatron", 2, "tree"),
        ("ddp", 4, "hierarchical"),
    ],
)
def test_serially(plan: str, ranks: int, algorithm: str) -> None:
    settings = {"links": {"algorithm": algorithm}}
    found = plait.verify(jobs.reference("dropout"), plan, ranks, settings=settings, steps=2, serial=True)
    assert found.ok


@pytest.mark.parametrize(("plan", "ranks", "algorithm"), [("ddp", 3, "ring"), ("zero3", 4, "tree")])
def test_between_processes(plan: str, ranks: int, algorithm: str) -> None:
    settings = {"links": {"algorithm": algorithm}}
    assert plait.verify(jobs.reference("dropout"), plan, ranks, settings=settings, steps=2).ok


def test_where_it_cannot_be_it_is_refused() -> None:
    with pytest.raises(PlanError, match="links.algorithm"):
        resolve("ddp", 2, {"links": {"algorithm": "magic"}})
    with pytest.raises(PlanError, match="wait for different things"):
        resolve("1f1b", 2, {"links": {"algorithm": "ring"}})
    with pytest.raises(PlanError, match="memory that ranks share"):
        resolve("ddp", 2, {"links": {"algorithm": "shared", "transport": "sockets"}})
    with pytest.raises(UsageError, match="is for processors"):
        check_suits_device(resolve("ddp", 2, {"links": {"algorithm": "ring"}}), "cuda")
