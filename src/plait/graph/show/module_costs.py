"""What each module of a model costs, forward and backward together.

In: ops with their FLOPs, the memory that they keep, the parameters. Out: one entry per module that does something,
costliest first; an entry includes everything inside the module. Siblings that are built alike and run the same ops (the
layers of a transformer) become one entry, `blocks.{0-95}`, so that a table of ten lines says something about any depth.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import fx

from plait.graph.cost import value_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCost:
    """A module, or several equal ones, with all that is inside."""

    path: str
    """As in `named_modules()`; `{0-95}` stands for equal siblings."""
    count: int
    """How many modules this entry adds up."""
    num_ops: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    """Kept from the forward for the backward."""
    num_parameters: int
    """A tied parameter counts where it was first named."""
    parameter_bytes: int


@dataclass(slots=True)
class _Tree:
    """A module while costs are added up."""

    children: dict[str, "_Tree"] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    shapes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    num_ops: int = 0
    flops: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    kept: int = 0
    num_parameters: int = 0
    parameter_bytes: int = 0

    def likeness(self) -> tuple[Any, ...]:
        """Equal for modules that are built alike and run the same ops."""
        inside = tuple((name, child.likeness()) for name, child in self.children.items())
        return tuple(self.targets), tuple(self.shapes), inside


def module_costs(
    *, flops: Mapping[fx.Node, int], kept: Mapping[fx.Node, int], parameters: Mapping[str, Any]
) -> tuple[ModuleCost, ...]:
    """Costs by module; `flops` names every op, `kept` the bytes that the backward wants of some of them."""
    root = _Tree()
    for name, value in parameters.items():
        path, _, short = name.rpartition(".")
        for tree in _along(root, path):
            tree.num_parameters += value.numel()
            tree.parameter_bytes += value_bytes(value)
        tree.shapes.append((short, tuple(value.shape)))
    for node, count in flops.items():
        phase = node.meta["phase"]
        for tree in _along(root, node.meta["module"]):
            tree.num_ops += 1
            tree.flops[phase] += count
            tree.kept += kept.get(node, 0)
        if phase == "forward":
            tree.targets.append(str(node.target))
    entries = [entry for entry in _entries(root.children) if entry.num_ops]
    return tuple(sorted(_without_wrappers(entries), key=_rank))


def _along(root: _Tree, path: str) -> Iterator[_Tree]:
    """The modules from the model down to the one at `path`."""
    yield root
    tree = root
    for name in path.split(".") if path else ():
        tree = tree.children.setdefault(name, _Tree())
        yield tree


def _entries(children: Mapping[str, _Tree], above: str = "") -> Iterator[ModuleCost]:
    yield from _entries_of_many([children], above)


def _entries_of_many(siblings: Sequence[Mapping[str, _Tree]], above: str) -> Iterator[ModuleCost]:
    """The entries of equal parents' children, the first parent's names standing for all."""
    for names in _alike(siblings[0]):
        trees = [children[name] for children in siblings for name in names]
        path = f"{above}{_joined(names)}"
        yield ModuleCost(
            path=path,
            count=len(trees),
            num_ops=sum(tree.num_ops for tree in trees),
            forward_flops=sum(tree.flops["forward"] for tree in trees),
            backward_flops=sum(tree.flops["backward"] for tree in trees),
            activation_bytes=sum(tree.kept for tree in trees),
            num_parameters=sum(tree.num_parameters for tree in trees),
            parameter_bytes=sum(tree.parameter_bytes for tree in trees),
        )
        yield from _entries_of_many([tree.children for tree in trees], f"{path}.")


def _alike(children: Mapping[str, _Tree]) -> list[list[str]]:
    """The names, those of equal numbered children together."""
    groups: dict[Any, list[str]] = {}
    for name, tree in children.items():
        key = ("numbered", tree.likeness()) if name.isdigit() else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _joined(names: Sequence[str]) -> str:
    """`{0-95}`, `{1,3}`, or the one name."""
    if len(names) == 1:
        return names[0]
    numbers = sorted(int(name) for name in names)
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return "{" + ",".join(runs) + "}"


def _without_wrappers(entries: Sequence[ModuleCost]) -> list[ModuleCost]:
    """Leave out a module whose every op is in one entry below it."""
    kept = []
    for index, entry in enumerate(entries):
        following = entries[index + 1] if index + 1 < len(entries) else None
        is_wrapper = (
            following is not None
            and following.path.startswith(f"{entry.path}.")
            and following.num_ops == entry.num_ops
        )
        if not is_wrapper:
            kept.append(entry)
    return kept


def _rank(entry: ModuleCost) -> tuple[int, int, int]:
    return -(entry.forward_flops + entry.backward_flops), -entry.activation_bytes, entry.path.count(".")
