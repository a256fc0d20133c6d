"""Whether convolutions had better have their channels last in memory.

In: a program, where it runs. Out: yes or no. Kernels of 2-D convolutions follow the strides of what they are given, and
so does what comes after them: one decision, about weights and inputs, is one about all.
"""

import torch

from plait.graph.cost import node_flops
from plait.plan.plan import Plan
from plait.program.program import Program

_SHARE = 0.5
"""Of a step's FLOPs in convolutions: else what has to be laid out anew around them may cost more than they gain."""
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def prefers_channels_last(plan: Plan, program: Program, device: torch.device) -> bool:
    """As the plan says, or by the work of the program; ResNet-50 on an H200: 105 ms a step without, 40 with."""
    if plan.layout != "auto":
        return plan.layout == "channels-last"
    if device.type != "cuda":
        return False
    nodes = [node for one in program.classes for segment in one.segments.values() for node in segment.nodes]
    weights = {
        node: node.args[1 if node.target is _CONVOLUTIONS[0] else 2]
        for node in nodes
        if node.target in _CONVOLUTIONS
    }
    flat = {
        node
        for node, weight in weights.items()
        if isinstance(weight, torch.fx.Node) and weight.meta["val"].ndim == 4
    }
    work = {node: node_flops(node) for node in nodes}
    return bool(flat) and sum(work[node] for node in flat) > _SHARE * sum(work.values())
