"""Which parameters get gradients: of a model that branches on the shape of its batch, not the same ones in every step.

In: the graphs of batches of several shapes. Out: the same graphs, all with gradients of the same parameters, of which
some are absent; or the refusal of a batch that comes too late to be like the others.
"""

from collections.abc import Iterable, Mapping

from plait.errors import JobError
from plait.graph.graph import Graph
from plait.graph.rewrite.absent import with_absent


class Trained:
    """The parameters that graphs were seen to train."""

    def __init__(self) -> None:
        self._any: frozenset[str] | None = None
        """By some of them."""
        self.sometimes: frozenset[str] = frozenset()
        """By some of them and not by others."""

    def see(self, graphs: Iterable[Graph]) -> None:
        """Before anything depends on it."""
        for graph in graphs:
            own = frozenset(graph.gradients)
            known = own if self._any is None else self._any
            self.sometimes |= known ^ own
            self._any = known | own

    def unified(self, graphs: Mapping[int, Graph], *, alone: bool) -> dict[int, Graph]:
        """The graphs of one step. Where a rank is `alone`, others need not have the same gradients."""
        before, known = self.sometimes, self._any
        self.see(graphs.values())
        new = (self.sometimes - before) if known is not None else frozenset()
        if new and not alone:
            self.sometimes, self._any = before, known
            some = ", ".join(sorted(new)[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
            raise JobError(
                f"a batch of this shape does not train the parameters that others do: {some}; ranks hold and exchange "
                "the same gradients in every step.",
                fix="put the largest and the smallest samples first and last in the data, where they are looked at "
                "before the run; or let every batch use these parameters, such as with `+ 0 * weight.sum()`.",
            )
        if not self.sometimes:
            return dict(graphs)
        return {kind: with_absent(graph, sorted(self.sometimes)) for kind, graph in graphs.items()}
