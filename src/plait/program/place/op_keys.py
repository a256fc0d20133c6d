"""Names of ops that survive a new capture: what a plan calls an op.

In: a graph. Out: for every op a key such as `h.3.up forward addmm 1`: the path of its module, its phase, the op and the
how-manieth of its kind it is in that module and phase. A key with `*` for the number of a block speaks for the op in
all blocks alike (`h.*.up forward addmm 1`); one that names the block speaks for that block alone and comes before.

A block is a numbered module that has modules of its own: the layers of a plain `Sequential` keep their numbers, because
they are no repetition of each other.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import fx

from plait.graph.graph import Graph
from plait.plan.placements import Entries
from plait.program.place.placement import Strategy, parse_strategy


def exact_keys(graph: Graph) -> dict[fx.Node, str]:
    """The key of every op, with the numbers of its module's path."""
    return {node: f"{module} {rest}".strip() for node, (module, rest) in _parts(graph).items()}


def op_keys(graph: Graph) -> dict[fx.Node, str]:
    """The key of every op, with `*` for the numbers of blocks: equal for the same op of repeated blocks."""
    blocks = find_blocks(graph)
    return {
        node: f"{fold_path(module, blocks)} {rest}".strip() for node, (module, rest) in _parts(graph).items()
    }


def find_blocks(graph: Graph) -> frozenset[str]:
    """The paths of modules that have modules of their own, as far as ops tell."""
    found = set()
    for module in {node.meta.get("module", "") for node in graph.ops()}:
        path = module.split(".")
        found |= {".".join(path[:end]) for end in range(1, len(path))}
    return frozenset(found)


def fold_path(path: str, blocks: frozenset[str]) -> str:
    """The path of a module or a parameter with `*` for the numbers of blocks."""
    words = path.split(".")
    return ".".join(
        "*" if word.isdigit() and ".".join(words[: index + 1]) in blocks else word
        for index, word in enumerate(words)
    )


def pins_of(graph: Graph, entries: Entries) -> dict[fx.Node, Strategy]:
    """The strategies that entries demand: an op's own key counts before the folded one, that before a wider pattern."""
    if not entries:
        return {}
    table: Mapping[str, str] = dict(reversed(entries))
    folded = op_keys(graph)
    names = set(folded.values())
    wide = [
        (pattern, text)
        for pattern, text in entries
        if pattern not in names and any(sign in pattern for sign in "*?[")
    ]
    pins: dict[fx.Node, Strategy] = {}
    for node, key in exact_keys(graph).items():
        text = table.get(key) or table.get(folded[node])
        if text is None:
            text = next((text for pattern, text in wide if fnmatchcase(key, pattern)), None)
        if text is not None:
            pins[node] = parse_strategy(text)
    return pins


def _parts(graph: Graph) -> dict[fx.Node, tuple[str, str]]:
    """Module and the rest of the key of every op."""
    counts: Counter[tuple[str, str, str]] = Counter()
    parts: dict[fx.Node, tuple[str, str]] = {}
    for node in graph.ops():
        if node.target is operator.getitem:
            continue
        module, phase = node.meta.get("module", ""), node.meta.get("phase", "")
        kind = (module, phase, _op_name(node))
        counts[kind] += 1
        parts[node] = (module, f"{phase} {kind[2]} {counts[kind]}")
    return parts


def _op_name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]
