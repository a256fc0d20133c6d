"""What nodes of a rewritten graph are marked with: their module, the line of source, their forward origin.

In: the captured graph, the new one, which new node computes what a captured one did. Out: the new nodes' notes.
"""

from collections.abc import Mapping

from torch import fx


def mark(captured: fx.Graph, new: fx.Graph, now: Mapping[fx.Node, fx.Node]) -> None:
    """Notes of new nodes: those of a node that computed the same, else of what uses them."""
    noted: dict[str, fx.Node] = {}
    for node in captured.nodes:
        if node.op == "call_function" and node in now:
            noted.setdefault(now[node].name, node)
    for node in reversed(new.nodes):
        if node.op != "call_function":
            continue
        like = noted.get(node.name)
        notes = like.meta if like is not None else next(
            (user.meta for user in node.users if "module" in user.meta and user.op == "call_function"), {}
        )  # fmt: skip
        for key in ("module", "source", "grad", "number", "owner", "again", "origin"):
            if key not in node.meta and key in notes:
                node.meta[key] = notes[key]
        node.meta.pop("tensor_meta", None)
    _settle_origins({node.name: node for node in captured.nodes}, new, now)


def _settle_origins(old: Mapping[str, fx.Node], new: fx.Graph, now: Mapping[fx.Node, fx.Node]) -> None:
    """A forward node is its own origin; where a backward node's is gone, it is the one that took its place."""
    names = {node.name for node in new.nodes}
    for node in new.nodes:
        if node.op != "call_function":
            continue
        node.meta.setdefault("module", "")
        node.meta.setdefault("source", "")
        if node.meta["phase"] == "forward":
            node.meta["origin"] = node.name
            continue
        origin = old.get(node.meta.get("origin", ""))
        while origin is not None and origin.name not in names:
            if origin in now and now[origin].name in names:
                origin = now[origin]
                break
            origin = next((user for user in origin.users if user.meta.get("phase") == "forward"), None)
        node.meta["origin"] = origin.name if origin is not None else ""
    _settle_stages(new)


def _settle_stages(new: fx.Graph) -> None:
    """What several nodes of the backward read is there for the first of them: for that of the last forward op."""
    place = {node.name: number for number, node in enumerate(new.nodes)}
    for node in reversed(new.nodes):
        if node.op == "call_function" and node.meta["phase"] == "backward":
            readers = [user for user in node.users if user.op == "call_function"]
            first = max((node, *readers), key=lambda reader: place.get(reader.meta["origin"], -1))
            node.meta["origin"] = first.meta["origin"]
