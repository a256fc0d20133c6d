"""A captured graph, walked and drawn: every op of a step with the value that it gives.

In: a job and a batch. Out: the ops in order with their values; an SVG with an arrow a tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, fx

import plait
from plait.graph.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Walked:
    """One op."""

    name: str
    op: str
    phase: str
    inputs: tuple[str, ...]
    value: Tensor | None


def walk(job: plait.Job, batch: tuple[Tensor, ...]) -> tuple[Graph, list[Walked]]:
    """Capture a step of the job, then run its ops one after the other on real tensors."""
    graph = plait.capture(job, batch=len(batch[0]))
    model = job.build_model()
    known: Mapping[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = iter(graph.batch.tensors(batch))
    given: list[Any] = []
    for entry in graph.inputs:
        if entry.kind in ("parameter", "buffer"):
            given.append(known[entry.name].detach())
        elif entry.kind == "batch":
            given.append(next(leaves))
        else:
            given.append(torch.ones(()) if entry.kind == "tangent" else torch.zeros(2, dtype=torch.int64))
    values: dict[str, Any] = {}

    class Keeps(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Keeps(fx.GraphModule(torch.nn.Module(), graph.graph)).run(*given)
    names = {entry.node: entry.name for entry in graph.inputs}
    walked = [
        Walked(
            name=node.name,
            op=_op(node),
            phase=str(node.meta.get("phase", "")),
            inputs=tuple(names.get(one.name, one.name) for one in node.all_input_nodes),
            value=values[node.name] if isinstance(values[node.name], Tensor) else None,
        )
        for node in graph.ops()
    ]
    return graph, walked


def listing(walked: Sequence[Walked]) -> str:
    """The ops as text, a line each, with small values written out."""
    return "\n".join(
        f"{one.phase:<9} {one.name:<22} = {one.op}({', '.join(one.inputs)})  {_short(one.value)}"
        for one in walked
    )


def draw(title: str, graph: Graph) -> str:
    """The graph as boxes in rows by depth: inputs above, forward blue, backward green."""
    names = {entry.node: entry.name for entry in graph.inputs}
    depth: dict[fx.Node, int] = {}
    shown = [
        node for node in graph.graph.nodes if node.op != "output" and (node.users or node.op != "placeholder")
    ]
    for node in shown:
        depth[node] = 1 + max((depth[one] for one in node.all_input_nodes), default=-1)
    rows: dict[int, list[fx.Node]] = {}
    for node in shown:
        at = (
            depth[node]
            if node.op != "placeholder"
            else max(0, min(depth[user] for user in node.users if user in depth) - 1)
        )
        rows.setdefault(at, []).append(node)
    wide, tall = 128, 58
    width = 24 + wide * max(map(len, rows.values()))
    height = 44 + tall * (max(rows) + 1)
    place = {
        node: (12 + wide * (at + 0.5) + (width - 24 - wide * len(row)) / 2, 44 + tall * level)
        for level, row in rows.items()
        for at, node in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(title)}">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#868e96"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for node in shown:
        for one in node.all_input_nodes:
            (x, y), (to_x, to_y) = place[one], place[node]
            parts.append(
                f'<line x1="{x:.1f}" y1="{y + 26:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#adb5bd" '
                'marker-end="url(#a)"/>'
            )
    for node in shown:
        x, y = place[node]
        colour = (
            "#f1f3f5"
            if node.op == "placeholder"
            else {"backward": "#b2f2bb"}.get(node.meta.get("phase", ""), "#a5d8ff")
        )
        label = names.get(node.name) or _op(node)
        parts.append(
            f'<rect x="{x - wide / 2 + 5:.1f}" y="{y:.1f}" width="{wide - 10}" height="26" rx="4" fill="{colour}" '
            'stroke="#868e96"/>'
            f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{escape(label[:20])}</text>'
        )
    return "".join(parts) + "</svg>\n"


def _op(node: fx.Node) -> str:
    target = str(getattr(node.target, "__name__", node.target))
    return target.removesuffix(".default").split(".")[0]


def _short(value: Tensor | None) -> str:
    if value is None:
        return ""
    if value.numel() > 8:
        return f"[{'x'.join(map(str, value.shape))}]"
    return str([round(v, 5) for v in value.flatten().tolist()]) if value.dim() else f"{value.item():.6g}"
