"""How the workers of a plan agree on weights: what everything else needs to know of a rule, as data.

In: the decisions of a plan. Out: an `Agreement`. A rule is an entry of `AGREEMENTS`: whether its workers meet within a
step, where weights are, who takes which share of a step, and when and how weights are mixed. Compiler, simulator,
loop and reports read these and never the rule's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from plait.plan.decisions import Average, Elastic, Sync

Weights = Literal["own", "server", "center", "shared"]
Due = Callable[[int, bool], tuple[int, ...]]
"""(step, whether it ends an epoch) -> the fragments of the model that are mixed after it."""


def _never(step: int, ends_epoch: bool) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What a rule means for a run."""

    alone: bool = False
    """Whether workers do not meet within a step: each one's share of the batch is a step of its own."""
    weights: Weights = "own"
    """Where they are: `own`: on every worker, who march in step; `server`: on servers, who update them; `center`: on
    every worker, drawn to a center that one more rank has; `shared`: in memory that all workers write to."""
    threads: bool = False
    """Whether workers are threads of one process, and the first alone holds what is trained: before every step it gives
    its weights to the others, after it the gradients of all meet there."""
    takes_next: bool = False
    """Whether a worker takes whatever share is next, and not its own share of every step."""
    order: Literal["step", "arrival", "turn"] = "arrival"
    """Of servers and centers: whether updates are one a step of all workers, one a message as they come, or in turn."""
    mix: Literal["mean", "outer", "elastic"] | None = None
    """How the weights of others are mixed in now and then; None: they are not."""
    due: Due = _never
    """What is mixed when; it depends on the number of the step alone."""
    fragments: int = 1
    """Parts of the model that are mixed apart."""
    round: int | None = 1
    """Steps after which all ranks have met at least once, whatever step it is; None: they meet once an epoch."""
    warmup: int = 0
    """Steps at the start that are mixed in another way than later ones."""
    needs_order: bool = False
    """Whether what several workers compute depends on which of them comes first."""
    mended: str = ""
    """How a person makes that not so, beside using one worker."""

    @property
    def marches(self) -> bool:
        """Whether all workers are at the same step, and none can be missed."""
        return self.weights == "own"

    @property
    def sums(self) -> bool:
        """Whether all workers take one step of the sum of their gradients: any of them may hold a part of the model."""
        return self.marches and self.mix is None

    @property
    def averages(self) -> bool:
        """Whether workers mix in each other's weights all at once."""
        return self.mix is not None and self.marches

    @property
    def keeps_center(self) -> bool:
        """Whether every worker keeps the same center beside its own weights."""
        return self.averages and self.mix != "mean"

    @property
    def is_late(self) -> bool:
        """Whether a server divides by the weight of a step, which no worker knows."""
        return self.weights == "server" and self.order == "step" and self.alone

    @property
    def mingles(self) -> bool:
        """Whether weights hold shares of several steps at once: to save whole steps, workers wait for each other."""
        return not self.marches and (self.weights == "shared" or self.order != "step")

    @property
    def least_servers(self) -> int:
        """Ranks beside the workers that it takes at least."""
        return 1 if self.weights in ("server", "center") else 0

    @property
    def most_servers(self) -> int | None:
        """Ranks beside the workers that it takes at most; None: any number."""
        return {"server": None, "center": 1}.get(self.weights, 0)


def every(steps: int | Literal["epoch"], fragments: int = 1, warmup: int = 0) -> Due:
    """Each fragment once in so many steps, at its own place among them; all of them in each step of the warm-up."""
    everything = tuple(range(fragments))

    def due(step: int, ends_epoch: bool) -> tuple[int, ...]:
        if step < warmup:
            return everything
        if steps == "epoch":
            return everything if ends_epoch else ()
        return tuple(k for k in everything if (step + 1) % steps == ((k + 1) * steps // fragments) % steps)

    return due


def _all_reduce(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement()


def _threads(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(threads=True)


def _server_sync(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(weights="server", order="step")


def _server_async(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(alone=True, weights="server", takes_next=True, needs_order=True)


def _server_stale(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(
        alone=True,
        weights="server",
        order="step",
        round=sync.staleness + 1,
        needs_order=sync.staleness > 0,
        mended="sync.staleness=0",
    )


def _hogwild(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return Agreement(alone=True, weights="shared", takes_next=True, needs_order=True)


def _easgd(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    free = elastic.variant == "async"
    return Agreement(
        alone=True,
        weights="own" if elastic.variant == "sync" else "center",
        takes_next=free,
        order="arrival" if free else "turn",
        mix="elastic",
        due=every(elastic.tau),
        round=elastic.tau,
        needs_order=free,
        mended="elastic.variant=round-robin, or =sync",
    )


def _averaged(mix: Literal["mean", "outer"], average: Average, warmup: int) -> Agreement:
    return Agreement(
        alone=True,
        mix=mix,
        due=every(average.every, average.fragments, warmup),
        fragments=average.fragments,
        round=None if average.every == "epoch" else average.every,
        warmup=warmup,
    )


def _local_sgd(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return _averaged("mean", average, average.warmup)


def _diloco(sync: Sync, elastic: Elastic, average: Average) -> Agreement:
    return _averaged("outer", average, 0)


AGREEMENTS: Mapping[str, Callable[[Sync, Elastic, Average], Agreement]] = MappingProxyType(
    {
        "all-reduce": _all_reduce,
        "threads": _threads,
        "server-sync": _server_sync,
        "server-async": _server_async,
        "server-stale": _server_stale,
        "hogwild": _hogwild,
        "easgd": _easgd,
        "local-sgd": _local_sgd,
        "diloco": _diloco,
    }
)
"""By the name of a rule, as `sync.rule` has it."""
