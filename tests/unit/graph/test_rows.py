"""What is told to be a sum over samples is one, whatever the values; what is not told to be may be one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.graph.capture.rows import is_sum_over_samples

B, T, V = 6, 4, 9
_GENERATOR = torch.Generator().manual_seed(0)
G = torch.randn(B, T, V, generator=_GENERATOR)
TOKENS = torch.randint(V, (B, T), generator=_GENERATOR)
O = torch.randn(B, V, generator=_GENERATOR)  # noqa: E741
Y = torch.randint(V, (B,), generator=_GENERATOR)
W = torch.randn(V, 3, generator=_GENERATOR)
NUMBERED = torch.arange(B)


def _tokens() -> Tensor:
    active = TOKENS.view(-1) != 3
    return F.cross_entropy(G.view(-1, V)[active], TOKENS.view(-1)[active])


def _hard() -> Tensor:
    losses = F.cross_entropy(O, Y, reduction="none")
    return losses[losses > losses.mean()].sum()


def _in_place() -> Tensor:
    kept = torch.zeros(V)
    kept += O[Y > 2].sum(0)
    return kept.square().sum()


SUMS: dict[str, Callable[[], object]] = {
    "tokens": _tokens,
    "mask of two dims": lambda: F.cross_entropy(G[TOKENS != 1], TOKENS[TOKENS != 1]),
    "samples": lambda: F.cross_entropy(O[Y != 1], Y[Y != 1]),
    "weighted": lambda: F.cross_entropy(O[Y > 2], Y[Y > 2], weight=W[:, 0].abs()),
    "logits": lambda: F.binary_cross_entropy_with_logits(O[Y > 2], torch.sigmoid(O[Y > 2])),
    "squares": lambda: ((O[Y > 2] - O[Y > 2].softmax(-1)) ** 2).mean(),
    "a layer after it": lambda: F.cross_entropy(O[Y > 2] @ W, Y[Y > 2].clamp(max=2)),
    "total and weight": lambda: (F.cross_entropy(O[Y > 2], Y[Y > 2], reduction="sum"), (Y > 2).sum()),
    "elements": lambda: torch.masked_select(O, O > 0).sum(),
    "a penalty": lambda: F.cross_entropy(O[Y > 2], Y[Y > 2]) + 0.1 * W.square().sum(),
    "gathered": lambda: O.gather(1, Y[:, None])[Y > 2].mean(),
    "no reduction": lambda: F.huber_loss(O, O * 0, reduction="none")[Y > 2].mean(),
    "other dims": lambda: G.transpose(1, 2).sum(1)[TOKENS > 0].sum(),
}
OTHERS: dict[str, Callable[[], object]] = {
    "variance of a class": lambda: O[Y == 7].var(0, correction=0).sum(),
    "around the sum": lambda: (O[Y >= 5] - O[Y >= 5].sum(0, keepdim=True)).square().sum(),
    "square of a sum": lambda: O[Y > 2].sum(0).square().sum(),
    "pairs": lambda: (O[Y == 3] @ O[Y == 3].T).sum(),
    "classes": lambda: torch.unique(Y).float().sum(),
    "positions": lambda: O[torch.nonzero(Y == 3).squeeze(1)].sum(),
    "numbered": lambda: (O.sum(1) * NUMBERED).sum(),
    "numbered targets": lambda: F.cross_entropy(O, NUMBERED),
    "numbered columns": lambda: O.gather(1, NUMBERED[:, None]).sum(),
    "the first of those": lambda: O[Y > 2][:2].sum(),
    "compared with the mean": _hard,
    "a bent sum": lambda: F.relu(O[Y > 2].mean() - 3),
    "along samples": lambda: O.softmax(0)[Y > 2].sum(),
    "running sums": lambda: O[Y > 2].cumsum(0).sum(),
    "another's mask": lambda: O[(Y > 2).flip(0)].sum(),
    "neighbours": lambda: (O * O.roll(1, 0)).sum(),
    "values in Python": lambda: O.sum() * float(Y.sum()),
    "numbers of numpy": lambda: O.sum() * Y.numpy().sum(),
    "how many": lambda: O[Y > 2].sum() / len(O[Y > 2]),
    "whether any": lambda: O[Y > 2].sum() if O[Y > 2].shape[0] else O.sum(),
    "data": lambda: O[Y > 2].data.sum(0).square().sum(),
    "weights of samples": lambda: F.cross_entropy(O[:, :6], Y % 6, weight=O[:, 0].abs()),
    "in place": _in_place,
    "transposed": lambda: O.t().softmax(1).sum(),
    "a result for each": lambda: O.sum(1),
    "over a sum": lambda: W.sum() / O[Y > 2].sum(),
    "two masks": lambda: (O[Y > 2].sum(1)[:1] * O[Y < 3].sum(1)[:1]).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples(name: str) -> None:
    assert is_sum_over_samples(SUMS[name], [G, TOKENS, O, Y], [W], B)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("name", OTHERS)
def test_all_else(name: str) -> None:
    assert not is_sum_over_samples(OTHERS[name], [G, TOKENS, O, Y], [W], B)


def test_inputs_are_known_by_their_memory() -> None:
    assert is_sum_over_samples(lambda: O.detach()[Y > 2].sum(), [O.detach(), Y.detach()], [], B)
    assert not is_sum_over_samples(lambda: O.detach().sum(0).square().sum(), [O.detach(), Y], [], B)
