"""Tasks of one run compile on their own: nothing of a program depends on the process that made it, or on its load."""

import subprocess
import sys
from typing import Any

import pytest
import scipy
from tests.ranks.hosts.hosts import ROOT, environment
from tests.unit.program.compiled import graph_of

from plait.plan.named import resolve
from plait.search.place.resolve import resolve_placements

MAKE = """
import hashlib
import torch
from tests import zoo
from plait.plan.named import resolve
from plait.run.prepare.prepare import prepare

torch.set_num_threads(1)
CASES = (
    ("gpt_dropout", "zero3", {"data": 2}), ("gpt_dropout", "1f1b", {"pipe": 2, "data": 2}),
    ("branching", "ddp", {"data": 2}), ("moe_dense", "megatron", {"tensor": 2}),
)
for name, plan, mesh in CASES:
    made = prepare(zoo.ZOO[name].job(), resolve(plan, mesh=mesh), "cpu", torch.float32, lambda event: None)
    program = made.full_step()
    parts = [(entry.everything, [s.source for s in entry.segments.values()]) for entry in program.classes]
    print(name, plan, program.digest(), hashlib.sha256(repr(parts).encode()).hexdigest())
"""


@pytest.mark.timeout(240)
def test_processes_with_other_hashes_and_addresses_make_one_program() -> None:
    """All of it, not only what ranks compare: order in sets of text, and of nodes, which hash by where they lie."""
    made = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE], env=environment(PYTHONHASHSEED=seed), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for seed in ("1", "271828")
    ]  # fmt: skip
    (one, complaint), (other, _) = (process.communicate(timeout=200) for process in made)
    assert len(one.splitlines()) == 4, complaint
    assert one == other


def test_a_search_for_placements_ends_with_what_it_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it ended by a clock, the tasks of a run on busy hosts would cut weights in different ways."""
    given: list[dict[str, Any]] = []
    minimize = scipy.optimize.milp

    def spy(*args: Any, **options: Any) -> Any:
        given.append(dict(options["options"]))
        return minimize(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", spy)
    found = resolve_placements(graph_of("mlp", 4), resolve("tensor", 2))[0]
    assert given and all(options.keys() == {"node_limit", "time_limit", "mip_rel_gap"} for options in given)
    assert all(
        options["time_limit"] >= options["node_limit"] for options in given
    )  # a second for each is far too long
    assert found.placements
