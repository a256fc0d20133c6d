"""The choice that communicates least, found exactly: a mixed-integer program for HiGHS.

In: a `Problem` and limits of memory, bytes and work. Out: one option per class with its proof state, or the reason why
there is none. One binary variable per option; per edge and pair of placements a share whose marginals are those of its
two ends (as in Alpa, Zheng et al. 2022, which keeps the relaxation tight); a conversion that several readers share is
as large as the largest of their shares.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from plait.program.place.conversion_cost import PER_SHARD, conversion_bytes
from plait.program.place.placement import Placement, R, Replicate, Shard
from plait.search.place.problem import Edge, Problem, Sharing

_LARGEST_COST = 1e4
"""What the largest coefficient is scaled to: the solver's tolerances are absolute."""

_SLACK = 1.001
"""How much dearer than the known solution columns may be, for what its cost leaves out (shards of whole tensors)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What the solver found."""

    chosen: tuple[int, ...] | None
    """One option per class; None where it found none."""
    is_proven: bool
    """Whether nothing costs less."""
    seconds: float
    """Time that it took, building included."""
    message: str
    """What the solver says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverLimits:
    """What a solution may need; infinite where nothing is known."""

    memory_bytes: float
    """Held by a rank."""
    num_bytes: float
    """Sent by a rank."""
    total: float
    """The cost of a solution that is known already: nothing dearer is looked at."""
    nodes: int
    """Parts of the tree of choices to look at: ranks that compile on their own must choose alike, however busy each of
    their hosts is."""
    seconds: float
    """After which it is given up all the same, far beyond what so many parts take."""


def solve(problem: Problem, limits: SolverLimits) -> Solution:
    """Minimize bytes and repeated work within limits."""
    start = time.perf_counter()
    model = _Model(problem)
    model.build(limits)
    result = model.minimize(limits)
    taken = time.perf_counter() - start
    if result.x is None:
        return Solution(chosen=None, is_proven=False, seconds=taken, message=str(result.message))
    chosen = tuple(int(np.argmax(result.x[list(columns)])) for columns in model.choice)
    return Solution(chosen=chosen, is_proven=result.status == 0, seconds=taken, message=str(result.message))


class _Model:
    """Columns and rows under construction."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: list[float] = []
        self.sent: list[float] = []
        self.choice: list[range] = []
        self.shares: dict[Edge, dict[tuple[Placement, Placement], int]] = {}
        self.rows: list[tuple[list[int], list[float], float, float]] = []

    def build(self, limits: SolverLimits) -> None:
        problem = self.problem
        memory: list[float] = []
        for options, work, sent, held in zip(
            problem.options, problem.work, problem.exchanged, problem.memory, strict=True
        ):
            first = len(self.costs)
            self.choice.append(range(first, first + len(options)))
            for cost, size in zip(work, sent, strict=True):
                self._column(cost + size, size)
            memory += held
            self._row(list(self.choice[-1]), [1.0] * len(options), 1.0, 1.0)
        self.num_binary = len(self.costs)
        for producer, output, size in problem.whole:
            self._whole(producer, output, size)
        for sharing in problem.sharings:
            for edge in sharing.edges:
                if edge not in self.shares:
                    self._edge(edge)
        for sharing in problem.sharings:
            self._pay(sharing)
        self._limit(memory, limits.memory_bytes)
        self._limit(self.sent, limits.num_bytes * (1 + 1e-9))

    def _limit(self, amounts: Sequence[float], limit: float) -> None:
        if limit < np.inf:
            columns = [i for i, size in enumerate(amounts) if size]
            unit = max(limit, 1.0)
            self._row(columns, [amounts[i] / unit for i in columns], -np.inf, limit / unit)

    def minimize(self, limits: SolverLimits) -> Any:
        """HiGHS' result: first the relaxation, which rules out most columns, then the program itself."""
        matrix, low, high = self._matrix()
        scale = _LARGEST_COST / max(*self.costs, 1e-9)
        costs = np.array(self.costs) * scale
        equal = low == high
        relaxed = scipy.optimize.linprog(
            costs, matrix[~equal], high[~equal], matrix[equal], high[equal], (0, 1), method="highs"
        )
        if relaxed.x is None:
            return relaxed
        upper = np.ones(len(costs))
        upper[relaxed.fun + relaxed.lower.marginals > limits.total * scale * _SLACK] = 0
        integrality = np.zeros(len(costs))
        integrality[: self.num_binary] = 1
        return scipy.optimize.milp(
            c=costs,
            constraints=scipy.optimize.LinearConstraint(matrix, low, high),
            integrality=integrality,
            bounds=scipy.optimize.Bounds(0, upper),
            options={"node_limit": limits.nodes, "time_limit": limits.seconds, "mip_rel_gap": 1e-6},
        )

    def _matrix(self) -> tuple[Any, Any, Any]:
        data, row_index, column_index, low, high = [], [], [], [], []
        for number, (columns, values, lower, upper) in enumerate(self.rows):
            data += values
            column_index += columns
            row_index += [number] * len(columns)
            low.append(lower)
            high.append(upper)
        shape = (len(self.rows), len(self.costs))
        return (
            scipy.sparse.csr_array((data, (row_index, column_index)), shape=shape),
            np.array(low),
            np.array(high),
        )

    def _column(self, cost: float, sent: float = 0.0) -> int:
        self.costs.append(cost)
        self.sent.append(sent)
        return len(self.costs) - 1

    def _row(self, columns: list[int], values: list[float], low: float, high: float) -> None:
        self.rows.append((columns, values, low, high))

    def _edge(self, edge: Edge) -> None:
        """Shares of an edge by (placement that is there, placement that is wanted)."""
        given = self._columns_by(
            self.choice[edge.producer], [s.outputs[edge.output] for s in self.problem.options[edge.producer]]
        )
        count = len(self.problem.options[edge.consumer])
        wanted = self._columns_by(
            self.choice[edge.consumer], [self.problem.wanted(edge, option) for option in range(count)]
        )
        shares: dict[tuple[Placement, Placement], int] = {}
        for have in given:
            for want in wanted:
                near = have == want or want == R or edge not in self.problem.passed_on
                if near and conversion_bytes(have, want, self.problem.flow.axis.size) != np.inf:
                    shares[(have, want)] = self._column(0.0)
        for have, columns in given.items():
            own = [share for (a, _), share in shares.items() if a == have]
            self._row(own + columns, [1.0] * len(own) + [-1.0] * len(columns), 0.0, 0.0)
        for want, columns in wanted.items():
            own = [share for (_, b), share in shares.items() if b == want]
            self._row(own + columns, [1.0] * len(own) + [-1.0] * len(columns), 0.0, 0.0)
        self.shares[edge] = shares

    def _columns_by(
        self, columns: Sequence[int], placements: Sequence[Placement]
    ) -> dict[Placement, list[int]]:
        found: dict[Placement, list[int]] = {}
        for column, placement in zip(columns, placements, strict=True):
            found.setdefault(placement, []).append(column)
        return found

    def _pay(self, sharing: Sharing) -> None:
        readers: dict[tuple[Placement, Placement], list[int]] = {}
        for edge in sharing.edges:
            for pair, share in self.shares[edge].items():
                if isinstance(pair[0], Replicate) and sharing.kind is Shard and pair[1] != R:
                    self.costs[share] += PER_SHARD * sharing.num_bytes
                elif isinstance(pair[0], sharing.kind) and pair[0] != pair[1]:
                    readers.setdefault(pair, []).append(share)
        for (have, want), shares in readers.items():
            cost = conversion_bytes(have, want, self.problem.flow.axis.size) * sharing.num_bytes
            if len(shares) == 1:
                self.costs[shares[0]] += cost
                self.sent[shares[0]] += cost
                continue
            once = self._column(cost, cost)
            for share in shares:
                self._row([share, once], [1.0, -1.0], -np.inf, 0.0)

    def _whole(self, producer: int, output: int, num_bytes: float) -> None:
        for column, option in zip(self.choice[producer], self.problem.options[producer], strict=True):
            sent = conversion_bytes(option.outputs[output], R, self.problem.flow.axis.size) * num_bytes
            self.costs[column] += sent
            self.sent[column] += sent
