"""What lies between workers and servers at once is bounded, however slow the servers are."""

from collections.abc import Iterator

import pytest
import torch
from tests.unit.run.training import case_job

from plait.plan.named import resolve
from plait.run.interpret.machine import Machine
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks, _loaded

STEPS = 12
WORKERS = 3


def steps_of(ranks: SerialRanks, machine: Machine) -> Iterator[None]:
    """All steps of one worker, who waits for nobody but the servers."""
    for step in range(STEPS):
        loaded = _loaded(ranks.job, ranks.programs.plan, step, 96, ranks.programs)
        assert loaded is not None
        shares = ranks.programs.own_shares(loaded[machine.rank].micro_batches)
        yield from machine.execute(ranks.programs.for_step(shares), step, shares)


@pytest.mark.parametrize(("plan", "sync"), [("server-stale", {"staleness": 2}), ("server-async", {})])
def test_no_worker_gets_further_ahead_of_a_slow_server_than_it_may(plan: str, sync: dict[str, int]) -> None:
    """Servers have a turn only when no worker can move. A step begins with weights, which a server gives after it has
    taken what the worker sent before: so at most one step of every worker lies between them."""
    job = case_job("mlp", torch.float32, steps=STEPS, batch=6, num_samples=96)
    chosen = resolve(plan, WORKERS + 1, {"sync": sync})
    ranks = SerialRanks(job, prepare(job, chosen, "cpu", torch.float32, lambda event: None), torch.float32)
    running = {machine.rank: steps_of(ranks, machine) for machine in ranks.machines}
    pushed = ranks.programs.full_step().gradient_bytes
    most = 0.0
    with torch.no_grad():
        while running:
            for rank, turns in list(running.items()):
                if next(turns, "ended") == "ended":
                    del running[rank]
            letters = ranks.boxes.letters.items()
            waiting = sum(
                letter.numel() for (_, to, _), queue in letters for letter in queue if to >= WORKERS
            )
            most = max(most, waiting / pushed)
            ranks.turn()
    assert WORKERS <= most < 1.5 * WORKERS  # and what is beside gradients
