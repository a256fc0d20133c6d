"""Plans whose sums and gathers go hop by hop: the same numbers as one process, serially and between processes."""

from pathlib import Path
from typing import Any

import pytest
from tests.ranks import jobs

import plait
from plait.errors import PlanError, UsageError
from plait.plan.named import resolve
from plait.run.setup.device import check_suits_device
from plait.trace.files import read_trace

pytestmark = pytest.mark.timeout(90)
EMULATED = "bandwidth=1Gbit,latency=100us,hosts=2x2"
"""Two hosts of two ranks."""


@pytest.mark.parametrize(
    ("plan", "ranks", "mesh", "algorithm"),
    [
        ("ddp", 3, None, "ring"),
        ("zero3", 4, None, "recursive-halving"),
        ("zero1", 3, None, "double-tree"),
        ("megatron", 2, None, "tree"),
        ("megatron", 4, {"data": 2, "tensor": 2}, "ring"),
        ("ddp", 4, None, "hierarchical"),
        ("1f1b", 6, {"data": 3, "pipe": 2}, "ring"),
        ("zero-bubble", 6, {"data": 3, "pipe": 2}, "double-tree"),
        ("server-sync", 4, None, "ring"),
    ],
)
def test_serially(plan: str, ranks: int, mesh: dict[str, int] | None, algorithm: str) -> None:
    changes = plait.Changes(settings={"links": {"algorithm": algorithm}}, mesh=mesh or {})
    found = plait.verify(jobs.reference("dropout"), plan, ranks, changes=changes, steps=2, serial=True)
    assert found.ok


@pytest.mark.parametrize(
    ("plan", "mesh", "links", "emulate"),
    [
        ("ddp", {"data": 3}, {"algorithm": "ring"}, None),
        ("zero3", {"data": 4}, {"algorithm": "tree", "groups": 3}, None),
        ("ddp", {"data": 3}, {"groups": 3, "transport": "sockets"}, None),
        ("zero3", {"data": 4}, {"algorithm": "hierarchical"}, EMULATED),
        ("ddp", {"data": 4}, {"algorithm": "auto", "groups": 3}, EMULATED),
        ("megatron", {"data": 2, "tensor": 2}, {"algorithm": "tree"}, None),
        ("1f1b", {"data": 2, "pipe": 2}, {"algorithm": "ring", "groups": 2}, EMULATED),
    ],
)
def test_between_processes(
    plan: str, mesh: dict[str, int], links: dict[str, Any], emulate: str | None
) -> None:
    settings = {"links": links}
    found = plait.verify(
        jobs.reference("dropout"),
        plan,
        changes=plait.Changes(settings=settings, mesh=mesh),
        steps=2,
        emulate=emulate,
    )
    assert found.ok


@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_workers_of_servers_sum_by_it(transport: str) -> None:
    settings = {"links": {"algorithm": "ring", "transport": transport}}
    assert plait.verify(
        jobs.reference("dropout"), "server-sync", 3, changes=plait.Changes(settings=settings), steps=2
    ).ok


def test_where_nobody_sums_it_is_told() -> None:
    settings = {"links": {"algorithm": "ring"}}
    found = plait.predict(
        jobs.plain(), "server-async", 3, changes=plait.Changes(settings=settings), cluster="3xcpu"
    )
    assert any("has nothing to choose: under server-async" in line for line in found.notices)


def test_a_hybrid_shows_its_hops(tmp_path: Path) -> None:
    """Both stages of a pipeline, measured and predicted: every message of a ring among two, and the pipe's own."""
    settings, mesh = {"links": {"algorithm": "ring"}}, {"data": 2, "pipe": 2}
    plait.train(
        jobs.plain(),
        "1f1b",
        changes=plait.Changes(mesh=mesh, settings=settings),
        steps=2,
        out=tmp_path,
        watching=plait.Watching(progress=False),
    )
    predicted = plait.predict(
        jobs.plain(), "1f1b", changes=plait.Changes(mesh=mesh, settings=settings), cluster="4xcpu"
    ).trace
    for trace in (read_trace(tmp_path), predicted):
        for rank in trace.ranks:
            own = [span for span in trace.spans if (span.rank, span.step) == (rank, 1)]
            sums = [span for span in own if span.name.startswith("all_reduce bucket:")]
            hops = [span for span in own if "round" in span.name]
            assert sums and len(hops) >= 2 * len(sums)


def test_a_timeline_shows_every_hop(tmp_path: Path) -> None:
    """Of a ring among three: each rank receives four messages a sum, one after the other, and adds two of them."""
    settings = {"links": {"algorithm": "ring"}}
    plait.train(
        jobs.plain(),
        "ddp",
        3,
        changes=plait.Changes(settings=settings),
        steps=2,
        out=tmp_path,
        watching=plait.Watching(progress=False),
    )
    predicted = plait.predict(
        jobs.plain(), "ddp", 3, changes=plait.Changes(settings=settings), cluster="3xcpu"
    ).trace
    for trace in (read_trace(tmp_path), predicted):
        for rank in trace.ranks:
            own = [span for span in trace.spans if (span.rank, span.step) == (rank, 1)]
            (whole,) = [span for span in own if span.name == "all_reduce bucket:0"]
            inside = [span for span in own if whole.start_s <= span.start_s and span.end_s <= whole.end_s]
            names = [
                span.name for span in sorted(inside, key=lambda span: span.start_s) if "round" in span.name
            ]
            source, blocks = (rank - 1) % 3, [(rank - 2 - at) % 3 for at in range(2)]
            blocks += [(rank - 1 - at) % 3 for at in range(2)]
            assert names == [f"block {block} {source}>{rank} round {at}" for at, block in enumerate(blocks)]


def test_the_choice_is_told(tmp_path: Path) -> None:
    settings = {"links": {"algorithm": "auto"}}
    told: list[dict[str, Any]] = []
    plait.train(
        jobs.plain(),
        "ddp",
        2,
        changes=plait.Changes(settings=settings),
        steps=1,
        out=tmp_path,
        watching=plait.Watching(listener=told.append),
    )
    lines = [event["notice"] for event in told if "links.algorithm=auto" in event.get("notice", "")]
    assert any(line.startswith("links.algorithm=auto: all_reduce of ") for line in lines)
    shown = plait.placements(jobs.plain(), "ddp", 2, changes=plait.Changes(settings=settings)).notices
    assert any(line.startswith("links.algorithm=auto: all_reduce of ") for line in shown)


def test_where_it_cannot_be_it_is_refused() -> None:
    with pytest.raises(PlanError, match="links.algorithm"):
        resolve("ddp", 2, {"links": {"algorithm": "magic"}})
    with pytest.raises(PlanError, match="memory that ranks share"):
        resolve("ddp", 2, {"links": {"algorithm": "shared", "transport": "sockets"}})
    with pytest.raises(UsageError, match="is for processors"):
        check_suits_device(resolve("ddp", 2, {"links": {"algorithm": "ring"}}), "cuda")
