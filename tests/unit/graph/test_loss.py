"""How an objective is read as (total, weight): exact over any split of the batch, or a notice that it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.ops.random import random_key
from plait.job.job import Job

NUM_SAMPLES, WIDTH, CLASSES = 6, 5, 4


def samples(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    return {
        "x": torch.randn(n, WIDTH, generator=g, dtype=torch.float64),
        "label": torch.randint(0, CLASSES, (n,), generator=g),
        "value": torch.rand(n, CLASSES, generator=g, dtype=torch.float64),
        "mask": (torch.rand(n, CLASSES, generator=g) < 0.6).double(),
    }


def capture(objective: Callable[..., Any]) -> Graph:
    batch = samples(4)
    data = [{key: value[i] for key, value in batch.items()} for i in range(4)]
    job = Job(
        model=lambda: nn.Linear(WIDTH, CLASSES),
        data=data,
        objective=objective,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=2,
        steps=1,
    )
    return Captures(job, dtype=torch.float64).of_size(NUM_SAMPLES)


def run(graph: Graph, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(total, weight) of the graph on real tensors."""
    tensors = iter(graph.batch.tensors(batch))
    root = nn.Module()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), node.meta["constant"])
    held = dict(model.named_parameters())
    given = {"key": random_key(seed=0, step=0), "tangent": torch.ones((), dtype=torch.float64)}
    values = [
        held[entry.name]
        if entry.kind == "parameter"
        else next(tensors)
        if entry.kind == "batch"
        else given[entry.kind]
        for entry in graph.inputs
    ]
    with torch.no_grad():
        total, weight, *_ = fx.Interpreter(fx.GraphModule(root, graph.graph)).run(*values)
    return total, weight


def read(objective: Callable[..., Any]) -> tuple[Graph, float, float, float]:
    """The graph, and total, weight and the eager loss of one batch."""
    graph, batch = capture(objective), samples(NUM_SAMPLES)
    model = nn.Linear(WIDTH, CLASSES).double()
    total, weight = run(graph, model, batch)
    with torch.no_grad():
        loss = objective(model, batch)
    if isinstance(loss, tuple):
        loss = loss[0] / loss[1]
    return graph, float(total), float(weight), float(loss)


def cross_entropy(**options: Any) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    return lambda model, batch: F.cross_entropy(model(batch["x"]), batch["label"], **options)


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = (model(batch["x"]) - batch["value"]).square()
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


EXACT: dict[str, tuple[Callable[..., Any], Callable[[dict[str, Tensor]], float]]] = {
    "cross_entropy": (cross_entropy(), lambda batch: NUM_SAMPLES),
    "ignore_index": (cross_entropy(ignore_index=1), lambda batch: float((batch["label"] != 1).sum())),
    "class_weights": (
        cross_entropy(weight=CLASS_WEIGHTS),
        lambda batch: float(CLASS_WEIGHTS[batch["label"]].sum()),
    ),
    "weights_and_ignore_index": (
        cross_entropy(weight=CLASS_WEIGHTS, ignore_index=2),
        lambda batch: float(CLASS_WEIGHTS[batch["label"][batch["label"] != 2]].sum()),
    ),
    "label_smoothing": (cross_entropy(label_smoothing=0.1), lambda batch: NUM_SAMPLES),
    "smoothing_and_ignore_index": (
        cross_entropy(label_smoothing=0.1, ignore_index=1),
        lambda batch: float((batch["label"] != 1).sum()),
    ),
    "mse": (
        lambda model, batch: F.mse_loss(model(batch["x"]), batch["value"]),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "l1": (
        lambda model, batch: F.l1_loss(model(batch["x"]), batch["value"]),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "bce": (
        lambda model, batch: F.binary_cross_entropy(model(batch["x"]).sigmoid(), batch["value"]),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "bce_with_logits": (
        lambda model, batch: F.binary_cross_entropy_with_logits(model(batch["x"]), batch["value"]),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "scaled_mean": (
        lambda model, batch: 0.5 * model(batch["x"]).square().mean(),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "masked_mean": (masked_mean, lambda batch: float(batch["mask"].sum())),
    "two_means": (
        lambda model, batch: (
            F.mse_loss(model(batch["x"]), batch["value"]) + 0.1 * model(batch["x"]).square().mean()
        ),
        lambda batch: NUM_SAMPLES * CLASSES,
    ),
    "sum_over_batch": (
        lambda model, batch: (model(batch["x"]) - batch["value"]).square().sum() / len(batch["x"]),
        lambda batch: NUM_SAMPLES,
    ),
    "summed_losses": (
        lambda model, batch: (
            F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum") / batch["mask"].sum()
        ),
        lambda batch: float(batch["mask"].sum()),
    ),
    "total_and_weight": (
        lambda model, batch: ((model(batch["x"]) * batch["mask"]).sum(), batch["mask"].sum()),
        lambda batch: float(batch["mask"].sum()),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_known_mean_is_read_as_total_and_weight(name: str) -> None:
    objective, wanted = EXACT[name]
    graph, total, weight, loss = read(objective)
    assert graph.notices == ()
    assert graph.weight_is_early
    assert weight == pytest.approx(wanted(samples(NUM_SAMPLES)), rel=1e-12)
    assert total / weight == pytest.approx(loss, rel=1e-12)
    if graph.static_weight is not None:
        assert graph.static_weight == weight


@pytest.mark.parametrize("name", EXACT)
def test_totals_and_weights_of_shares_add_up_to_the_whole(name: str) -> None:
    objective, _ = EXACT[name]
    model, batch = nn.Linear(WIDTH, CLASSES).double(), samples(NUM_SAMPLES)
    graph = capture(objective)
    whole = run(graph, model, batch)
    first = {key: torch.cat([value[:2]] * 3) for key, value in batch.items()}
    second = {key: torch.cat([value[2:4]] * 3) for key, value in batch.items()}
    third = {key: torch.cat([value[4:]] * 3) for key, value in batch.items()}
    # Each share of two samples is given three times, as the graph is that of six.
    parts = [run(graph, model, share) for share in (first, second, third)]
    for index in (0, 1):
        assert sum(float(part[index]) for part in parts) / 3 == pytest.approx(float(whole[index]), rel=1e-12)


@pytest.mark.parametrize(
    "objective",
    [
        lambda model, batch: model(batch["x"]).square().mean().sqrt(),
        lambda model, batch: torch.logsumexp(model(batch["x"]).flatten(), 0),
        lambda model, batch: model(batch["x"]).square().sum() / batch["mask"].sum().clamp(min=1.0),
        lambda model, batch: model(batch["x"]).square().sum() / model(batch["x"]).abs().sum(),
        lambda model, batch: model(batch["x"]).square().sum().sqrt() / batch["mask"].sum(),
        lambda model, batch: model(batch["x"]).square().mean() / batch["mask"].sum(),
    ],
    ids=[
        "root_of_a_mean",
        "logsumexp",
        "clamped_count",
        "count_of_the_model",
        "root_of_a_sum",
        "mean_by_count",
    ],
)
def test_another_scalar_counts_as_a_mean_over_its_samples_with_a_notice(
    objective: Callable[..., Tensor],
) -> None:
    graph, total, weight, loss = read(objective)
    (notice,) = graph.notices
    assert "(total, weight)" in notice
    assert weight == graph.static_weight == NUM_SAMPLES
    assert total / weight == pytest.approx(loss, rel=1e-12)


def test_a_plain_number_may_be_the_weight() -> None:
    graph, total, weight, loss = read(lambda model, batch: (model(batch["x"]).sum(), 12))
    assert weight == 12
    assert total / weight == pytest.approx(loss, rel=1e-12)
    assert graph.notices == ()


def count_of_others(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Counts the labels that are not 2, where the cross-entropy counts those that are not 1."""
    others = (batch["label"] != 2).double()
    return (model(batch["x"]).square().sum(1) * others).sum() / others.sum()


@pytest.mark.parametrize("other", [masked_mean, count_of_others])
def test_two_means_of_different_weights_are_not_mixed_up(other: Callable[..., Tensor]) -> None:
    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return other(model, batch) + F.cross_entropy(model(batch["x"]), batch["label"], ignore_index=1)

    graph, total, weight, loss = read(objective)
    assert len(graph.notices) == 1
    assert weight == NUM_SAMPLES
    assert total / weight == pytest.approx(loss, rel=1e-12)
