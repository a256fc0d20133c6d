"""Graphs that differ from sample to sample, under plans of real processes: exact, counted and told."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.dynamic.test_jobs import ByCode, ByVertex, job

import plait
from plait.report.summary import report_json
from plait.report.text import print_report

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("plan", "ranks", "settings"),
    [
        ("server-sync", 3, {"sync": {"servers": 1}}),
        ("local-sgd", 2, {}),
        ("easgd", 3, {"elastic": {"variant": "round-robin"}}),
    ],
)
def test_plans_that_do_not_add_gradients_up_are_exact(
    plan: str, ranks: int, settings: dict[str, object]
) -> None:
    proof = plait.verify(job(ByVertex), plan, ranks, steps=3, changes=plait.Changes(settings=settings))
    assert proof.ok, proof


@pytest.mark.parametrize(("model", "plan"), [(ByVertex, "ddp"), (ByCode, "hogwild")])
def test_a_run_tells_of_its_graphs(model: type, plan: str, tmp_path: Path) -> None:
    given = replace(job(model), epochs=4)
    sizes = [2 * (1 + 3 * (index % 4)) - 1 for index in range(24)]
    losses = plait.train(
        replace(given, work=sizes), plan, 2, out=tmp_path / "run", saving=plait.Saving(trace=False)
    ).losses
    assert sum(losses[-4:]) < sum(losses[:4])
    graphs = report_json(tmp_path / "run")["graphs"]
    console = Console(record=True, width=200)
    print_report(tmp_path / "run", console)
    told = console.export_text()
    assert graphs["schedule_s"] > 0 and "scheduling" in told
    if model is ByVertex:
        assert graphs["num_vertices"] == 4 * sum(sizes) == sum(graphs["vertices_by_rank"])
        leaves = sum((size + 1) // 2 for size in sizes)
        shares = 2 * len(losses)
        assert graphs["level_sizes"][0] == pytest.approx(4 * leaves / shares)
        assert "vertices by level" in told
    else:
        assert graphs["num_operations"] > 1000 and "recorded operations" in told
