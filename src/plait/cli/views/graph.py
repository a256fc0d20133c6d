"""What one training step computes and costs, for a console and as plain values.

In: a graph and its summary. Out: tables, and a mapping. It decides nothing.
"""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plait.graph.graph import Graph
from plait.graph.show.summary import Summary
from plait.units import format_bytes, format_count, format_flops

NUM_MODULES = 12
"""How many of the costliest modules the table shows."""
NUM_NAMES = 8
"""How many names a line lists before it counts the rest."""


def summary_values(summary: Summary) -> dict[str, Any]:
    """The totals of a summary as plain values; what the ops say one by one is not repeated."""
    return {
        "num_parameters": summary.num_parameters,
        "num_trainable": summary.num_trainable,
        "parameter_bytes": summary.parameter_bytes,
        "num_ops": summary.num_ops,
        "families": summary.families,
        "forward_flops": summary.forward_flops,
        "backward_flops": summary.backward_flops,
        "activation_bytes": summary.activation_bytes,
        "modules": [
            {
                "path": cost.path,
                "count": cost.count,
                "num_ops": cost.num_ops,
                "forward_flops": cost.forward_flops,
                "backward_flops": cost.backward_flops,
                "activation_bytes": cost.activation_bytes,
                "num_parameters": cost.num_parameters,
            }
            for cost in summary.modules
        ],
    }


def summary_view(job_reference: str, graph: Graph, summary: Summary) -> Group:
    """The summary for a console."""
    samples = f"{summary.num_samples} {'sample' if summary.num_samples == 1 else 'samples'}"
    title = Text.assemble((job_reference, "bold"), f"  one step of {samples}, {summary.precision}")
    parts: list[Any] = [title, _facts(summary)]
    if summary.modules:
        parts += [Text(), _modules(summary)]
    if summary.largest_activations:
        parts += [Text(), _activations(summary)]
    notices = [*graph.notices]
    if summary.unused:
        notices.append(f"the loss does not depend on {_listed(summary.unused)}; they are never updated.")
    if notices:
        parts.append(Text())
        parts += [Text.assemble(("notice  ", "yellow"), notice) for notice in notices]
    return Group(*parts)


def _facts(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    frozen = summary.num_parameters - summary.num_trainable
    parameters = f"{format_count(summary.num_parameters)} ({format_bytes(summary.parameter_bytes)})"
    table.add_row("parameters", parameters + (f", {format_count(frozen)} frozen" if frozen else ""))
    if summary.tied:
        tied = _listed([f"{alias} = {name}" for alias, name in summary.tied.items()])
        table.add_row("tied", Text(f"{tied}, counted once"))
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary.num_ops.items())
    table.add_row("ops", phases)
    table.add_row("", ", ".join(f"{count:,} {family}" for family, count in summary.families.items()))
    flops = f"{format_flops(summary.forward_flops)} forward, {format_flops(summary.backward_flops)} backward"
    table.add_row("FLOPs", flops)
    table.add_row("activations", f"{format_bytes(summary.activation_bytes)} kept for the backward")
    return table


def _modules(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Costliest modules", title_justify="left", pad_edge=False)
    table.add_column("module", overflow="fold")
    for name in ("ops", "forward", "backward", "share", "activations", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    total = summary.forward_flops + summary.backward_flops
    for cost in summary.modules[:NUM_MODULES]:
        flops = cost.forward_flops + cost.backward_flops
        table.add_row(
            Text(cost.path if cost.count == 1 else f"{cost.path}  ×{cost.count}"),
            f"{cost.num_ops:,}",
            format_flops(cost.forward_flops) if cost.forward_flops else "–",
            format_flops(cost.backward_flops) if cost.backward_flops else "–",
            f"{flops / total:.0%}" if total else "–",
            format_bytes(cost.activation_bytes) if cost.activation_bytes else "–",
            format_count(cost.num_parameters) if cost.num_parameters else "–",
        )
    if len(summary.modules) > NUM_MODULES:
        table.caption = f"{len(summary.modules) - NUM_MODULES} cheaper ones not shown"
        table.caption_justify = "left"
    return table


def _activations(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Largest activations", title_justify="left", pad_edge=False)
    for name, justify in (
        ("bytes", "right"),
        ("shape", "left"),
        ("op", "left"),
        ("module", "left"),
        ("line", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for activation in summary.largest_activations[:5]:
        table.add_row(
            format_bytes(activation.num_bytes),
            Text(f"{activation.dtype} {list(activation.shape)}"),
            Text(activation.name),
            Text(activation.module or "–"),
            Text(Path(activation.source).name if activation.source else "–"),
        )
    return table


def _listed(names: list[str] | tuple[str, ...]) -> str:
    rest = f" and {len(names) - NUM_NAMES} more" if len(names) > NUM_NAMES else ""
    return ", ".join(names[:NUM_NAMES]) + rest
