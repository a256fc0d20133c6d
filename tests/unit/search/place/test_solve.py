"""The exact choice: what it claims is what it costs, no other choice nearby costs less, and limits hold."""

from collections.abc import Sequence
from functools import cache
from math import inf

import pytest
from tests.unit.search.flows import along, flow_of, graph_of_layers, pattern_of
from torch import nn

from plait.program.place.placement import R, Shard
from plait.search.place.cost import Cost, flow_cost
from plait.search.place.problem import Problem, pose
from plait.search.place.solve import SolverLimits, solve

NODES = 300


@cache
def problem_of(name: str, ranks: int) -> Problem:
    return pose(flow_of(name, ranks), {}, {})


def cost_of_choice(problem: Problem, chosen: Sequence[int]) -> Cost:
    return flow_cost(problem.flow, problem.placements(chosen))


def limits_of(cost: Cost) -> SolverLimits:
    return SolverLimits(
        memory_bytes=cost.memory_bytes, num_bytes=cost.num_bytes, total=cost.total, nodes=NODES, seconds=60
    )


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_no_worse_than_the_pattern_in_its_memory(name: str) -> None:
    pattern = flow_cost(flow_of(name, 2), pattern_of(name, 2).placements)
    problem = problem_of(name, 2)
    solution = solve(problem, limits_of(pattern))
    assert solution.chosen is not None and solution.is_proven
    found = cost_of_choice(problem, solution.chosen)
    assert found.num_bytes <= pattern.num_bytes and found.total <= pattern.total
    assert found.memory_bytes <= pattern.memory_bytes * (1 + 1e-6)


def test_no_single_change_is_cheaper() -> None:
    """Among those that keep to the limits."""
    flow = along(graph_of_layers(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), width=16), 4)
    problem = pose(flow, {}, {})
    whole = cost_of_choice(problem, [_whole(problem, i) for i in range(len(problem.classes))])
    limits = SolverLimits(
        memory_bytes=0.5 * whole.memory_bytes, num_bytes=inf, total=inf, nodes=NODES, seconds=60
    )
    solution = solve(problem, limits)
    assert solution.chosen is not None and solution.is_proven
    best = cost_of_choice(problem, solution.chosen)
    assert best.memory_bytes <= limits.memory_bytes and best.num_bytes > 0
    for index, options in enumerate(problem.options):
        for option in range(len(options)):
            other = [*solution.chosen]
            other[index] = option
            cost = cost_of_choice(problem, other)
            assert cost.total >= best.total * (1 - 1e-5) or cost.memory_bytes > limits.memory_bytes


def test_with_memory_to_spare_and_free_work_nothing_is_sent() -> None:
    flow = along(graph_of_layers(nn.Linear(16, 16), width=16), 2)
    solution = solve(
        pose(flow, {}, {}), SolverLimits(memory_bytes=inf, num_bytes=0.0, total=inf, nodes=NODES, seconds=60)
    )
    assert solution.chosen is not None
    assert cost_of_choice(pose(flow, {}, {}), solution.chosen).collectives == {}


def test_a_limit_that_cannot_be_met_has_no_solution() -> None:
    solution = solve(
        problem_of("mlp", 2),
        SolverLimits(memory_bytes=100.0, num_bytes=inf, total=inf, nodes=NODES, seconds=60),
    )
    assert solution.chosen is None and not solution.is_proven


def test_what_is_fixed_is_not_chosen() -> None:
    flow = flow_of("mlp", 2)
    nodes = {name: node for node, name in flow.parameters.items()}
    strategy = pattern_of("mlp", 2).placements.strategies[flow.ops[0]]
    problem = pose(flow, {nodes["0.weight"]: Shard(1), nodes["2.weight"]: R}, {flow.ops[0]: strategy})
    by_key = {entry.key: options for entry, options in zip(problem.classes, problem.options, strict=True)}
    assert [str(option.outputs[0]) for option in by_key["0.weight"]] == ["S(1)"]
    assert [str(option.outputs[0]) for option in by_key["2.weight"]] == ["R"]
    assert problem.options[[entry.first for entry in problem.classes].index(flow.ops[0])] == [strategy]


def test_fused_parts_are_offered_along_the_way() -> None:
    """`S(0/3)` begins at the split of queries, keys and values, and reaches the weight through view, addmm and t."""
    problem = problem_of("gpt", 2)
    options = next(o for c, o in zip(problem.classes, problem.options, strict=True) if "qkv.weight" in c.key)
    assert Shard(0, 3) in {option.outputs[0] for option in options}


def _whole(problem: Problem, index: int) -> int:
    options = problem.options[index]
    return next(i for i, s in enumerate(options) if {*s.inputs, *s.outputs} <= {R})
