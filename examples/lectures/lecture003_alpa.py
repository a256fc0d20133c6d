"""Alpa's choice, lecture 003: a cluster with fast links within hosts and slow ones between; which axis goes where.

python -m examples.lectures.lecture003_alpa
"""

from dataclasses import replace

from examples.lectures.exhibit import Exhibit, Number, Table, show

import plait
from plait.cluster.parse import parse_cluster

MODEL, BATCH = "gpt:layers=24,hidden=4096,heads=32,seq=1024", 64
SLOW, FAST = 1.25e9, 150e9
"""Bytes a second between hosts: 10 Gbit/s, and as fast as within a host."""


def best(between: float) -> plait.Choice:
    """Two hosts of four A100 with NVLink each."""
    cluster = parse_cluster("2x4xA100-40")
    cluster = replace(cluster, between=replace(cluster.between, bandwidth=between))
    return plait.choose(model=MODEL, cluster=cluster, batch=BATCH, search=plait.Search(seconds=15.0, top=5))


def _mesh(plan: plait.Plan) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in plan.mesh.axes if size > 1) + (
        f", zero{plan.memory.zero}" if plan.memory.zero else ""
    )


def exhibit() -> Exhibit:
    slow, fast = best(SLOW), best(FAST)
    rows = []
    for name, choice in (("10 Gbit/s", slow), ("as within a host", fast)):
        for made in choice.ranking.predictions[:4]:
            rows.append([name, _mesh(made.plan), f"{made.step_s:.2f} s", f"{made.utilization:.0%}"])
    return Exhibit(
        lecture="003",
        title="Alpa's choice on two hosts",
        idea="A cluster has fast connections within hosts and slow ones between. Intra-operator "
        "parallelism communicates much, so it belongs on fast links; inter-operator parallelism sends "
        "little and may cross the slow ones. Alpa finds such plans by search; plait's search does so by "
        "cost.",
        numbers=[
            Number(what="best plan, slow link between hosts", ours=_mesh(slow.plan)),
            Number(what="best plan, fast link between hosts", ours=_mesh(fast.plan)),
            Number(what="step on the slow link, to the fast", ours=slow.best.step_s / fast.best.step_s),
        ],
        tables=[
            Table(
                title="The first four plans on 2 hosts of 4 A100, 5 billion parameters",
                columns=["between hosts", "plan", "step", "of peak"],
                rows=rows,
            )
        ],
        texts={"Why the first beats the second, slow link": "\n".join(slow.why)},
        seen="The axes stand from outer to inner: what stands last lies within a host. On the slow link "
        "what crosses hosts is what sends least.",
    )


if __name__ == "__main__":
    show(exhibit())
