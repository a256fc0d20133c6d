"""Buckets: in the order of production, of the size asked for, the same for every rank."""

import pytest
from tests.unit.program.compiled import graph_of, placed_on_data

from plait.plan.named import resolve
from plait.program.local.ends import ends_of
from plait.program.program import Bucket
from plait.program.segment.buckets import make_buckets, sums_of
from plait.program.segment.groups import make_layout


def buckets(name: str, ranks: int, bucket_mib: float) -> tuple[Bucket, ...]:
    graph = graph_of(name, 7)
    units = tuple(7 // ranks + (rank < 7 % ranks) for rank in range(ranks))
    plan = resolve("ddp" if ranks > 1 else "single", ranks, {"sync": {"bucket_mib": bucket_mib}})
    placed = [placed_on_data(graph, units)]
    sums = sums_of(graph, [ends_of(graph, p) for p in placed], [p.axis for p in placed])
    return make_buckets(graph, sums, make_layout(graph, placed, plan, sums), plan)


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "unused_parameter"])
@pytest.mark.parametrize("bucket_mib", [0.0, 0.001, 8.0])
def test_every_gradient_is_in_exactly_one_bucket(name: str, bucket_mib: float) -> None:
    held = [parameter for bucket in buckets(name, 3, bucket_mib) for parameter in bucket.parameters]
    assert sorted(held) == sorted(graph_of(name, 7).gradients)


def test_gradients_stand_in_the_order_in_which_the_backward_makes_them() -> None:
    graph = graph_of("mlp", 7)
    order = list(graph.nodes())
    held = [parameter for bucket in buckets("mlp", 2, 0.0) for parameter in bucket.parameters]
    assert [order.index(graph.gradients[name]) for name in held] == sorted(
        order.index(n) for n in graph.gradients.values()
    )
    assert held[-1].startswith("0."), "the first layer's gradients come last"


def test_zero_sends_every_tensor_on_its_own_and_a_large_size_all_together() -> None:
    assert [len(bucket.parameters) for bucket in buckets("mlp", 2, 0.0)] == [1] * 6
    assert len(buckets("mlp", 2, 8.0)) == 1


def test_a_bucket_is_closed_once_it_is_full() -> None:
    limit = 4096 / 2**20
    for bucket in buckets("gpt", 2, limit)[:-1]:
        without_last = sum(_elements(shape) for shape in bucket.shapes[:-1]) * 8
        assert without_last < 4096 <= bucket.num_bytes


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def test_the_total_travels_at_the_end_of_the_last_bucket() -> None:
    made = buckets("mlp", 2, 0.0)
    assert [bucket.scalars for bucket in made] == [()] * 5 + [("total",)]
    assert made[-1].num_elements == _elements(made[-1].shapes[0]) + 1
    assert made[-1].num_bytes == 8 * made[-1].num_elements


def test_one_rank_sums_nothing() -> None:
    assert {bucket.axis for bucket in buckets("mlp", 1, 8.0)} == {None}
    assert all(bucket.scalars == () for bucket in buckets("mlp", 1, 8.0))


def test_buckets_do_not_depend_on_the_number_of_ranks() -> None:
    assert buckets("gpt", 2, 0.01) == buckets("gpt", 5, 0.01)


def test_only_gradients_that_are_summed_alike_and_of_one_dtype_share_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = graph_of("mlp", 7)
    plan, placed = resolve("ddp", 2), [placed_on_data(graph, (4, 3))]
    sums = sums_of(graph, [ends_of(graph, p) for p in placed], [p.axis for p in placed])
    layout = make_layout(graph, placed, plan, sums)
    names = sorted(graph.gradients)

    def alone(found: tuple[Bucket, ...], name: str) -> bool:
        return [bucket.parameters for bucket in found if name in bucket.parameters] == [(name,)]

    apart = make_buckets(graph, {**sums, names[1]: ("data", "tensor")}, layout, plan)
    assert alone(apart, names[1]) and not alone(apart, names[2])
    meta = graph.nodes()[graph.gradients[names[2]]].meta
    monkeypatch.setitem(meta, "val", meta["val"].float())
    other = make_buckets(graph, sums, layout, plan)
    assert alone(other, names[2]) and not alone(other, names[1])


@pytest.mark.parametrize("ranks", [1, 2], ids=["not summed", "summed"])
def test_gradients_of_several_stages_share_no_bucket(ranks: int) -> None:
    """A rank that runs two stages has all gradients of one before the other's backward has begun."""
    graph, plan = graph_of("mlp", 7), resolve("ddp" if ranks > 1 else "single", ranks)
    placed = [placed_on_data(graph, (4, 3)[:ranks])]
    sums = sums_of(graph, [ends_of(graph, p) for p in placed], [p.axis for p in placed])
    stage_of = {name: int(name.split(".")[0]) // 4 for name in graph.gradients}
    made = make_buckets(graph, sums, make_layout(graph, placed, plan, sums), plan, stage_of)
    stages = [{stage_of[name] for name in bucket.parameters} for bucket in made]
    assert stages == [{1}, {0}]
