"""Round-robin process groups, lecture 001: collectives spread over 1, 3 and 5 groups on a slow link.

python -m examples.lectures.lecture001_round_robin
"""

import statistics
from typing import Any

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.lecture001_bucket_sizes import job
from examples.lectures.runs import trained

import plait

NETWORKS = ("bandwidth=1Gbit,latency=5ms,hosts=2x1", "bandwidth=200Mbit,latency=1ms,hosts=2x1")
"""One whose latency decides, one whose bandwidth does."""
GROUPS = (1, 3, 5)


def settings(groups: int) -> dict[str, Any]:
    """Small buckets, and a ring that makes one collective of a group after the other; without one, none waits."""
    return {"sync": {"bucket_mib": 0.25}, "links": {"groups": groups, "algorithm": "ring"}}


def measured(groups: int, network: str) -> float:
    with trained(
        job(),
        "ddp",
        2,
        changes=plait.Changes(settings=settings(groups)),
        saving=plait.Saving(trace=False),
        trial=plait.Trial(emulate=network),
    ) as result:
        return statistics.median(line["step_s"] for line in result.history[2:] if "step_s" in line)


def exhibit() -> Exhibit:
    found = {network: [measured(groups, network) for groups in GROUPS] for network in NETWORKS}
    latency, bandwidth = (found[network] for network in NETWORKS)
    return Exhibit(
        lecture="001",
        title="Round-robin process groups",
        idea="Collectives of one group run one after the other. PyTorch's round-robin groups hand "
        "buckets to several groups in turn, so that one bucket's latency passes while another is sent; "
        "on hosts with several kinds of links each group may use another.",
        numbers=[
            Number(what="speed of 3 groups to 1 where latency decides", ours=latency[0] / latency[1]),
            Number(what="speed of 5 groups to 1, the same", ours=latency[0] / latency[2]),
            Number(what="speed of 3 groups to 1 where bandwidth decides", ours=bandwidth[0] / bandwidth[1]),
            Number(what="speed of 5 groups to 1, the same", ours=bandwidth[0] / bandwidth[2]),
        ],
        tables=[
            Table(
                title="Step of 24 layers, buckets of 0.25 MiB summed by a ring, two processes",
                columns=["network", *(f"{groups} groups" for groups in GROUPS)],
                rows=[[network, *(f"{1e3 * s:.0f} ms" for s in times)] for network, times in found.items()],
            )
        ],
        seen="Several groups pay where many small messages wait for each other's latency. Where the wire "
        "is full there is little to win, the latency alone: the bytes are the same. plait's default needs no "
        "groups for this: all of its buckets are under way at once.",
    )


if __name__ == "__main__":
    show(exhibit())
