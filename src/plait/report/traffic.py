"""What ranks exchanged over a run: bytes, updates, and how old the weights were on which gradients were computed.

In: the totals and the metrics of a run. Out: a `Traffic`, its rows for a terminal and its section of the page. It never
fails on totals that are incomplete.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box
from rich.table import Table

from plait.report.charts import stacked_bar
from plait.report.record import RunRecord
from plait.units import format_bytes

_BAR = 40
"""Characters of the longest bar of the histogram."""


_AGES = 1000
"""Ages of weights that are all listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a run's ranks exchanged; `None` where its files do not say."""

    num_updates: int | None
    """Steps of any optimizer: of workers on their own, those of all."""
    updates_per_s: float | None
    """Over the time of all steps."""
    bytes_per_step: float | None
    """That a worker sends in a step, on average; of several, the one that sends most. A sum counts once."""
    server_bytes_per_step: float | None
    """That all servers send in a step, on average."""
    gradient_bytes: int | None
    """Of one step's gradients as they are: what plan ddp sends."""
    staleness: Mapping[int, int]
    """How often weights were so many updates old."""
    shares_by_worker: Mapping[int, int]
    """Shares of steps that each worker has taken, where they take what is next."""

    @property
    def mean_staleness(self) -> float | None:
        """Updates that weights lacked, on average."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "num_updates": self.num_updates,
            "updates_per_s": self.updates_per_s,
            "bytes_per_step": self.bytes_per_step,
            "server_bytes_per_step": self.server_bytes_per_step,
            "gradient_bytes": self.gradient_bytes,
            "mean_staleness": self.mean_staleness,
            "staleness": dict(self.staleness),
            "shares_by_worker": dict(self.shares_by_worker),
        }


def traffic_of(record: RunRecord) -> Traffic:
    """Sum up what a run's ranks exchanged."""
    totals = record.totals
    steps, workers = totals.get("steps"), totals.get("workers") or 0
    updates = totals.get("updates")
    lines = record.metrics[-steps:] if steps else ()
    wall_s = sum(line.get("step_s") or 0.0 for line in lines)
    sent = totals.get("bytes_sent") or {}
    of_workers = [count for rank, count in sent.items() if rank < workers]
    of_servers = [count for rank, count in sent.items() if rank >= workers]
    return Traffic(
        num_updates=updates,
        updates_per_s=updates / wall_s if updates is not None and wall_s > 0 else None,
        bytes_per_step=max(of_workers) / steps if of_workers and steps else None,
        server_bytes_per_step=sum(of_servers) / steps if of_servers and steps else None,
        gradient_bytes=totals.get("gradient_bytes") or None,
        staleness=totals.get("staleness") or {},
        shares_by_worker=totals.get("shares_by_worker") or {},
    )


def traffic_rows(traffic: Traffic) -> list[tuple[str, str]]:
    """What a person reads, as (name, value)."""
    rows = []
    if traffic.num_updates is not None:
        rate = "" if traffic.updates_per_s is None else f" ({traffic.updates_per_s:,.4g} a second)"
        rows.append(("updates", f"{traffic.num_updates:,}{rate}"))
    if traffic.bytes_per_step:
        whole = traffic.gradient_bytes
        of = f" for gradients of {format_bytes(whole)}" if whole else ""
        rows.append(("sent", f"{format_bytes(traffic.bytes_per_step)} a step and worker{of}"))
    if traffic.server_bytes_per_step:
        rows.append(("servers sent", f"{format_bytes(traffic.server_bytes_per_step)} a step"))
    if traffic.mean_staleness is not None:
        worst = max(traffic.staleness)
        rows.append(("staleness", f"mean {traffic.mean_staleness:.3g}, at most {worst} updates"))
    if len(traffic.shares_by_worker) > 1:
        taken = ", ".join(f"{count:,} by {rank}" for rank, count in sorted(traffic.shares_by_worker.items()))
        rows.append(("shares taken", taken))
    return rows


def staleness_table(traffic: Traffic) -> Table:
    """The histogram, with bars."""
    table = Table(title="Staleness: updates that weights lacked", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("updates", "times", "share"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for age, count, share in _histogram(traffic):
        table.add_row(str(age), f"{count:,}", f"{share:.1%}", "█" * round(_BAR * share))
    return table


def traffic_section(traffic: Traffic) -> str:
    """The page's part on what ranks exchanged; nothing where a run had one rank."""
    rows = traffic_rows(traffic)
    if not (traffic.staleness or traffic.bytes_per_step or len(traffic.shares_by_worker) > 1):
        return ""
    facts = "".join(f"<tr><th scope='row'>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in rows)
    counted = _histogram(traffic)
    longest = max((share for *_, share in counted), default=0.0)
    bars = "".join(
        f"<tr><th scope='row'>{age}</th><td>{count:,}</td><td>{share:.1%}</td><td>{_bar(age, share, longest)}</td></tr>"
        for age, count, share in counted
    )
    histogram = (
        "<h3>Staleness <span class='unit'>updates that weights lacked</span></h3><div class='scroll'><table>"
        "<thead><tr><th scope='col'>Updates</th><th scope='col'>Times</th><th scope='col'>Share</th>"
        f"<th></th></tr></thead><tbody>{bars}</tbody></table></div>"
        if bars
        else ""
    )
    return (
        "<section><h2>What ranks exchanged</h2><div class='scroll'><table>"
        f"<tbody>{facts}</tbody></table></div>{histogram}</section>"
    )


def _bar(age: int, share: float, longest: float) -> str:
    text = f"{share:.1%} of the times {age} updates old"
    return (
        stacked_bar(text, [("kind-communication", text, share)], whole=share, longest=longest)
        if share
        else ""
    )


def _histogram(traffic: Traffic) -> list[tuple[int, int, float]]:
    """(staleness, times, share), every value up to the largest; of very old ones only those that there were."""
    total = sum(traffic.staleness.values())
    if not total:
        return []
    oldest = max(traffic.staleness)
    ages = range(oldest + 1) if oldest < _AGES else sorted(traffic.staleness)
    return [(age, traffic.staleness.get(age, 0), traffic.staleness.get(age, 0) / total) for age in ages]
