"""What one rank does of a collective through shared memory, as rows of numbers that `core` executes.

In: how many ranks there are, sizes in bytes, what is summed. Out: `Rows`. Every rank has two slots that all can read,
used in turn: it copies what others need into one, everybody meets, and each takes what it needs from the others'
slots. A slot is written again two meetings later, when all have left it: they came to the meeting in between. Larger
tensors go through in pieces that stay in the cache. Sums are made in the order of ranks, so all have the same bits.
"""

from functools import lru_cache

from plait.run.link.shm.rows import LINE, SLOT_BYTES, Reduction, Rows, Writer

SMALL_BYTES = 1 << 15
"""Up to this size every rank adds up everything by itself: one meeting instead of two."""
_KEPT = 128
"""Rows of each kind of collective that are kept: those of a step come again in the next."""


@lru_cache(_KEPT)
def barrier(ranks: int, own: int) -> Rows:
    """Everybody waits for everybody."""
    writer = Writer(ranks, own)
    writer.meet()
    return writer.rows()


@lru_cache(_KEPT)
def all_reduce(ranks: int, own: int, num_bytes: int, how: Reduction, root: int = -1) -> Rows:
    """The sum for all; of a reduce, for `root` alone."""
    writer = Writer(ranks, own)
    here = root in (-1, own)
    at_once = num_bytes <= SMALL_BYTES or (ranks == 2 and root < 0)
    size = SLOT_BYTES if at_once else SLOT_BYTES // (LINE * ranks) * LINE * ranks
    for at in _pieces(num_bytes, size):
        count = min(size, num_bytes - at)
        writer.copy(writer.slot(own), 0, writer.given(), at, count)
        writer.meet()
        if at_once:
            if here:
                writer.reduce(writer.taken(), at, writer.slot(0), 0, count, how)
        else:
            share = _share(count, ranks)
            low = min(own * share, count)
            high = min(low + share, count)
            writer.reduce(writer.slot(own), low, writer.slot(0), low, high - low, how)
            writer.meet() if here else writer.leave()
            for rank in range(ranks) if here else ():
                low = min(rank * share, count)
                writer.copy(writer.taken(), at + low, writer.slot(rank), low, min(share, count - low))
        writer.uses += 1
    return writer.rows()


@lru_cache(_KEPT)
def broadcast(ranks: int, own: int, num_bytes: int, root: int) -> Rows:
    """The root's bytes to all."""
    writer = Writer(ranks, own)
    for at in _pieces(num_bytes, SLOT_BYTES):
        count = min(SLOT_BYTES, num_bytes - at)
        if own == root:
            writer.copy(writer.slot(own), 0, writer.given(), at, count)
        writer.meet()
        if own != root:
            writer.copy(writer.taken(), at, writer.slot(root), 0, count)
        writer.uses += 1
    return writer.rows()


@lru_cache(_KEPT)
def all_gather(ranks: int, own: int, sizes: tuple[int, ...], root: int = -1) -> Rows:
    """Everybody's bytes to all, one register a rank; of a gather, to `root` alone."""
    writer = Writer(ranks, own)
    for at in _pieces(max(sizes), SLOT_BYTES):
        writer.copy(writer.slot(own), 0, writer.given(), at, min(SLOT_BYTES, sizes[own] - at))
        writer.meet()
        for rank in range(ranks) if root in (-1, own) else ():
            source, start = (writer.slot(rank), 0) if rank != own else (writer.given(), at)
            writer.copy(writer.taken(rank), at, source, start, min(SLOT_BYTES, sizes[rank] - at))
        writer.uses += 1
    return writer.rows()


@lru_cache(_KEPT)
def reduce_scatter(ranks: int, own: int, sizes: tuple[int, ...], how: Reduction) -> Rows:
    """Of as many pieces as ranks, to each rank the sum of its own."""
    writer = Writer(ranks, own)
    room = _room(ranks)
    for at in _pieces(max(sizes), room):
        for rank in range(ranks):
            count = min(room, sizes[rank] - at)
            writer.copy(writer.slot(own), rank * room, writer.given(rank), at, count)
        writer.meet()
        writer.reduce(writer.taken(), at, writer.slot(0), own * room, min(room, sizes[own] - at), how)
        writer.uses += 1
    return writer.rows()


@lru_cache(_KEPT)
def scatter(ranks: int, own: int, num_bytes: int, root: int) -> Rows:
    """To each rank its piece of what the root has."""
    sizes = tuple((num_bytes if source == root else 0,) * ranks for source in range(ranks))
    return all_to_all(ranks, own, sizes)


@lru_cache(_KEPT)
def all_to_all(ranks: int, own: int, sizes: tuple[tuple[int, ...], ...]) -> Rows:
    """A message from every rank to every other; `sizes` by sender, then by receiver."""
    writer = Writer(ranks, own)
    room = _room(ranks)
    for at in _pieces(max(max(row) for row in sizes), room):
        for to in range(ranks):
            writer.copy(writer.slot(own), to * room, writer.given(to), at, min(room, sizes[own][to] - at))
        writer.meet()
        for rank in range(ranks):
            count = min(room, sizes[rank][own] - at)
            writer.copy(writer.taken(rank), at, writer.slot(rank), own * room, count)
        writer.uses += 1
    return writer.rows()


@lru_cache(_KEPT)
def come(ranks: int, own: int) -> Rows:
    """Until all have told what they are about to do, and where their tensors lie: what follows depends on that."""
    writer = Writer(ranks, own)
    writer.come()
    return writer.rows()


@lru_cache(_KEPT)
def sum_in_place(ranks: int, own: int, num_bytes: int, how: Reduction, sizes: tuple[int, ...] = ()) -> Rows:
    """Tensors that all can read: this rank's piece of the sum, for all; with `sizes` of pieces to its own tensor alone.

    Registers of what is given: every rank's tensor.
    """
    writer = Writer(ranks, own)
    share = _share(num_bytes, ranks)
    low, high = min(own * share, num_bytes), min((own + 1) * share, num_bytes)
    if sizes:
        low, high = sum(sizes[:own]), sum(sizes[: own + 1])
    for at in range(low, high, SLOT_BYTES):
        count = min(SLOT_BYTES, high - at)
        writer.reduce(writer.given(own), at, writer.given(0), at, count, how)
        for rank in range(ranks) if not sizes else ():
            if rank != own:
                writer.copy(writer.given(rank), at, writer.given(own), at, count)
    writer.leave()
    writer.settle()
    return writer.rows(is_settled=False)


@lru_cache(_KEPT)
def gather_in_place(
    ranks: int, own: int, sizes: tuple[int, ...], is_there: bool, settles: bool = False
) -> Rows:
    """Everybody's bytes from where they lie; `is_there`: this rank's own are in their place; `settles`: it ends when
    all others have read this rank's."""
    writer = Writer(ranks, own)
    for rank in range(ranks):
        if rank != own or not is_there:
            writer.copy(writer.taken(rank), 0, writer.given(rank), 0, sizes[rank])
    writer.leave()
    if settles:
        writer.settle()
    return writer.rows(is_settled=not settles)


@lru_cache(_KEPT)
def halo(ranks: int, own: int, up: int, down: int) -> Rows:
    """The first bytes of every rank to the one before it, and the last ones to the next."""
    writer = Writer(ranks, own)
    room = SLOT_BYTES // 2
    for at in _pieces(max(up, down), room):
        writer.copy(writer.slot(own), 0, writer.given(0), at, min(room, up - at))
        writer.copy(writer.slot(own), room, writer.given(1), at, min(room, down - at))
        writer.meet()
        if own > 0:
            writer.copy(writer.taken(0), at, writer.slot(own - 1), room, min(room, down - at))
        if own + 1 < ranks:
            writer.copy(writer.taken(1), at, writer.slot(own + 1), 0, min(room, up - at))
        writer.uses += 1
    return writer.rows()


def _pieces(num_bytes: int, size: int) -> range:
    """Where pieces start; one where there is nothing, as all must meet."""
    return range(0, max(num_bytes, 1), size)


def _share(num_bytes: int, ranks: int) -> int:
    lines = -(-num_bytes // LINE)
    return -(-lines // ranks) * LINE


def _room(ranks: int) -> int:
    return SLOT_BYTES // ranks // LINE * LINE
