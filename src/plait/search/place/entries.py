"""Chosen placements as entries of a plan, as few as say it.

In: the flow of a graph and placements of everything. Out: an `AxisPlacements` from which `propagate` reaches the same
placements. Repeated blocks share an entry; ops are named only where `propagate` would choose otherwise.
"""

from collections.abc import Callable, Mapping

from torch import fx

from plait.plan.placements import AxisPlacements, Entries
from plait.program.place.op_keys import exact_keys, find_blocks, fold_path, op_keys
from plait.program.place.placement import Placement, Shard, Strategy
from plait.program.place.propagate import Listed, Placements, propagate
from plait.search.place.flow import Flow

_ROUNDS = 12
"""Each finds all ops that go astray for the first time; afterwards all that are left are named."""


def as_entries(flow: Flow, placements: Placements) -> AxisPlacements:
    """The entries that stand for placements."""
    pins = _pins(flow, placements)
    exact = exact_keys(flow.graph)
    folded = op_keys(flow.graph)
    return AxisPlacements(
        axis=flow.axis.name,
        parameters=_parameters(flow, placements),
        ops=_folded({exact[node]: (folded[node], str(strategy)) for node, strategy in pins.items()}),
    )


def inputs_of(flow: Flow, placements: Placements) -> dict[str, Placement]:
    """The placements of what enters a graph, by placeholder."""
    return {node.name: placements.of(node) for node in flow.graph.graph.nodes if node.op == "placeholder"}


def _pins(flow: Flow, placements: Placements) -> dict[fx.Node, Strategy]:
    """The strategies that `propagate` does not find by itself, and those of the same ops in other blocks."""
    alike: dict[str, list[fx.Node]] = {}
    keys = op_keys(flow.graph)
    for node, key in keys.items():
        alike.setdefault(key, []).append(node)
    pins: dict[fx.Node, Strategy] = {}
    inputs = inputs_of(flow, placements)
    listed: Listed = {}
    for number in range(_ROUNDS + 1):
        reached = propagate(flow.graph, flow.axis, inputs, pins=pins, others=flow.others, listed=listed)
        astray = [node for node in flow.ops if reached.strategies[node] != placements.strategies[node]]
        if not astray:
            break
        for node in astray:
            arrives = all(
                reached.outputs[tensor[0]] == placements.outputs[tensor[0]] for tensor in flow.reads[node]
            )
            if arrives or number == _ROUNDS - 1:
                pins |= {other: placements.strategies[other] for other in alike[keys[node]]}
    return pins


def _parameters(flow: Flow, placements: Placements) -> Entries:
    blocks = find_blocks(flow.graph)
    texts = {name: str(placements.of(node)) for node, name in flow.parameters.items()}
    cut = {
        name: (fold_path(name, blocks), texts[name])
        for node, name in flow.parameters.items()
        if isinstance(placements.of(node), Shard)
    }
    entries = _folded(cut)
    return _mended(entries, texts, lambda tried: AxisPlacements(axis=flow.axis.name, parameters=tried))


def _mended(
    entries: Entries, texts: Mapping[str, str], build: Callable[[Entries], AxisPlacements]
) -> Entries:
    """Entries with those before them that keep a pattern from speaking for a name that it was not meant for."""
    found = build(entries)
    wrong = {name: text for name, text in texts.items() if (found.parameter(name) or "R") != text}
    return (*wrong.items(), *entries)


def _folded(entries: Mapping[str, tuple[str, str]]) -> Entries:
    """One entry per pattern where all names that it folds say the same, else one per name."""
    said: dict[str, set[str]] = {}
    for pattern, text in entries.values():
        said.setdefault(pattern, set()).add(text)
    exact = [(name, text) for name, (pattern, text) in entries.items() if len(said[pattern]) > 1]
    wide = [(pattern, next(iter(texts))) for pattern, texts in said.items() if len(texts) == 1]
    return (*exact, *wide)
