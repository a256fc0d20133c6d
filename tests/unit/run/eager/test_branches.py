"""Models whose Python code reads values: every plan computes what the user's own loop does."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import StepError
from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially


class Branching(nn.Module):
    """Other layers for other values; no gradient where a layer was not used."""

    times: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("times", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if x.sum().item() > 0:
            h = h + self.yes(h)
            self.times += 1
        else:
            h = self.no(h).relu()
        if x.abs().amax() > 1e3:
            raise ValueError("too large")
        return self.last(h)


class Selecting(nn.Module):
    """As many rows as the values say, inside."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        rows = (h[:, 0] > 0).nonzero()[:, 0]
        self.seen += len(rows)
        return h.index_add(0, rows, self.inner(h[rows]) * scale), rows.sum()


class Around(nn.Module):
    """A module that cannot be captured between others that can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 8), Selecting()
        self.wide, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.middle(torch.tanh(self.first(x)), scale=0.5)
        return self.last(self.wide(h).relu())


class Varying(Selecting):
    """What it returns has a shape by value."""

    def forward(self, h: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return h[h[:, 0] > 0], h.sum()


def data(large: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shifts = [0.4 if index % 16 < 8 else -0.4 for index in range(64)]
    return [(torch.randn(4, generator=draw) + s + large, torch.tensor(i % 3)) for i, s in enumerate(shifts)]


def job_of(model: type[nn.Module], large: float = 0.0, **settings: object) -> plait.Job:
    return plait.Job(
        model=model,
        data=data(large),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        batch=8,
        steps=4,
        shuffle=False,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("model", [Branching, Around])
@pytest.mark.parametrize(
    ("plan", "accumulate"),
    [("ddp", 1), ("zero3", 2), ("zero1", 1), ("1f1b", 2), ("server-sync", 2)],
    ids=lambda v: str(v),
)
def test_plans_compute_what_the_users_loop_does(model: type[nn.Module], plan: str, accumulate: int) -> None:
    job = job_of(model, accumulate=accumulate, clip_norm=0.5)
    proof = plait.verify(job, plan, 3 if plan == "server-sync" else 2, steps=4, serial=True)
    assert proof.first is None, proof.first
    assert proof.eager and proof.eager_first is None, proof.eager_first
    assert not any("running eagerly" in notice for notice in proof.notices)


class Conditional(nn.Module):
    """A layer that one of two ways has; the layer after both is used by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.cond(h.abs().max() > 1.2, lambda z: self.maybe(z), lambda z: z.sin(), (h,))
        return self.last(h)


@pytest.mark.parametrize("stages", [2, 3])
def test_ways_that_share_a_layer_are_cut_into_stages(stages: int) -> None:
    job = job_of(Conditional, accumulate=2)
    captures = Captures(job)
    one, piped = (
        run_serially(job, resolve(plan, ranks), 3, torch.float32, captures=captures)
        for plan, ranks in (("single", 1), ("1f1b", stages))
    )
    assert piped.losses == pytest.approx(one.losses, rel=1e-6)
    for name, weight in one.weights.items():
        assert torch.allclose(piped.weights[name], weight, rtol=1e-5, atol=1e-6), name


def test_two_servers_clip_by_the_norm_of_what_is_there() -> None:
    """Beside a term that every worker has whole."""

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 0.1 * penalty

    job = replace(job_of(Branching, clip_norm=0.5), loss=None, objective=objective)
    settings = {"sync": {"servers": 2}}
    proof = plait.verify(
        job, "server-sync", 4, steps=4, serial=True, changes=plait.Changes(settings=settings)
    )
    assert proof.ok and proof.eager, (proof.first, proof.eager_first)


@pytest.mark.parametrize("compress", ["topk", "powersgd", "bf16"])
def test_what_counts_as_zero_is_told(compress: str) -> None:
    plan = resolve("ddp", 2, {"sync": {"compress": compress}})
    (told,) = [n for n in run_serially(job_of(Branching), plan, 1, torch.float32).notices if "lossy" in n]
    assert ("does not use no.bias, its gradient counts as zero" in told) == (compress != "bf16")


def test_what_is_computed_is_told() -> None:
    (told,) = Captures(job_of(Branching)).of_size(4).notices
    assert "branches on values" in told and "test_branches.py:" in told
    (told,) = Captures(job_of(Around)).of_size(4).notices
    assert told.startswith("middle cannot be captured") and "test_branches.py:" in told


def test_an_outcome_that_raises_raises() -> None:
    """Told as any op that fails: by line, micro-batch and samples; of two ranks each has some of these."""
    for plan, ranks in (("single", 1), ("ddp", 2)):
        with pytest.raises(StepError, match=r"too large .*test_branches.py:\d+") as caught:
            plait.verify(job_of(Branching, large=1e4), plan, ranks, steps=1, serial=True)
        error = caught.value
        assert error.where is not None and "test_branches.py:" in error.where
        assert error.micro_batch == 0 and len(error.ids) > 0 and f"samples {error.ids[0]}" in str(error)


def test_shapes_by_value_leave_the_module() -> None:
    """Then the parent is asked; where that is the model itself, all of it runs eagerly."""

    class Outer(Around):
        def __init__(self) -> None:
            super().__init__()
            self.middle = Varying()

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.middle(torch.tanh(self.first(x)), scale=0.5)
            return self.last(self.wide(h).relu()).sum(0, keepdim=True) + x.new_zeros(len(x), 1)

    with pytest.raises(plait.errors.CaptureError, match=r"test_branches.py:\d+"):
        Captures(job_of(Outer)).of_size(4)


def test_numbers_kept_in_python_are_not_lost() -> None:
    class Keeping(Branching):
        def forward(self, x: Tensor) -> Tensor:
            self.last_sum = x.sum().item()
            return super().forward(x)

    with pytest.raises(plait.errors.CaptureError, match="last_sum"):
        Captures(job_of(Keeping)).of_size(4)


def test_random_branches_are_each_their_own() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) > 0.5:
                    x = x + layer(x).tanh()
            return self.last(x)

    graph = Captures(job_of(Dropping)).of_size(4)
    assert "all 4 ways" in graph.notices[0]
    proof = plait.verify(job_of(Dropping), "ddp", 2, steps=4, serial=True)
    assert proof.first is None and proof.eager and proof.eager_first is None, (proof.first, proof.eager_first)
