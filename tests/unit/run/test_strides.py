"""Ops that depend on how a tensor lies in memory: plans that lay parameters otherwise compute the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 6, generator=_GENERATOR)
SOUND = torch.randn(8, 40, generator=_GENERATOR)
Y = torch.randint(0, 3, (8,), generator=_GENERATOR)


class _Lies(nn.Module):
    """A square weight that is the transpose of what lies in memory, as QR and LU give it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.square = nn.Parameter((torch.randn(6, 6) + 4 * torch.eye(6)).T)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.square, x))


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slogdet": lambda w, x: x + torch.linalg.slogdet(w)[1],
    "det": lambda w, x: x + torch.linalg.det(w) * 1e-3,
    "solve": lambda w, x: torch.linalg.solve(w, x.T).T,
    "as_strided": lambda w, x: x @ w.as_strided((6, 6), (6, 1)),
}


@pytest.mark.parametrize("use", USES)
def test_what_reads_strides_finds_those_that_it_was_traced_with(use: str) -> None:
    job = Job(
        model=lambda: _Lies(USES[use]),
        data=[(x, y) for x, y in zip(X, Y, strict=True)],
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=2,
    )
    captures = Captures(job)
    wanted = run_eager(job, 2, torch.float32, captures)
    found = run_serially(job, resolve("zero3", 2), 2, torch.float32, captures=captures)
    torch.testing.assert_close(found.losses, wanted.losses)
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


class _Spectra(nn.Module):
    """Two losses of spectra, whose gradients come to the first stage in one message."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.register_buffer("window", torch.hann_window(8))

    def spectrum(self, x: Tensor) -> Tensor:
        return torch.stft(x, 8, 4, window=self.window, return_complex=True).abs()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        near = F.l1_loss(self.spectrum(h), self.spectrum(x))
        rough = self.spectrum(h).clamp(min=1e-4).log() - self.spectrum(x).clamp(min=1e-4).log()
        return near + rough.abs().mean()


class _Part(nn.Module):
    """Windows over a part of what a layer gives, which end behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        part = self.first(x).tanh()[:, 2:5]
        windows = part.as_strided((len(x), 4, 3), (8, 1, 1))
        return self.last(windows).square().mean()


@pytest.mark.parametrize("plan", ["ddp", "zero3", "1f1b"])
@pytest.mark.parametrize("model", [_Spectra, _Part])
def test_what_counts_from_the_beginning_of_memory_counts_from_that_of_the_tensor(
    model: type[nn.Module], plan: str
) -> None:
    """In float64, so that rounding decides no sign; sums of shares are added up in another order."""
    job = Job(
        model=model,
        data=[(x,) for x in (SOUND if model is _Spectra else X)],
        objective=lambda own, batch: own(batch[0]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=2,
    )
    captures = Captures(job, None, torch.float64)
    wanted = run_eager(job, 2, torch.float64, captures)
    found = run_serially(job, resolve(plan, 2), 2, torch.float64, captures=captures)
    torch.testing.assert_close(found.losses, wanted.losses)
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
