"""What is run: one small job under every plan."""

import os
import time
from dataclasses import dataclass, replace
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import plait
from plait.plan.named import NAMED, resolve
from plait.plan.plan import DATA, DOMAIN, Plan

STEPS, BATCH, SAVE_EVERY, EVALUATE_EVERY = 24, 8, 5, 9
Engine = Literal["torchrun", "mpirun", "srun"]
HANG_S = 5.0
"""`--hang-s` of all runs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run."""

    plan: str
    ranks: int | None = None
    mesh: dict[str, int] | None = None
    sockets: bool = False
    """Whether ranks speak over sockets alone, as they do between hosts."""
    offload: tuple[str, ...] = ()
    """What is kept on the host."""
    engine: Engine | None = None
    """What starts its tasks, on hosts that are parts of this machine; None: plait itself, here."""
    tasks: int = 2
    """Which an engine starts."""
    exact: bool = True
    """Whether a resumed run has the losses of an undisturbed one, bit for bit."""

    @property
    def name(self) -> str:
        axes = "x".join(f"{axis[0]}{size}" for axis, size in self.mesh.items()) if self.mesh else ""
        parts = (
            self.plan,
            axes if len(self.mesh or ()) > 1 else "",
            "sockets" if self.sockets else "",
            "offload" if self.offload else "",
            self.engine or "",
        )
        return "-".join(part for part in parts if part)

    def resolved(self) -> Plan:
        """The plan itself."""
        settings = {"memory": {"offload": list(self.offload)}} if self.offload else None
        plan = resolve(self.plan, self.ranks, settings, self.mesh)
        return replace(plan, links=replace(plan.links, transport="sockets")) if self.sockets else plan

    @property
    def has_replicas(self) -> bool:
        """Whether every rank holds all weights and updates them: what a flipped bit is held against."""
        plan = self.resolved()
        return (
            plan.agreement.sums
            and not plan.agreement.threads
            and plan.memory.zero == 0
            and plan.mesh.size > 1
            and {axis for axis, _ in plan.mesh.axes} <= {DATA, DOMAIN}
        )

    @property
    def is_free(self) -> bool:
        """Whether the others go on where a worker dies, and the shares that it held are lost."""
        agreement = self.resolved().agreement
        return agreement.alone and not agreement.marches


CASES = (
    Case(plan="single", ranks=1),
    Case(plan="threads", ranks=2),
    Case(plan="ddp", ranks=2),
    Case(plan="ddp", ranks=2, sockets=True),
    Case(plan="ddp", ranks=2, offload=("optimizer",)),
    Case(plan="zero1", ranks=2),
    Case(plan="zero2", ranks=2),
    Case(plan="zero3", ranks=2),
    Case(plan="zero3", ranks=2, sockets=True),
    Case(plan="zero3", ranks=2, offload=("optimizer", "parameters", "activations")),
    Case(plan="local-sgd", ranks=2),
    Case(plan="diloco", ranks=2),
    Case(plan="megatron", mesh={"tensor": 2}),
    Case(plan="megatron", mesh={"data": 2, "tensor": 2}),
    Case(plan="tensor", ranks=2),
    Case(plan="domain", mesh={"domain": 2}),
    Case(plan="naive", mesh={"pipe": 2}),
    Case(plan="gpipe", mesh={"pipe": 2}),
    Case(plan="1f1b", mesh={"pipe": 2}),
    Case(plan="1f1b", mesh={"pipe": 2}, sockets=True),
    Case(plan="1f1b", mesh={"pipe": 2}, offload=("optimizer:0.5", "activations")),
    Case(plan="1f1b", mesh={"data": 2, "pipe": 2}),
    Case(plan="interleaved", mesh={"pipe": 2}),
    Case(plan="zero-bubble", mesh={"pipe": 2}),
    Case(plan="zero-bubble-2", mesh={"pipe": 2}),
    Case(plan="pipedream", mesh={"pipe": 2}),
    Case(plan="server-sync", ranks=3),
    Case(plan="server-stale", ranks=3, exact=False),
    Case(plan="server-async", ranks=3, exact=False),
    Case(plan="easgd", ranks=3, exact=False),
    Case(plan="hogwild", ranks=2, exact=False),
    Case(plan="ddp", ranks=2, engine="torchrun"),
    Case(plan="zero3", ranks=2, engine="torchrun"),
    Case(plan="local-sgd", ranks=2, engine="torchrun"),
    Case(plan="ddp", ranks=2, engine="mpirun"),
    Case(plan="1f1b", mesh={"pipe": 2}, engine="mpirun"),
    Case(plan="server-async", ranks=3, engine="mpirun", tasks=3, exact=False),
    Case(plan="ddp", ranks=2, engine="srun"),
    Case(plan="megatron", mesh={"data": 2, "tensor": 2}, engine="srun"),
    Case(plan="easgd", ranks=3, engine="srun", tasks=3, exact=False),
)
assert {case.plan for case in CASES} == set(NAMED), "a plan has no case"


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Takes a little time, so that there are moments to hit."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(STEPS * BATCH, 4, 16, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return self._inputs[index], self._inputs[index, 0, :4].argmax()


class Model(nn.Module):
    """A few layers, over positions that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(inputs))))
        found: Tensor = self.last(hidden.mean(1))
        return found


def job() -> plait.Job:
    """The job of all runs."""
    return plait.Job(
        model=Model, data=Samples, loss=nn.CrossEntropyLoss(), batch=BATCH, epochs=1, evaluate=lambda: Samples(),
        evaluate_every=EVALUATE_EVERY, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )  # fmt: skip
