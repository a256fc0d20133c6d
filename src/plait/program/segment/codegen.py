"""Turn nodes of a local graph into one Python function.

In: nodes in order, the names that come in and go out, the device. Out: a `Segment`. The function takes its inputs in
a list and empties it, and drops every tensor after its last use, so that memory falls as it does in eager mode.
Gradients that a matrix product makes can be written straight into memory that the caller gives, such as a bucket.
The source is kept and shown in tracebacks.
"""

import linecache
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from plait.graph.cost import node_flops
from plait.graph.ops import attention as attention_op
from plait.graph.ops import batch_norm as batch_norm_op
from plait.graph.ops import beside as beside_op
from plait.graph.ops import choice as choice_op
from plait.graph.ops import ending as ending_op
from plait.graph.ops import grouped as grouped_op
from plait.graph.ops import island as island_op
from plait.graph.ops import lstm as lstm_op
from plait.graph.ops import random as random_ops
from plait.graph.ops import rnn as rnn_op
from plait.graph.ops import scaled as scaled_op
from plait.program.program import Segment
from plait.program.segment.in_place import IN_PLACE, OVER_GRADIENT, written_over
from plait.program.segment.kernels import KERNELS
from plait.torch_private.ops import OpOverload, direct_call

_OURS: dict[Any, Callable[..., Any]] = {
    **random_ops.IMPLEMENTATIONS,
    **attention_op.IMPLEMENTATIONS,
    **batch_norm_op.IMPLEMENTATIONS,
    **beside_op.IMPLEMENTATIONS,
    **lstm_op.IMPLEMENTATIONS,
    **rnn_op.IMPLEMENTATIONS,
    **grouped_op.IMPLEMENTATIONS,
    **choice_op.IMPLEMENTATIONS,
    **island_op.IMPLEMENTATIONS,
    **ending_op.IMPLEMENTATIONS,
    **scaled_op.IMPLEMENTATIONS,
    **KERNELS,
}


def make_segment(
    name: str,
    phase: Literal["forward", "backward"],
    nodes: Sequence[fx.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    device: torch.device,
) -> Segment:
    """Compile `nodes`, which read `inputs` (names of earlier nodes) and make `outputs`."""
    scope: dict[str, Any] = {}
    fills = find_fills(nodes, outputs)
    lines = [f"def segment(args, into=({'None, ' * len(fills)})):  # {name}"]
    lines += [f"    [{', '.join(inputs)}] = args", "    args.clear()"] if inputs else []
    lines += [f"    [{', '.join(f'{fill.output}_into' for fill in fills.values())}] = into"] if fills else []
    last_use = _last_uses(nodes, outputs)
    over = written_over(nodes, outputs, last_use)
    steps: list[tuple[str, tuple[str, ...]]] = []
    for node in nodes:
        call = _call(node, scope, device, over.get(node))
        if node in fills:
            given = f"{fills[node].output}_into"
            scope["f_mm_out"] = direct_call(torch.ops.aten.mm.out)
            operands = ", ".join(_literal(arg, scope, device) for arg in node.args)
            call += f" if {given} is None else f_mm_out({operands}, out={given}{fills[node].view})"
        lines.append(f"    {node.name} = {call}")
        dead = [n for n in last_use.get(node, ()) if n not in outputs]
        steps.append((node.name, tuple(dead)))
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return ({', '.join(outputs)}{',' if outputs else ''})")
    source = "\n".join(lines) + "\n"
    return Segment(
        name=name,
        phase=phase,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        source=source,
        run=_function(name, source, scope),
        num_ops=len(nodes),
        flops=sum(node_flops(node) for node in nodes),
        fillable=tuple(outputs.index(fill.output) for fill in fills.values()),
        steps=tuple(steps),
        over={node.name: operand.name for node, operand in over.items()},
        nodes=tuple(nodes),
    )


def with_numbers(segment: Segment, source: str) -> Callable[..., tuple[Any, ...]]:
    """What runs a segment whose `source` looks numbers up in `n`, its third argument."""
    scope = {name: value for name, value in segment.run.__globals__.items() if name[:2] in ("f_", "c_")}
    head, rest = source.split("\n", 1)
    return _function(segment.name, head.replace("):  #", ", n=()):  #", 1) + "\n" + rest, scope)


def _function(name: str, source: str, scope: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """The function of a source, which tracebacks show for as long as the function lives."""
    filename = f"<plait segment {name} #{id(scope):x}>"  # alive as long as the function
    exec(compile(source, filename, "exec"), scope)
    function: Callable[..., tuple[Any, ...]] = scope.pop("segment")
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return function


@dataclass(frozen=True, slots=True)
class Fill:
    """A matrix product whose only purpose is one output of the segment, maybe seen through views."""

    output: str
    shape: tuple[int, ...] | None
    """What memory shaped like the output is viewed as first; None: as it is."""
    transposed: bool
    """Whether it is transposed then."""

    @property
    def view(self) -> str:
        """Turns memory shaped like the output into memory shaped like the product."""
        shaped = f".view({list(self.shape)})" if self.shape is not None else ""
        return shaped + (".t()" if self.transposed else "")


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def find_fills(nodes: Sequence[fx.Node], outputs: Sequence[str]) -> dict[fx.Node, Fill]:
    """Products that may be written straight to where an output is wanted: nothing else in the graph may see them."""
    found: dict[fx.Node, Fill] = {}
    inside = set(nodes)
    for node in nodes:
        if node.name not in outputs or any(user.op != "output" for user in node.users):
            continue
        source, transposed = node, False
        shape: tuple[int, ...] | None = None
        while source.target is torch.ops.aten.t.default or (source.target in _VIEWS and not transposed):
            before = source.args[0]
            if not isinstance(before, fx.Node) or before not in inside:
                break
            if len(before.users) != 1 or before.name in outputs:
                break
            if source.target is torch.ops.aten.t.default:
                transposed = not transposed
            else:
                shape = tuple(before.meta["val"].shape)
            source = before
        if source.target is torch.ops.aten.mm.default:
            found[source] = Fill(node.name, shape, transposed)
    return found


def _last_uses(nodes: Sequence[fx.Node], outputs: Iterable[str]) -> dict[fx.Node, list[str]]:
    last: dict[str, fx.Node] = {}
    for node in nodes:
        last[node.name] = node
        for used in node.all_input_nodes:
            last[used.name] = node
    kept = set(outputs)
    found: dict[fx.Node, list[str]] = {}
    for name, node in last.items():
        if name not in kept:
            found.setdefault(node, []).append(name)
    return found


def _call(node: fx.Node, scope: dict[str, Any], device: torch.device, over: fx.Node | None = None) -> str:
    """`over`: the operand that it may write over."""
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]!r}]"
    target: Any = node.target
    if over is not None:
        target = IN_PLACE.get(target) or OVER_GRADIENT[target]
    function = function_of(target)
    name = f"f_{_identifier(target)}"
    while scope.setdefault(name, function) is not function:
        name += "_"
    parts = [_literal(arg, scope, device) for arg in node.args]
    parts += [f"{key}={_literal(value, scope, device)}" for key, value in node.kwargs.items()]
    parts += [f"grad_input={over.name}"] if over is not None and node.target in OVER_GRADIENT else []
    return f"{name}({', '.join(parts)})"


def function_of(target: Any) -> Callable[..., Any]:
    """What is called for a node's target on real tensors."""
    if target in _OURS:
        return _OURS[target]
    return direct_call(target)


def _identifier(target: Any) -> str:
    text = str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", "call")
    return "".join(c if c.isalnum() else "_" for c in text)


def _literal(value: Any, scope: dict[str, Any], device: torch.device) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, fx.immutable_collections.immutable_list)):
        return "[" + ", ".join(_literal(entry, scope, device) for entry in value) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_literal(entry, scope, device) + ", " for entry in value) + ")"
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else f"float('{value}')"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, torch.device):
        value = device
    name = f"c_{_identifier_of(value)}"
    while scope.setdefault(name, value) != value:
        name += "_"
    return name


def _identifier_of(value: Any) -> str:
    return "".join(c if c.isalnum() else "_" for c in str(value))[:40]
