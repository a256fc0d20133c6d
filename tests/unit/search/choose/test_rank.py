"""The search: bounds leave out nothing that would have been shown, and a time limit is told."""

import time
from dataclasses import replace
from statistics import median

import pytest

from plait.cluster.parse import parse_cluster
from plait.errors import PlanError
from plait.search.choose.candidates import Candidate, Space, candidates_on, meshes, relaxed
from plait.search.choose.choose import SKETCH_ERROR, Request, choose, part_of, ranking_of, simplest
from plait.search.choose.explain import explain
from plait.search.choose.oracle import SketchOracle
from plait.search.choose.rank import PlanSearch
from plait.search.choose.scaling import scaling
from plait.search.choose.subject import subject_of_paper

SMALL = "gpt:layers=6,hidden=256,heads=8,seq=128,vocab=1024"
CLUSTER = parse_cluster("4xA100")


@pytest.fixture(scope="module")
def known() -> SketchOracle:
    """What is read of the model is read once for all tests."""
    return SketchOracle(subject_of_paper(SMALL, 8), CLUSTER, 80e9)


def limited(known: SketchOracle, limit_bytes: float) -> SketchOracle:
    oracle = known.on(known.cluster, known.subject)
    oracle.limit_bytes = limit_bytes
    return oracle


def all_candidates() -> list[Candidate]:
    space = Space(ranks=4, batch=8, devices_per_host=4, num_units=8)
    return [candidate for mesh in meshes(space)[0] for candidate in candidates_on(mesh, space)]


def test_pruned_search_finds_what_trying_all_finds(known: SketchOracle) -> None:
    limit = median(known.predict(candidate).memory.total for candidate in all_candidates())
    oracle = limited(known, limit)
    tried = [oracle.predict(candidate) for candidate in all_candidates()]
    best: dict[object, float] = {}
    for candidate, found in zip(all_candidates(), tried, strict=True):
        if found.fits:
            best[candidate.family] = min(best.get(candidate.family, float("inf")), found.step_s)
    assert len(best) > 5
    assert any(not found.fits for found in tried)
    search = PlanSearch(oracle, limit_bytes=limit, top=5, deadline=time.perf_counter() + 60)
    search.add(all_candidates())
    ranking = search.ranking()
    assert [p.step_s for p in ranking.predictions[:5]] == pytest.approx(sorted(best.values())[:5])
    assert ranking.num_predicted < len(tried)
    assert all("needs" in entry.reason for entry in ranking.rejected)


def test_bounds_are_bounds(known: SketchOracle) -> None:
    for candidate in all_candidates():
        found = known.predict(candidate)
        assert known.least_s(candidate) <= found.step_s * (1 + 1e-9), candidate
        assert known.least_bytes(candidate) <= found.memory.total * (1 + 1e-9), candidate


def test_time_limit_keeps_a_valid_plan_and_says_so(known: SketchOracle) -> None:
    ranking = ranking_of(known, Request(seconds=1e-9))
    assert ranking.predictions[0].fits
    assert any("time limit" in notice for notice in ranking.notices)


def test_plans_are_told_apart_from_relaxed_ones(known: SketchOracle) -> None:
    ranking = ranking_of(known, Request(top=40))
    assert {found.plan.name for found in ranking.predictions}.isdisjoint(relaxed())
    assert {"pipedream", "server-async", "easgd"} <= set(relaxed())
    assert {"server-sync", "zero3"}.isdisjoint(relaxed())
    piped = [found.plan for found in ranking.predictions if found.plan.num_stages > 1]
    assert piped
    assert all(len(plan.pipe.cut) == plan.num_stages - 1 for plan in piped)
    only = ranking_of(known, Request(named="zero3"))
    assert {found.plan.name for found in only.predictions} == {"zero3"}


def test_a_gain_that_predictions_cannot_tell_is_none(known: SketchOracle) -> None:
    ranking = ranking_of(known, Request(top=40))
    first, *others = ranking.predictions
    assert first.step_s <= (1 + SKETCH_ERROR) * min(found.step_s for found in ranking.predictions)
    assert [found.step_s for found in others] == sorted(found.step_s for found in others)
    plain = next(replace(p, step_s=1.04) for p in ranking.predictions if p.plan.name == "ddp")
    cut = next(replace(p, step_s=1.0) for p in ranking.predictions if p.plan.memory.zero)
    assert simplest([cut, plain], SKETCH_ERROR) is plain
    assert simplest([cut, plain], 0.01) is cut
    assert "3.8% less, less than predictions can tell: the first has fewer parts" in explain(plain, cut)[2]
    assert "The second takes 4.0% longer." in explain(cut, plain)[2]


def test_impossible_requests(known: SketchOracle) -> None:
    with pytest.raises(PlanError, match="no plan fits.*needs"):
        ranking_of(limited(known, 2**20), Request())
    with pytest.raises(PlanError, match="0 ranks"):
        choose(known.subject, CLUSTER, Request(ranks=0))
    with pytest.raises(PlanError, match="5 ranks were asked for.*4 devices"):
        choose(known.subject, CLUSTER, Request(ranks=5))
    with pytest.raises(PlanError, match="12 ranks do not fill hosts of 8"):
        part_of(parse_cluster("2x8xA100"), 12)
    odd = replace(known.subject, job=replace(known.subject.job, batch=7), micro_batches=2)
    with pytest.raises(PlanError, match="7 does not divide"):
        ranking_of(known.on(CLUSTER, odd), Request())


def test_batch_statistics_keep_their_micro_batches() -> None:
    fixed = Space(ranks=2, batch=8, devices_per_host=2, num_units=4, micro_batches=2)
    counts = {c.num_micro_batches for mesh in meshes(fixed)[0] for c in candidates_on(mesh, fixed)}
    assert counts == {2}


def test_scaling_table(known: SketchOracle) -> None:
    rows = scaling(known, [1, 2, 4], Request(named="ddp", top=1))
    batches = [row.prediction.batch for row in rows if row.prediction is not None]
    assert batches == [8, 16, 32]
    efficiencies = [row.efficiency for row in rows]
    assert efficiencies[0] == 1.0
    assert all(value is not None and 0.2 < value <= 1.0 for value in efficiencies)
    same = scaling(known, [1, 4], Request(named="ddp", top=1), grow=False)
    assert same[1].prediction is not None
    assert same[1].prediction.batch == 8
