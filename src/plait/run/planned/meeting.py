"""What the ranks of a loop tell each other before they do something together.

In: what this rank is about to do. Out: what the others told; who is about to do something else is told so.
"""

import hashlib
from typing import Any

from plait.errors import UsageError
from plait.plan.plan import Plan
from plait.run.planned.expression import Expression
from plait.run.wire.tell import tell
from plait.torch_private import pytree


class Meeting:
    """All ranks under one plan."""

    def __init__(self, plan: Plan, rank: int, ranks: int) -> None:
        self._plan, self._rank, self._ranks = plan, rank, ranks

    def __call__(self, what: str, value: Any = None) -> list[Any]:
        """Tell all ranks what this one is about to do, and hear it of them."""
        if self._ranks == 1:
            return [value]
        told = tell({"calls": what, "value": value})
        for rank, other in enumerate(told):
            if other["calls"] != what:
                raise UsageError(
                    f"rank {self._rank} calls {what} while rank {rank} calls {other['calls']}; under plan "
                    f"{self._plan.name} all ranks take part in each.",
                    fix="call it on all ranks (no `if rank == 0:` around it); write files on one of them.",
                )
        return [other["value"] for other in told]

    def shares_of(self, expression: Expression) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The samples of every share, and which tensors have samples on dim 0 wherever they are."""
        count = _num_samples(expression)
        may = [
            counts and t.shape[0] == count
            for t, counts in zip(expression.given, expression.counts, strict=True)
        ]
        own = {"count": count, "may": may, "form": hashlib.sha256(expression.text.encode()).hexdigest()}
        told = self("loss.backward()", own)
        for rank, other in enumerate(told):
            if other["form"] != own["form"]:
                raise UsageError(
                    f"rank {rank} computes another loss than rank {self._rank}.",
                    fix="let all ranks run the same lines, whatever samples they have.",
                )
        counts: dict[int, int] = {}
        for rank, other in enumerate(told):
            share = self._plan.data_coordinate(rank)
            if counts.setdefault(share, other["count"]) != other["count"]:
                raise UsageError(
                    f"rank {rank} gave {other['count']} samples, another rank of share {share} {counts[share]}.",
                    fix="prepare the DataLoader too, or give ranks of one place on `data` the same samples.",
                )
        if not sum(counts.values()):
            raise UsageError("all ranks gave an empty batch.", fix="end the loop when the data ends.")
        flags = tuple(all(other["may"][at] for other in told) for at in range(len(may)))
        return tuple(counts[share] for share in range(self._plan.data_ranks)), flags


def _num_samples(expression: Expression) -> int:
    """Rows of what the model is given first."""
    for call in expression.calls:
        for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if call.function is None else ():
            given = expression.tensor(leaf)
            if given is not None and given.dim():
                return given.shape[0]
    raise UsageError(
        "the model was given no tensor that has samples on dim 0.", fix="give it the batch as tensors."
    )
