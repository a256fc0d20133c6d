"""Megatron's block with its collectives, lecture 004: columns, then rows, one sum each way.

python -m examples.lectures.lecture004_megatron
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

WIDTH, HEADS, TOKENS, BATCH, RANKS = 64, 4, 16, 4, 2


class Block(nn.Module):
    """Attention and MLP of a transformer, with separate query, key and value matrices as in the lecture's figure."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def job() -> plait.Job:
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    return plait.Job(
        model=Block,
        data=TensorDataset(x, x.flip(1)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch=BATCH,
        steps=3,
    )


def exhibit() -> Exhibit:
    placed = plait.placements(job(), "megatron", RANKS)
    proof = plait.verify(job(), "megatron", RANKS, serial=True)
    sums = [one for one in placed.listing.transfers if one.collective != "none"]
    forward = [one for one in sums if one.phase == "forward" and one.num_bytes > 64]
    backward = [one for one in sums if one.phase == "backward" and one.num_bytes > 64]
    cut = [[entry.name, ", ".join(entry.placements), entry.held] for entry in placed.listing.parameters]
    return Exhibit(
        lecture="004",
        title="Megatron's block and its collectives",
        idea="The first matrix of the MLP is cut by columns, so that the nonlinearity needs no exchange, "
        "the second by rows; query, key and value are cut by columns, that is by heads. Each half of a "
        "block then needs one all-reduce forward and one backward. plait finds this cut in an unmodified "
        "module.",
        numbers=[
            Number(what="all-reduces of a block forward", lecture=2, ours=float(len(forward))),
            Number(what="all-reduces of a block backward", lecture=2, ours=float(len(backward))),
            Number(what="equal to one device after 3 steps", ours="yes" if proof.ok else "no"),
        ],
        tables=[
            Table(
                title="Where the weights are on two ranks",
                columns=["parameter", "placement", "a rank holds"],
                rows=cut,
            ),
            Table(
                title="What ranks exchange in a step",
                columns=["when", "how", "what", "bytes"],
                rows=[[one.phase, one.collective, one.what, f"{one.num_bytes:,}"] for one in sums],
            ),
        ],
        seen="S(0) of a weight cuts what comes out of a layer (columns in the lecture's notation, where "
        "the input stands left), S(1) what comes in. `plait graph JOB --placements --plan megatron` "
        "prints this for any model; the picture is in [cutting tensors](../placements.md).",
    )


if __name__ == "__main__":
    show(exhibit())
