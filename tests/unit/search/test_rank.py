"""The search: bounds leave out nothing that would have been shown, and a time limit is told."""

import time
from dataclasses import replace

import pytest

from plait.cluster.parse import parse_cluster
from plait.errors import PlanError
from plait.search.candidates import Candidate, Space, candidates_on, meshes, relaxed
from plait.search.choose import Request, choose
from plait.search.oracle import SketchOracle
from plait.search.rank import Search
from plait.search.subject import Subject, subject_of_paper

SMALL = "gpt:layers=6,hidden=256,heads=8,seq=128,vocab=1024"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of_paper(SMALL, 16)


def all_candidates(oracle: SketchOracle) -> list[Candidate]:
    space = Space(ranks=4, batch=16, devices_per_host=4, num_units=8)
    return [candidate for mesh in meshes(space)[0] for candidate in candidates_on(mesh, space)]


def test_pruned_search_finds_what_trying_all_finds(subject: Subject) -> None:
    cluster = parse_cluster("4xA100")
    limit = 1.62e9
    oracle = SketchOracle(subject, cluster, limit)
    tried = [oracle.predict(candidate) for candidate in all_candidates(oracle)]
    best: dict[object, float] = {}
    for candidate, found in zip(all_candidates(oracle), tried, strict=True):
        if found.fits:
            best[candidate.family] = min(best.get(candidate.family, float("inf")), found.step_s)
    assert len(best) > 0
    assert any(not found.fits for found in tried)
    search = Search(oracle, limit_bytes=limit, top=5, deadline=time.perf_counter() + 60)
    search.add(all_candidates(oracle))
    ranking = search.ranking()
    assert [p.step_s for p in ranking.predictions[:5]] == pytest.approx(sorted(best.values())[:5])
    assert ranking.num_predicted < len(tried)
    assert all("needs" in entry.reason for entry in ranking.rejected)


def test_bounds_are_bounds(subject: Subject) -> None:
    oracle = SketchOracle(subject, parse_cluster("4xA100"), 80e9)
    for candidate in all_candidates(oracle):
        found = oracle.predict(candidate)
        assert oracle.least_s(candidate) <= found.step_s * (1 + 1e-9), candidate
        assert oracle.least_bytes(candidate) <= found.memory.total * (1 + 1e-9), candidate


def test_time_limit_keeps_a_valid_plan_and_says_so(subject: Subject) -> None:
    ranking = choose(subject, parse_cluster("4xA100"), Request(seconds=1e-9))
    assert ranking.predictions[0].fits
    assert any("time limit" in notice for notice in ranking.notices)


def test_plans_are_told_apart_from_relaxed_ones(subject: Subject) -> None:
    ranking = choose(subject, parse_cluster("4xA100"), Request())
    assert {found.plan.name for found in ranking.predictions}.isdisjoint(relaxed())
    assert {"pipedream", "server-async", "easgd"} <= set(relaxed())
    assert {"server-sync", "zero3"}.isdisjoint(relaxed())
    piped = [found.plan for found in ranking.predictions if found.plan.num_stages > 1]
    assert all(len(plan.pipe.cut) == plan.num_stages - 1 for plan in piped)


def test_impossible_requests(subject: Subject) -> None:
    cluster = parse_cluster("4xA100")
    with pytest.raises(PlanError, match="no plan fits.*needs"):
        choose(subject, cluster, Request(limit_bytes=2**20))
    with pytest.raises(PlanError, match="0 ranks"):
        choose(subject, cluster, Request(ranks=0))
    with pytest.raises(PlanError, match="5 ranks were asked for.*4 devices"):
        choose(subject, cluster, Request(ranks=5))
    odd = replace(subject, job=replace(subject.job, batch=7), micro_batches=2)
    with pytest.raises(PlanError, match="7 does not divide"):
        choose(odd, cluster, Request())


def test_batch_statistics_keep_their_micro_batches() -> None:
    images = subject_of_paper("alexnet:image=64", 8)
    assert images.micro_batches is None
    fixed = Space(ranks=2, batch=8, devices_per_host=2, num_units=4, micro_batches=2)
    counts = {c.num_micro_batches for mesh in meshes(fixed)[0] for c in candidates_on(mesh, fixed)}
    assert counts == {2}
