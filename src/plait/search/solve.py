"""The choice that communicates least, found exactly: a mixed-integer program for HiGHS.

In: a `Problem`, a memory limit, a time limit. Out: one option per class with its proof state, or the reason why there is
none. One binary variable per option; per edge and pair of placements a share whose marginals are those of its two ends
(the linearization of Alpa, OSDI 2022, section 4.2, which keeps the relaxation tight); a conversion that several readers
share is as large as the largest of their shares.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from plait.program.placement import Placement, R, Replicate
from plait.search.cost import PER_PIECE, conversion_bytes
from plait.search.problem import Edge, Problem

_LARGEST_COST = 1e4
"""What the largest coefficient is scaled to: the solver's tolerances are absolute."""


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


def solve(problem: Problem, *, memory_limit: float, byte_limit: float, seconds: float) -> Solution:
    """Minimize bytes and repeated work within a memory limit and without more bytes than `byte_limit`."""
    start = time.perf_counter()
    model = _Model(problem)
    model.build(memory_limit, byte_limit)
    left = max(seconds - (time.perf_counter() - start), 1.0)
    result = model.minimize(left)
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

    def build(self, memory_limit: float, byte_limit: float) -> None:
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
            self._pay(sharing.edges, sharing.num_bytes)
        scale = max(memory_limit, 1.0)
        held_columns = [i for i, size in enumerate(memory) if size]
        self._row(held_columns, [memory[i] / scale for i in held_columns], -np.inf, memory_limit / scale)
        unit = max(byte_limit, 1.0)
        senders = [i for i, size in enumerate(self.sent) if size]
        self._row(senders, [self.sent[i] / unit for i in senders], -np.inf, byte_limit / unit * (1 + 1e-9))

    def minimize(self, seconds: float) -> object:
        data, row_index, column_index, low, high = [], [], [], [], []
        for number, (columns, values, lower, upper) in enumerate(self.rows):
            data += values
            column_index += columns
            row_index += [number] * len(columns)
            low.append(lower)
            high.append(upper)
        matrix = sparse.csr_array((data, (row_index, column_index)), shape=(len(self.rows), len(self.costs)))
        integrality = np.zeros(len(self.costs))
        integrality[: self.num_binary] = 1
        return milp(
            c=np.array(self.costs) * (_LARGEST_COST / max(*self.costs, 1e-9)),
            constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
            integrality=integrality,
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
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
                if conversion_bytes(have, want, self.problem.flow.axis.size) != np.inf:
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

    def _pay(self, edges: Sequence[Edge], num_bytes: float) -> None:
        readers: dict[tuple[Placement, Placement], list[int]] = {}
        for edge in edges:
            for pair, share in self.shares[edge].items():
                readers.setdefault(pair, []).append(share)
        for (have, want), shares in readers.items():
            if have == want:
                continue
            sent = conversion_bytes(have, want, self.problem.flow.axis.size) * num_bytes
            cost = sent or PER_PIECE * num_bytes
            if isinstance(have, Replicate) or len(shares) == 1:
                for share in shares:
                    self.costs[share] += cost
                    self.sent[share] += sent
                continue
            once = self._column(cost, sent)
            for share in shares:
                self._row([share, once], [1.0, -1.0], -np.inf, 0.0)

    def _whole(self, producer: int, output: int, num_bytes: float) -> None:
        for column, option in zip(self.choice[producer], self.problem.options[producer], strict=True):
            sent = conversion_bytes(option.outputs[output], R, self.problem.flow.axis.size) * num_bytes
            self.costs[column] += sent
            self.sent[column] += sent
