"""A loop of the user's own on two ranks against the same loop in plain PyTorch: the same weights, bit for rounding."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.errors import DataError, UsageError
from plait.job.data import torch_loader
from plait.job.order import SampleOrder

pytestmark = pytest.mark.timeout(120)

NUM = 23
"""Samples: with batches of 6 on two ranks, the last have 3 and 2; of 11, 1 and 0."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (NUM,), generator=generator)
    y[[0, 1, 2, 7, 13]] = -100  # shares of one size weigh differently
    return TensorDataset(x, y)


def net(norm: bool) -> nn.Module:
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def own_loop(
    prepare: Any, *, batch: int, norm: bool, accumulate: int = 1, penalty: float = 0.0
) -> dict[str, Any]:
    """As a tutorial would write it; `prepare` is all that differs."""
    model = net(norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(data(), batch_size=batch)
    model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler)
    norms = []
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            syncs = (number + 1) % accumulate == 0 or number + 1 == len(loader)
            quiet = None if syncs or not hasattr(model, "no_sync") else model.no_sync()
            with quiet or torch.enable_grad():
                loss = F.cross_entropy(model(x), y) / accumulate
                loss = loss + penalty * sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
            if syncs:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen = float(model(data().tensors[0]).sum())
    weights = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
    return {"weights": weights, "norms": norms, "seen": seen}


CASES = [
    {"batch": 6, "norm": False},
    {"batch": 6, "norm": True},
    {"batch": 11, "norm": False, "penalty": 0.01},
    {"batch": 6, "norm": True, "accumulate": 3},
]


def loops() -> list[Any]:
    return [own_loop(plait.prepare, **case) for case in CASES]  # type: ignore[arg-type]


def two_models() -> list[float]:
    """A GAN's loop: one model's pass must not hide the other's; gradients add up over passes without no_sync."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    if torch.distributed.is_initialized():
        first, second = plait.wrap(first), plait.wrap(second)  # type: ignore[assignment]
    noise = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    mine = (
        noise[:3] if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0 else noise[3:]
    )
    given = mine if torch.distributed.is_initialized() else noise
    fake = first(given)
    second(fake.detach()).pow(2).mean().backward()
    second(fake).mean().backward()
    parameters = [*first.parameters(), *second.parameters()]
    return [number for p in parameters if p.grad is not None for number in p.grad.flatten().tolist()]


class Named(nn.Module):
    """Is called by a name of its own, as policies are."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def energy(self, x: torch.Tensor, power: int) -> Any:
        return self.layers(x).pow(power)


def many_passes() -> list[Any]:
    """Calls and passes in other orders than by turns, each a list of gradients; ranks have 4 and 6 samples of 10."""
    ranked = torch.distributed.is_initialized()
    torch.manual_seed(0)
    data = torch.randn(10, 4, dtype=torch.float64)
    here = slice(None) if not ranked else slice(0, 4) if torch.distributed.get_rank() == 0 else slice(4, 10)
    wrap = plait.wrap if ranked else lambda module: module
    given, found = data[here], []

    def made(*layers: nn.Module) -> Any:
        return wrap(nn.Sequential(*layers).double())

    def note(*models: nn.Module) -> None:
        parameters = [p for model in models for p in model.parameters()]
        found.append([n for p in parameters if p.grad is not None for n in p.grad.flatten().tolist()])

    def other(model: Any) -> Any:
        """As large as a sum over these samples, and a mean."""
        return model(given).square().mean()

    maker, judge = made(nn.Linear(4, 4), nn.BatchNorm1d(4)), made(nn.Linear(4, 6), nn.BatchNorm1d(6))
    for _ in range(2):  # one called without a pass, whose gradients are older; both with batch norm
        judge.zero_grad()
        other(judge).backward()
        fake = maker(given)
        judge(fake.detach()).sigmoid().mean().backward()
        maker.zero_grad()
        judge(fake).sigmoid().square().mean().backward()
        maker(data[:4])
        note(maker, judge)
    twice = made(nn.Linear(4, 3))
    first, second = twice(given), twice(given * 2)
    first.square().mean().backward()  # two calls, then two passes
    second.abs().mean().backward()
    note(twice)
    seen = made(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    output = seen(given)
    output.mean().backward(retain_graph=True)  # one call, two passes
    output.square().mean().backward()
    note(seen)
    several = made(nn.Linear(4, 1))
    several(given).backward(torch.ones(len(given), 1, dtype=torch.float64))  # of no scalar
    torch.autograd.backward([several(given).sum(), several(given).square().sum()])
    note(several)
    chosen = made(nn.Linear(4, 3), nn.Linear(3, 2))
    other(chosen).backward(inputs=[chosen[1].weight] if not ranked else [chosen.module[1].weight])
    note(chosen)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    named, shared = wrap(Named(layers)), wrap(nn.Sequential(nn.Linear(4, 4).double(), layers[2]))
    for _ in range(2):
        named.energy(given, power=2).mean().backward()  # by another method than forward
        note(named)
        shared(given).mean().backward()  # a layer of both
        note(shared, named)
    copied = copy.deepcopy(chosen)  # trains like any other
    copied.zero_grad()
    other(copied).backward()
    note(copied)
    return found


def both() -> list[Any]:
    return [loops(), two_models(), many_passes()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def test_the_same_loop_gives_the_same_weights() -> None:
    plain = [own_loop(lambda *parts: parts, **case) for case in CASES]  # type: ignore[arg-type]
    gan, passes = two_models(), many_passes()
    for cases, pair, lists in plait.launch(both, 2):
        close(pair, gan)
        for one, other in zip(lists, passes, strict=True):
            close(one, other)
        for found, expected in zip(cases, plain, strict=True):
            close(found["norms"], expected["norms"])
            close(found["seen"], expected["seen"])
            for name, value in expected["weights"].items():
                close(found["weights"][name], value)


class Noisy(TensorDataset):
    """Draws for a sample, as augmentations do."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(()).double(), y


def shuffled_loop(prepare: Any, seed: int, sampler: Any = None, noisy: bool = True) -> list[list[float]]:
    """Order, augmentations and dropout are drawn from torch's own generator, by turns."""
    model = nn.Sequential(net(False), nn.Dropout(0.3 if noisy else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = Noisy if noisy else TensorDataset
    loader = DataLoader(kind(*data().tensors), batch_size=6, shuffle=sampler is None, sampler=sampler)
    model, optimizer, loader = prepare(model, optimizer, loader)
    torch.manual_seed(seed)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        next(iter(loader))  # a pass that is left: the next one has another order
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def shuffled_by_ranks() -> Any:
    """The first rank's generator decides, wherever the others' stand."""
    return shuffled_loop(plait.prepare, 3 + torch.distributed.get_rank(), noisy=False)


def test_the_order_is_the_one_that_the_data_loader_draws() -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0, 2.0] * 10, 20)
    for sampler in (None, weighted):
        expected = shuffled_loop(lambda *parts: parts, 3, sampler)
        assert shuffled_loop(plait.prepare, 3, sampler) == expected
        assert shuffled_loop(plait.prepare, 4, sampler) != expected
    expected = shuffled_loop(lambda *parts: parts, 3, noisy=False)
    for found in plait.launch(shuffled_by_ranks, 2):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    by_seed = [
        [int(y) for batch in plait.prepare(DataLoader(data(), 6, shuffle=True), seed=seed) for y in batch[1]]
        for seed in (1, 1, 2)
    ]
    assert by_seed[0] == by_seed[1] != by_seed[2]


def test_a_sampler_without_end_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As minGPT has it; a pass of several parts has the order of one, and ends with its last batch."""

    def first(loader: Any, count: int) -> list[Any]:
        torch.manual_seed(2)
        return [y.tolist() for (_, y), _ in zip(loader, range(count), strict=False)]

    def loader(number: int) -> DataLoader[Any]:
        sampler = torch.utils.data.RandomSampler(data(), replacement=True, num_samples=number)
        return DataLoader(data(), batch_size=4, sampler=sampler)

    endless = plait.prepare(loader(10**10))
    assert first(endless, 9) == first(loader(10**10), 9) and len(endless) == 10**10 // 4
    monkeypatch.setattr(torch_loader, "_MOST_BATCHES", 3)
    several = plait.prepare(loader(30))
    assert first(several, 99) == first(loader(30), 99) and several.at_end
    assert first(several.skipping(4), 99) == first(loader(30), 99)[4:]
    with pytest.raises(DataError, match="10,000,000,000 samples"):
        list(SampleOrder(num_samples=NUM, batch=4, sampler=loader(10**10).sampler).epoch_ids(0))


def test_alone_nothing_is_changed() -> None:
    model = plait.wrap(net(False))
    assert model.append is not None and next(iter(model.state_dict())) == "module.0.weight"
    assert plait.wrap(model) is model
    loader = plait.prepare(DataLoader(data(), batch_size=6))
    assert [len(x) for x, _ in loader] == [6, 6, 6, 5] and len(loader) == 4
    assert loader.num_workers == 0 and len(loader.sampler) == NUM


class Detector(nn.Module):
    """Images and targets in lists; the loss of an image is over its boxes, and the whole is their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3).double()

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        losses = [
            (self.layer(image).mean((1, 2)) - target["boxes"]).pow(2).sum() / len(target["boxes"])
            for image, target in zip(images, targets, strict=True)
        ]
        return sum(losses[1:], losses[0]) / len(targets)


def uneven(rank: int | None) -> list[list[float]]:
    """Gradients of shares of three and one; by `rank`, or of all where it is None."""
    torch.manual_seed(0)
    own = {None: slice(0, 4), 0: slice(0, 3), 1: slice(3, 4)}[rank]
    images = [torch.randn(3, 5, 5 + number).double() for number in range(4)][own]
    targets = [{"boxes": torch.randn(2 + number, 4).double()} for number in range(4)][own]
    x, soft = torch.randn(4, 4).double()[own], torch.randn(4, 3).double().softmax(-1)[own]
    detector, classifier = Detector(), net(False)
    if rank is not None:
        detector, classifier = plait.wrap(detector), plait.wrap(classifier)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        detector(images, targets).backward()
    assert ["does not show what it is a mean of" in str(one.message) for one in told] == [True] * (rank == 0)
    F.cross_entropy(classifier(x), soft).backward()
    parameters = [*detector.parameters(), *classifier.parameters()]
    return [p.grad.flatten().tolist() for p in parameters if p.grad is not None]


def uneven_share() -> list[list[float]]:
    return uneven(torch.distributed.get_rank())


def test_lists_of_samples_and_soft_labels_weigh_by_sample() -> None:
    expected = uneven(None)
    for found in plait.launch(uneven_share, 2):
        for one, other in zip(found, expected, strict=True):
            close(one, other)


def toggled() -> list[Any]:
    """nanoGPT's way to accumulate, and the gradients of a rank before and after they are summed."""
    model = plait.wrap(net(False))
    x, y = data().tensors
    found = []
    for number in range(2):
        model.require_backward_grad_sync = number == 1
        F.cross_entropy(
            model(x[torch.distributed.get_rank() :: 2]), y[torch.distributed.get_rank() :: 2]
        ).backward()
        found.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    return found


def test_a_loop_that_toggles_ddps_own_attribute() -> None:
    first, second = plait.launch(toggled, 2)
    assert first[0] != second[0] and first[1] == second[1]


def test_what_a_loop_cannot_have_is_refused() -> None:
    parts: Any = torch.utils.data.distributed.DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(DataError, match="1 of 2 parts of the data"):
        plait.prepare(DataLoader(data(), batch_size=4, sampler=parts))
    with pytest.raises(UsageError, match="of one model and one optimizer; 1 and 0 were given"):
        plait.prepare(net(False), plan="zero3")
    with pytest.raises(UsageError, match="cannot be prepared"):
        plait.prepare(3)
    with pytest.raises(UsageError, match="no trainable parameter"):
        plait.wrap(nn.ReLU())
