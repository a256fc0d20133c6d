"""`memory.offload=auto`: nothing where that fits, else the cheapest of the least that fits of each kind."""

import pytest

from plait.plan.named import resolve
from plait.plan.offload import offload_shares
from plait.plan.plan import Plan
from plait.search.choose.candidates import cheapest_offload

SIZES = {"optimizer": 8.0, "gradients": 12.0, "activations": 6.0, "parameters": 4.0}
"""What each kind takes off the device; the host's updates take gradients and state."""


def chosen(
    room: float, *, bus_s: float, host_s: float, plan: str = "single", ranks: int = 1
) -> tuple[Plan, list[Plan]]:
    """What is taken where a step needs 30, and all that was tried."""
    tried: list[Plan] = []

    def look(trial: Plan) -> Plan:
        tried.append(trial)
        return trial

    def fits(trial: Plan) -> bool:
        shares = offload_shares(trial.memory.offload)
        streamed = max(0.0, shares.get("optimizer", 0.0) - shares.get("gradients", 0.0))
        off = streamed * SIZES["optimizer"]
        return 30 - off - sum(SIZES[kind] * s for kind, s in shares.items() if kind != "optimizer") <= room

    def cost(trial: Plan) -> float:
        shares = offload_shares(trial.memory.offload)
        return bus_s * (
            shares.get("optimizer", 0.0) + 2 * shares.get("activations", 0.0)
        ) + host_s * shares.get("gradients", 0.0)

    found = cheapest_offload(resolve(plan, ranks, {"memory": {"offload": "auto"}}), look, fits, cost)
    return found, tried


def test_what_fits_stays() -> None:
    found, tried = chosen(30, bus_s=1, host_s=1)
    assert found.memory.offload == "none" and len(tried) == 1


@pytest.mark.parametrize(
    ("bus_s", "host_s", "wanted"),
    [(1, 9, ("optimizer:0.5",)), (9, 1, ("gradients:0.5",))],
    ids=["bus", "host"],
)
def test_the_cheapest_of_the_least(bus_s: float, host_s: float, wanted: tuple[str, ...]) -> None:
    found, tried = chosen(26, bus_s=bus_s, host_s=host_s)
    assert found.memory.offload == wanted
    assert not any("parameters" in trial.memory.offload for trial in tried)


def test_more_is_tried_where_less_does_not_fit() -> None:
    assert "activations" in chosen(13, bus_s=1, host_s=1)[0].memory.offload
    assert "parameters" in chosen(9, bus_s=1, host_s=1)[0].memory.offload


def test_where_nothing_fits_the_most_is_told() -> None:
    found, tried = chosen(1, bus_s=1, host_s=1)
    assert found is tried[-1] and "parameters" in found.memory.offload


def test_parameters_stay_where_all_ranks_compute_with_all_of_them() -> None:
    _, tried = chosen(1, bus_s=1, host_s=1, plan="zero2", ranks=2)
    assert not any("parameters" in trial.memory.offload for trial in tried)
