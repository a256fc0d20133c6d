"""The dataflow graph of a step as one page that opens offline.

In: a `Graph`. Out: an HTML document with its styles, data and script inside it. It asks the network for nothing, and
says so to the browser. Every string is put into the page as data and shown as text, never as markup.

The page: modules fold and unfold; forward, backward and update stand side by side in lanes, what belongs to one module
on one height; edges say which tensors pass. Layout is done by the page itself (`assets/layout.js`), on what is
unfolded.
"""

import json
from collections.abc import Iterable
from html import escape
from importlib import resources
from typing import Any

from plait.graph.graph import Graph
from plait.graph.show.summary import Summary, summarize, to_json
from plait.units import format_bytes, format_count, format_flops

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
"""What the page may load: itself."""
_PHASES = ("forward", "backward", "update")
_BUTTONS = (
    ("out", "−", "Zoom out (-)"),
    ("in", "+", "Zoom in (+)"),
    ("fit", "Fit", "Show everything (f)"),
    ("fold", "Fold", "Fold one level"),
    ("unfold", "Unfold", "Unfold one level"),
)


def draw_html(graph: Graph, title: str) -> str:
    """The whole document."""
    summary = summarize(graph)
    data = json.dumps(_page_data(to_json(graph)), separators=(",", ":")).replace("<", "\\u003c")
    buttons = "".join(
        f'<button type="button" id="{name}" title="{about}">{text}</button>' for name, text, about in _BUTTONS
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f"<header><div><h1>{escape(title)}</h1><p>{_facts(summary)}</p></div>"
        '<div class="tools"><div class="search"><input id="search" type="search" autocomplete="off" '
        'placeholder="Find an op, module or parameter" aria-label="Find an op, module or parameter">'
        '<ul id="found" hidden></ul></div>'
        '<label title="Reshapes, transposes and slices: they compute nothing">'
        '<input id="views" type="checkbox"> views</label>'
        f"{buttons}</div></header>"
        '<main><div id="stage"><svg id="graph" role="img" aria-label="Dataflow graph"><g id="world"></g></svg>'
        '<div class="lane forward">Forward ↓</div><div class="lane backward">Backward ↑</div>'
        '<div class="lane update">Update</div></div>'
        '<aside id="details" aria-live="polite"></aside></main>'
        f'<div id="tip" role="status" hidden></div>{_notes(summary)}'
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{_asset('layout.js')}\n{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("plait.graph").joinpath("assets", name).read_text(encoding="utf-8")


def _facts(summary: Summary) -> str:
    facts = (
        f"{format_count(summary.num_parameters)} parameters",
        f"{summary.num_ops['forward']:,} + {summary.num_ops['backward']:,} ops",
        f"{format_flops(summary.forward_flops)} forward",
        f"{format_flops(summary.backward_flops)} backward",
        f"{format_bytes(summary.activation_bytes)} of activations",
        f"{summary.num_samples} {'sample' if summary.num_samples == 1 else 'samples'}",
    )
    return escape(" · ".join(facts))


def _notes(summary: Summary) -> str:
    notes = list(summary.notices)
    if summary.unused:
        notes.append(f"The loss does not depend on {_listed(summary.unused)}.")
    if summary.tied:
        notes.append(f"Tied: {_listed(f'{alias} = {name}' for alias, name in summary.tied.items())}.")
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul id="notes" hidden>{items}</ul>' if items else ""


def _listed(names: Iterable[str], limit: int = 6) -> str:
    every = list(names)
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest


class _Numbering:
    """Strings that repeat, written once."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


def _page_data(listing: dict[str, Any]) -> dict[str, Any]:
    """The listing as short rows: batch leaves first, then ops; an op stands for the picks of its results too."""
    inputs = {entry["name"]: entry for entry in listing["inputs"]}
    strings = _Numbering()
    place: dict[str, int] = {}
    rows: list[list[Any]] = []
    first_reader: dict[str, str] = {}
    held_by: dict[str, list[str]] = {
        name: [entry["of"]] for name, entry in inputs.items() if entry["kind"] in _HELD
    }

    def add(name: str, entry: dict[str, Any], reads: list[int], parameters: list[str], origin: str) -> None:
        place[name] = len(rows)
        before = [strings(entry["target"]), strings(entry["family"]), _PHASES.index(entry["phase"])]
        where = [strings(text) for text in (entry["module"], origin, entry["source"], _shapes(entry))]
        held = [strings(parameter) for parameter in parameters]
        rows.append([name, *before, *where, entry["flops"], entry["bytes"], reads, held])

    for entry in listing["inputs"]:
        if entry["kind"] == "batch":
            add(entry["name"], entry | _INPUT_AS_OP, [], [], f"input {entry['of']}")
            rows[-1][0] = entry["of"]
    for entry in listing["ops"]:
        if entry["target"] == "getitem":
            place[entry["name"]] = place[entry["inputs"][0]]
            continue
        held = [name for source in entry["inputs"] for name in held_by.get(source, ())]
        origin = entry["origin"]
        if entry["phase"] == "update":
            held = [entry["name"].removeprefix("update:")]
            origin = first_reader.get(held[0], "")
        elif entry["family"] == "view":
            held_by[entry["name"]] = held
        else:
            for name in held:
                first_reader.setdefault(name, origin)
        reads = list(dict.fromkeys(place[name] for name in entry["inputs"] if name in place))
        add(entry["name"], entry, reads, held, origin)
    results = {node: name for name, node in listing["outputs"]["new_buffers"].items()}
    results |= {
        listing["outputs"]["total"]: "total of the loss",
        listing["outputs"]["weight"]: "weight of the loss",
    }
    return {
        "strings": list(strings.index),
        "ops": rows,
        "results": {str(place[node]): text for node, text in results.items() if node in place},
    }


_HELD = ("parameter", "buffer")
_INPUT_AS_OP = {
    "target": "input", "family": "input", "phase": "forward", "module": "", "source": "", "flops": 0,
}  # fmt: skip
"""Inputs that are named at the ops that read them instead of drawn."""


def _shapes(entry: dict[str, Any]) -> str:
    parts = [
        f"{dtype} [{', '.join(map(str, shape))}]"
        for shape, dtype in zip(entry["shapes"], entry["dtypes"], strict=True)
    ]
    return "; ".join(parts)
