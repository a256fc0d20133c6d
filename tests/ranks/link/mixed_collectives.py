"""Random collectives of torch.distributed, the same on gloo and on plait_shm: every result must be equal.

In: two sets of groups of the same ranks, a seed. Out: what differed, as text. Whole numbers, so that no order of
summation matters. Sizes 0, 1 and odd, every dtype, tensors that are not contiguous, sub-groups, works that are waited
for in any order.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
SIZES = (0, 1, 2, 3, 7, 64, 1001, 8192, 8193, 30_011, 140_001)
OPERATIONS = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MAX,
    dist.ReduceOp.MIN,
)
KINDS = (
    "all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_list", "all_to_all", "all_to_all_single", "send", "barrier",
)  # fmt: skip
_OPEN = 6
"""Works under way at once, at most."""

Pending = tuple[str, Any, Callable[[], bool]]


class Case:
    """One collective, drawn alike on all ranks."""

    def __init__(self, draw: random.Random, number: int, ranks: Sequence[int], rank: int) -> None:
        self.kind = draw.choice(KINDS)
        self.dtype = draw.choice(DTYPES)
        self.count = draw.choice(SIZES)
        self.op = draw.choice(OPERATIONS)
        self.root = draw.choice(list(ranks))
        self.peer = draw.choice([other for other in ranks if other != self.root])
        self.waits = draw.random() < 0.5
        self.spread = draw.random() < 0.25
        self.splits = [[draw.randrange(4) for _ in ranks] for _ in ranks]
        self.ranks, self.rank = ranks, rank
        self._values = torch.Generator().manual_seed(1000 * number + rank)
        if self.op == dist.ReduceOp.AVG and not self.dtype.is_floating_point:
            self.op = dist.ReduceOp.SUM

    def tensor(self, count: int) -> Tensor:
        """Numbers of this rank."""
        low = 0 if self.dtype == torch.uint8 else -2
        flat = torch.randint(low, 3, (2 * count,), generator=self._values).to(self.dtype)
        return flat[::2] if self.spread else flat[:count]

    def __str__(self) -> str:
        spread = ", spread" if self.spread else ""
        what = f"{self.kind} of {self.count} {self.dtype} by {self.op}"
        return f"{what} among {list(self.ranks)}, root {self.root}{spread}"


def differences(
    gloo: Sequence[tuple[Sequence[int], Any]], shm: Sequence[Any], rank: int, seed: int, count: int
) -> list[str]:
    """Run `count` collectives on pairs of groups; `gloo`: with the ranks of each."""
    draw = random.Random(seed)
    own = random.Random(1000 * seed + rank)  # in which order this rank waits
    pending: list[Pending] = []
    wrong: list[str] = []
    for number in range(count):
        index = draw.randrange(len(gloo))
        ranks, group = gloo[index]
        case = Case(draw, seed * count + number, ranks, rank)
        if rank not in ranks:
            continue
        work, is_right = _run(case, group, shm[index])
        if case.waits and work is not None:
            pending.append((str(case), work, is_right))
        elif not is_right():
            wrong.append(str(case))
        while len(pending) > (_OPEN if number + 1 < count else 0):
            told, open_work, check = pending.pop(own.randrange(len(pending)))
            open_work.wait()
            if not check():
                wrong.append(told)
    return wrong


def _run(case: Case, gloo: Any, shm: Any) -> tuple[Any, Callable[[], bool]]:
    size, own = len(case.ranks), case.ranks.index(case.rank)
    options: dict[str, Any] = {"group": shm, "async_op": case.waits}
    plain = case.op if case.op != dist.ReduceOp.AVG else dist.ReduceOp.SUM
    share = (lambda t: t / size) if case.op == dist.ReduceOp.AVG else (lambda t: t)
    mine = case.tensor(case.count)
    theirs = mine.clone()
    match case.kind:
        case "all_reduce" | "reduce":
            if case.kind == "reduce":
                dist.all_reduce(theirs, plain, group=gloo)
                work = dist.reduce(mine, case.root, case.op, **options)
            else:
                dist.all_reduce(theirs, plain, group=gloo)
                work = dist.all_reduce(mine, case.op, **options)
            counts = case.kind == "all_reduce" or case.rank == case.root
            return work, lambda: not counts or torch.equal(mine, share(theirs).to(mine.dtype))
        case "broadcast":
            dist.broadcast(theirs, case.root, group=gloo)
            return dist.broadcast(mine, case.root, **options), lambda: torch.equal(mine, theirs)
        case "all_gather" | "gather":
            at_root = case.kind == "all_gather" or case.rank == case.root
            outs = [case.tensor(case.count) for _ in case.ranks]
            wanted = [torch.empty(case.count, dtype=case.dtype) for _ in case.ranks]
            dist.all_gather(wanted, theirs, group=gloo)
            if case.kind == "gather":
                work = dist.gather(mine, outs if at_root else None, case.root, **options)
            else:
                work = dist.all_gather(outs, mine, **options)
            return work, lambda: not at_root or _equal(outs, wanted)
        case "all_gather_into":
            out, wanted_one = case.tensor(size * case.count), torch.empty(size * case.count, dtype=case.dtype)
            dist.all_gather(list(wanted_one.view(size, case.count)), theirs, group=gloo)
            work = dist.all_gather_single(out, mine, **options)
            return work, lambda: torch.equal(out, wanted_one)
        case "scatter":
            pieces = [case.tensor(case.count) for _ in case.ranks]
            given = pieces if case.rank == case.root else None
            wanted_piece = torch.empty(case.count, dtype=case.dtype)
            dist.scatter(wanted_piece, given and [p.contiguous() for p in given], case.root, group=gloo)
            return dist.scatter(mine, given, case.root, **options), lambda: torch.equal(mine, wanted_piece)
        case "reduce_scatter" | "reduce_scatter_list":
            whole = case.tensor(size * case.count)
            summed = whole.clone()
            dist.all_reduce(summed, plain, group=gloo)
            wanted_piece = share(summed[own * case.count : (own + 1) * case.count]).to(case.dtype)
            if case.kind == "reduce_scatter":
                work = dist.reduce_scatter_single(mine, whole.contiguous(), case.op, **options)
            else:
                work = dist.reduce_scatter(
                    mine, list(whole.split(case.count) if case.count else [whole] * size), case.op, **options
                )
            return work, lambda: torch.equal(mine, wanted_piece)
        case "all_to_all":
            rows = [[case.count * times for times in row] for row in case.splits]
            pieces = [case.tensor(count) for count in rows[own]]
            outs = [case.tensor(row[own]) for row in rows]
            wanted = _by_gathers(case, pieces, rows, own, gloo)
            return dist.all_to_all(outs, pieces, **options), lambda: _equal(outs, wanted)
        case "all_to_all_single":
            pieces = [case.tensor(times) for times in case.splits[own]]
            counts_in = [row[own] for row in case.splits]
            out = case.tensor(sum(counts_in))
            wanted = _by_gathers(case, pieces, case.splits, own, gloo)
            work = dist.all_to_all_single(out, torch.cat(pieces), counts_in, case.splits[own], **options)
            return work, lambda: torch.equal(out, torch.cat(wanted))
        case "send":
            return _message(case, mine, gloo, shm)
    return dist.barrier(**options), lambda: True


def _message(case: Case, mine: Tensor, gloo: Any, shm: Any) -> tuple[Any, Callable[[], bool]]:
    if case.rank == case.root:
        dist.send(mine.contiguous(), case.peer, group=gloo)
        return dist.isend(mine, case.peer, group=shm), lambda: True
    if case.rank != case.peer:
        return None, lambda: True
    wanted = torch.empty(case.count, dtype=case.dtype)
    dist.recv(wanted, case.root, group=gloo)
    work = dist.irecv(mine, case.root, group=shm)
    assert work is not None
    if not case.waits:
        work.wait()
    return work, lambda: torch.equal(mine, wanted)


def _by_gathers(case: Case, pieces: Sequence[Tensor], sizes: Any, own: int, gloo: Any) -> list[Tensor]:
    """What an all_to_all gives, by an all_gather of everything: gloo's own takes no lists of many sizes."""
    largest = max(sum(row) for row in sizes)
    padded = torch.zeros(largest, dtype=case.dtype)
    joined = torch.cat(list(pieces))
    padded[: joined.numel()] = joined
    everything = [torch.empty_like(padded) for _ in case.ranks]
    dist.all_gather(everything, padded, group=gloo)
    return [flat[sum(row[:own]) : sum(row[: own + 1])] for flat, row in zip(everything, sizes, strict=True)]


def _equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
