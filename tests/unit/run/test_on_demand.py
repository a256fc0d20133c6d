"""A model of which the device holds little at a time computes what it does whole."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from plait.errors import RunError
from plait.run.hold.on_demand import on_demand, room_beside, same_everywhere

CPU = torch.device("cpu")


class Uses(nn.Module):
    """Parameters used in the ways that modules have: by layers, by others' layers, tied, by name, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj without calling it
        self.recur = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(1))
        self.mix = nn.Parameter(torch.rand(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.recur(self.attend(x, x, x, need_weights=False)[0])[0]
        for _ in range(self.mix.shape[0] // 4):
            x = x @ self.mix.T * self.scale
        found: Tensor = self.norm(x) @ self.embed.weight.t()
        return found


@pytest.mark.parametrize("room_bytes", [0, 600, 1 << 20])
def test_it_computes_the_same_with_little_at_hand(room_bytes: int) -> None:
    torch.manual_seed(0)
    model, tokens = Uses().eval(), torch.arange(10).view(2, 5)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in whole.items()}
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def bring(name: str) -> Tensor:
        nonlocal most
        found = whole[name].clone()
        alive.append(weakref.ref(found))
        most = max(most, sum(one.nbytes for ref in alive if (one := ref()) is not None))
        return found

    with torch.no_grad():
        wanted = model(tokens)
        with on_demand(model, CPU, shapes, bring, room_bytes):
            first = model(tokens)
            num_first = len(alive)
            second = model(tokens)
    torch.testing.assert_close(
        first, wanted
    )  # attention leaves its fused path where torch's functions are watched
    assert torch.equal(second, first)
    lstm = sum(p.nbytes for name, p in whole.items() if name.startswith("recur"))
    attend = sum(p.nbytes for name, p in whole.items() if name.startswith("attend"))
    assert most <= room_bytes + max(lstm, attend)  # one operation's
    if room_bytes > sum(p.nbytes for p in whole.values()):
        assert len(alive) == num_first == len(whole)
    else:
        assert len(alive) > len(whole)


def test_values_that_are_read_past_torch_are_no_numbers() -> None:
    model = nn.Linear(3, 3)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    with on_demand(model, CPU, shapes, lambda name: torch.zeros(shapes[name]), 0):
        pass
    assert model.weight.shape == (3, 3)
    assert model.weight.isnan().all()


def test_ranks_that_use_different_parameters_are_told() -> None:
    same_everywhere(["a", "a"])
    with pytest.raises(RunError, match=r"rank 0 a, rank 1 none.*\n?.*--memory"):
        same_everywhere(["a", ""])


def test_room_counts_memory_once() -> None:
    base = torch.zeros(100)
    assert room_beside([base, base[:50], 3], CPU, 1000) == (1000 - 400) // 2
    assert room_beside([base], CPU, 100) == 0
