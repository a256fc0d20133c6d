"""How the systems of published measurements run a model, where that differs from what its graph says.

In: a `Style`. Out: a reader of unit costs. Used by `plait validate` alone: plait's own plans are predicted as they run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.graph.op_family import family
from plait.program.cost.op_time import OpWork
from plait.program.local.communicate import all_gather
from plait.program.local.local_graph import LocalGraph
from plait.program.segment.recompute import is_backward
from plait.search.predict.model_costs import Amount
from plait.search.predict.unit_costs import MakeReader, UnitReader
from plait.search.predict.unit_nodes import elements_of, readers_of

_FUSED = ("elementwise", "random", "softmax")
_INTO = ("elementwise", "softmax", "reduction")


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a system runs a model."""

    half: bool = False
    """Values are in 16 bits even where the graph has 32, but for the loss: weights are in 16 bits themselves."""
    fused: bool = False
    """An elementwise op runs in the kernel of its only reader in its pass: elementwise, a softmax or a sum."""
    whole_blocks: bool = False
    """`full` recompute runs all of a block again, its communication too; otherwise what the backward needs."""
    regathers: bool = False
    """What is gathered for a product is not kept for the backward but gathered again."""
    selective: tuple[str, ...] = ()
    """Modules of which `selective` keeps the inputs alone; empty: what is cheap, found by a cut."""

    def reader(self) -> MakeReader:
        """Makes the reader that sees a model so."""
        return partial(_StyledReader, style=self)


class _StyledReader(UnitReader):
    def __init__(self, graph: Graph, few: LocalGraph, many: LocalGraph, tensor: int, *, style: Style) -> None:
        self.style = style
        super().__init__(graph, few, many, tensor)

    @cached_property
    def _into(self) -> dict[fx.Node, fx.Node]:
        return fused_into(self.nodes, self.unit_of) if self.style.fused else {}

    @cached_property
    def _inside(self) -> dict[fx.Node, list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = {}
        for made, reader in self._into.items():
            found.setdefault(reader, []).append(made)
            found.setdefault(self.twin[reader], []).append(self.twin[made])
        return found

    @cached_property
    def _fused(self) -> set[fx.Node]:
        return {*self._into, *(self.twin[node] for node in self._into)}

    def runs_again(self, setting: str | Sequence[str]) -> set[fx.Node]:
        if setting == "full" and self.style.whole_blocks:
            return {n for n in self.nodes if not is_backward(n) and self.keys[self.unit_of[n]][1]}
        return super().runs_again(self.style.selective or setting if setting == "selective" else setting)

    def is_regathered(self, node: fx.Node) -> bool:
        if not self.style.regathers or is_backward(node) or node.target is not all_gather:
            return False
        return any(is_backward(user) for user in readers_of(node))

    def kept(self, index: int, own: Sequence[fx.Node], setting: str) -> Amount:
        if setting == "full" and self.style.whole_blocks and self.keys[index][1]:
            return self.leaves(index)  # what the next block starts from
        return super().kept(index, own, setting)

    def work(self, node: fx.Node) -> OpWork | None:
        return None if node in self._fused else self._whole_work(node)

    def _whole_work(self, node: fx.Node) -> OpWork | None:
        """A node's work with what was fused into it."""
        work = super().work(node)
        if work is not None and self._is_halved(node) and work.dtype == "float32":
            return replace(work, dtype="bfloat16")
        return work

    def traffic(self, node: fx.Node, work: OpWork) -> float:
        halved = self._is_halved(node) and work.dtype == "float32"
        total = super().traffic(node, replace(work, num_bytes=work.num_bytes / 2) if halved else work)
        for made in self._inside.get(node, ()):
            inside = self._whole_work(made)
            if inside is not None:  # not read, and written only where the backward reads it too
                once = any(is_backward(user) != is_backward(made) for user in readers_of(made))
                total += inside.num_bytes - (1 if once else 2) * self.num_bytes(made)
        return total

    def width(self, node: fx.Node, value: torch.Tensor) -> float:
        return 2 if value.dtype == torch.float32 and self._is_halved(node) else super().width(node, value)

    def _is_halved(self, node: fx.Node) -> bool:
        return self.style.half and node not in self.loss


def fused_into(nodes: Sequence[fx.Node], unit_of: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Ops that run in the kernel of their only reader in the same pass."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        all_readers = [user for user in readers_of(node) if user.op == "call_function"]
        readers = {user for user in all_readers if is_backward(user) == is_backward(node)}
        if family(node.target) not in _FUSED or len(readers) != 1 or len(all_readers) < len(readers_of(node)):
            continue
        reader = next(iter(readers))
        same = unit_of.get(reader) == unit_of[node]
        if same and family(reader.target) in _INTO and elements_of(reader) <= elements_of(node):
            found[node] = reader
    return found
