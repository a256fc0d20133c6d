"""The algorithms of collectives: ring, trees, recursive halving, two levels. Pure functions of the number of ranks.

In: what is communicated, by which algorithm, among how many ranks. Out: `Rounds` on a tensor of as many blocks as ranks
(of an all_to_all, as many as pairs). Of a reduce_scatter, gather and scatter, block r is rank r's. Sources: Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); Sanders, Speck, Träff,
"Two-tree algorithms" (2009).
"""

from collections.abc import Callable, Sequence

from plait.errors import PlanError
from plait.program.hops.rounds import Hop, Rounds, add, joined, move, together

OPERATIONS = (
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
)  # fmt: skip
"""All collectives that can be written as messages."""
ALGORITHMS = ("ring", "tree", "double-tree", "recursive-halving", "hierarchical")
"""By which."""


def rounds_of(operation: str, algorithm: str, ranks: int, *, root: int = 0, hosts: int = 1) -> Rounds:
    """A collective; `hosts`: of which each has as many consecutive ranks, for `hierarchical`."""
    if operation not in OPERATIONS or algorithm not in ALGORITHMS:
        raise PlanError(
            f"there is no {operation} by {algorithm}.",
            fix=f"choose one of {', '.join(OPERATIONS)}; and one of {', '.join(ALGORITHMS)}.",
        )
    if ranks % hosts:
        raise PlanError(
            f"{ranks} ranks on {hosts} hosts are not equally many on each.",
            fix=f"set hosts to a divisor of {ranks}.",
        )
    everybody = tuple(range(ranks))
    if operation == "all_to_all":
        return _all_to_all(ranks)
    if algorithm == "hierarchical":
        return _hierarchical(operation, ranks, root, hosts)
    return _FAMILIES[algorithm](operation, everybody, [(block,) for block in everybody], root)


def algorithms_of(operation: str, ranks: int) -> tuple[str, ...]:
    """The algorithms on one host that differ for an operation; of two ranks, say, all trees are the same."""
    found: dict[str, Rounds] = {}
    for algorithm in ALGORITHMS[:-1]:
        rounds = rounds_of(operation, algorithm, ranks)
        if rounds not in found.values():
            found[algorithm] = rounds
    return tuple(found)


Blocks = Sequence[tuple[int, ...]]
"""What belongs to each rank of a group, in its order."""


def _all(blocks: Blocks) -> tuple[int, ...]:
    return tuple(block for own in blocks for block in own)


def _ring(operation: str, group: Sequence[int], blocks: Blocks, root: int) -> Rounds:
    n = len(group)
    match operation:
        case "reduce_scatter":
            return [
                [add(group[r], group[(r + 1) % n], blocks[(r - s - 1) % n]) for r in range(n)]
                for s in range(n - 1)
            ]
        case "all_gather":
            return [
                [move(group[r], group[(r + 1) % n], blocks[(r - s) % n]) for r in range(n)]
                for s in range(n - 1)
            ]
        case "all_reduce":
            return joined(
                _ring("reduce_scatter", group, blocks, root), _ring("all_gather", group, blocks, root)
            )
    chain = [group[(root + at) % n] for at in range(n)]  # the root first
    if operation in ("broadcast", "reduce"):  # block after block, each one hop behind the one before
        found = []
        for time in range(2 * n - 2):
            hops = [(at, blocks[time - at]) for at in range(n - 1) if 0 <= time - at < n]
            if operation == "broadcast":
                found.append([move(chain[at], chain[at + 1], own) for at, own in hops])
            else:
                found.append([add(chain[n - 1 - at], chain[n - 2 - at], own) for at, own in hops])
        return found
    own_of = [blocks[(root + at) % n] for at in range(n)]
    scattered: list[list[Hop]] = [[] for _ in range(n - 1)]  # what goes furthest leaves first
    for end in range(1, n):
        for at in range(end):
            scattered[n - 1 - end + at].append(move(chain[at], chain[at + 1], own_of[end]))
    if operation == "scatter":
        return scattered
    return [[Hop(hop.to, hop.source, hop.blocks, False) for hop in hops] for hops in reversed(scattered)]


def _tree(operation: str, group: Sequence[int], blocks: Blocks, root: int) -> Rounds:
    """Binomial: at every step twice as many ranks have it."""
    n = len(group)
    chain = [group[(root + at) % n] for at in range(n)]
    own_of = [blocks[(root + at) % n] for at in range(n)]
    steps = [1 << bit for bit in reversed(range(max(1, (n - 1).bit_length())))]
    down: list[list[tuple[int, int, tuple[int, ...]]]] = []  # (from, to, what belongs to those under it)
    for step in steps if n > 1 else ():
        down.append(
            [
                (at, at + step, _all(own_of[at + step : min(at + 2 * step, n)]))
                for at in range(0, n, 2 * step)
                if at + step < n
            ]
        )
    everything = _all(blocks)
    match operation:
        case "broadcast":
            return [[move(chain[a], chain[b], everything) for a, b, _ in hops] for hops in down]
        case "reduce":
            return [[add(chain[b], chain[a], everything) for a, b, _ in hops] for hops in reversed(down)]
        case "scatter":
            return [[move(chain[a], chain[b], own) for a, b, own in hops] for hops in down]
        case "gather":
            return [[move(chain[b], chain[a], own) for a, b, own in hops] for hops in reversed(down)]
        case "all_reduce":
            return joined(_tree("reduce", group, blocks, 0), _tree("broadcast", group, blocks, 0))
        case "all_gather":
            return joined(_tree("gather", group, blocks, 0), _tree("broadcast", group, blocks, 0))
    return joined(_tree("reduce", group, blocks, 0), _tree("scatter", group, blocks, 0))


def _double_tree(operation: str, group: Sequence[int], blocks: Blocks, root: int) -> Rounds:
    """Two binary trees, each with half of the blocks; who has children in one is a leaf of the other."""
    n = len(group)
    if operation not in ("all_reduce", "broadcast", "reduce") or n < 3:
        return _tree(operation, group, blocks, root)
    everything = _all(blocks)
    halves = everything[: len(everything) // 2], everything[len(everything) // 2 :]
    shifts = (0, 1) if n % 2 else (0, 0)
    found = []
    for tree, half in enumerate(halves):
        others = [group[(shifts[tree] + at) % n] for at in range(n)]
        others = others[::-1] if tree and n % 2 == 0 else others
        top, edges = _binary(n)
        ups = [
            [add(others[child], others[parent], half) for parent, child in level] for level in reversed(edges)
        ]
        downs = [[move(others[parent], others[child], half) for parent, child in level] for level in edges]
        at_root = group[root]
        if operation == "reduce":
            found.append(joined(ups, [[move(others[top], at_root, half)] if others[top] != at_root else []]))
        elif operation == "broadcast":
            found.append(
                joined([[move(at_root, others[top], half)] if others[top] != at_root else []], downs)
            )
        else:
            found.append(joined(ups, downs))
    return together(*found)


def _binary(n: int) -> tuple[int, list[list[tuple[int, int]]]]:
    """The root of a binary tree whose nodes lie in order, and its edges (parent, child) level by level."""
    levels: list[list[tuple[int, int]]] = []

    def grow(low: int, high: int, depth: int) -> int | None:
        if low >= high:
            return None
        size = high - low
        top = low + (1 << (size.bit_length() - 1)) - 1
        if len(levels) <= depth:
            levels.append([])
        for child in (grow(low, top, depth + 1), grow(top + 1, high, depth + 1)):
            if child is not None:
                levels[depth].append((top, child))
        return top

    top = grow(0, n, 0)
    assert top is not None
    return top, [level for level in levels if level]


def _halving(operation: str, group: Sequence[int], blocks: Blocks, root: int) -> Rounds:
    """Partners at half the distance each time; ranks beyond a power of two lend their part to a partner first."""
    n = len(group)
    core = 1 << (n.bit_length() - 1)
    extra = n - core
    everything = _all(blocks)
    held = [(*blocks[r], *(blocks[core + r] if r < extra else ())) for r in range(core)]
    into = [[add(group[core + r], group[r], everything) for r in range(extra)]]
    halves, doubles = [], []
    step = core // 2
    while step:
        halves.append(
            [
                add(
                    group[r],
                    group[r ^ step],
                    _all(held[(r ^ step) // step * step : (r ^ step) // step * step + step]),
                )
                for r in range(core)
            ]
        )
        doubles.append(
            [
                move(group[r], group[r ^ step], _all(held[r // step * step : r // step * step + step]))
                for r in range(core)
            ]
        )
        step //= 2
    doubles.reverse()
    match operation:
        case "reduce_scatter":
            out = [[move(group[r], group[core + r], blocks[core + r]) for r in range(extra)]]
            return joined(into, halves, out)
        case "all_gather":
            own = [[move(group[core + r], group[r], blocks[core + r]) for r in range(extra)]]
            return joined(own, doubles, [[move(group[r], group[core + r], everything) for r in range(extra)]])
        case "all_reduce":
            return joined(
                into, halves, doubles, [[move(group[r], group[core + r], everything) for r in range(extra)]]
            )
        case "broadcast":
            return joined(_tree("scatter", group, blocks, root), _halving("all_gather", group, blocks, root))
        case "reduce":
            return joined(
                _halving("reduce_scatter", group, blocks, root), _tree("gather", group, blocks, root)
            )
    return _tree(operation, group, blocks, root)


def _hierarchical(operation: str, ranks: int, root: int, hosts: int) -> Rounds:
    """First within hosts, then between them, where every rank of a host talks to its like on the others."""
    each = ranks // hosts
    if hosts in (1, ranks) or operation in ("gather", "scatter"):
        return _tree(operation, range(ranks), [(rank,) for rank in range(ranks)], root)
    inner = [[host * each + at for at in range(each)] for host in range(hosts)]
    outer = [[host * each + at for host in range(hosts)] for at in range(each)]
    of_place = [tuple(outer[at]) for at in range(each)]  # the blocks of all ranks at one place in their hosts
    single = [[(block,) for block in blocks] for blocks in of_place]

    def within(what: str) -> Rounds:
        return _beside([_ring(what, group, of_place, 0) for group in inner])

    def between(what: str) -> Rounds:
        return _beside([_ring(what, outer[at], single[at], 0) for at in range(each)])

    match operation:
        case "all_reduce":
            return joined(within("reduce_scatter"), between("all_reduce"), within("all_gather"))
        case "reduce_scatter":
            return joined(within("reduce_scatter"), between("reduce_scatter"))
        case "all_gather":
            return joined(between("all_gather"), within("all_gather"))
    everything = [(rank,) for rank in range(ranks)]
    host, place = divmod(root, each)
    across = _tree(operation, outer[place], _whole(everything, hosts), host)
    local = _beside([_tree(operation, group, _whole(everything, each), place) for group in inner])
    return joined(across, local) if operation == "broadcast" else joined(local, across)


def _whole(blocks: Blocks, parts: int) -> Blocks:
    """All blocks, dealt to some ranks: of a tree that carries them all, it does not matter to whom."""
    return [_all(blocks[part::parts]) for part in range(parts)]


def _beside(parts: Sequence[Rounds]) -> Rounds:
    found: Rounds = []
    for part in parts:
        found = together(found, part)
    return found


def _all_to_all(ranks: int) -> Rounds:
    """Every rank sends to the one `step` further; block `source * ranks + to` goes from `source` to `to`."""
    return [
        [move(r, (r + step) % ranks, (r * ranks + (r + step) % ranks,)) for r in range(ranks)]
        for step in range(1, ranks)
    ]


_FAMILIES: dict[str, Callable[[str, Sequence[int], Blocks, int], Rounds]] = {
    "ring": _ring,
    "tree": _tree,
    "double-tree": _double_tree,
    "recursive-halving": _halving,
}
