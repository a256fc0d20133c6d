"""The user's own module, once a step holds what is trained: it says so instead of computing with weights it has not.

In: a module that was prepared. Out: `shell`, the same module for those who ask for its shape; and, after `retire`, a
module whose parameters can still be parts of a loss, and whose calls, saves and copies are refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plait.errors import UsageError
from plait.job.model.copies import copy_of


def shell(module: nn.Module) -> nn.Module:
    """A copy that has the parameters and buffers of `module`."""
    kept = (*module.parameters(), *module.buffers())
    return copy_of(module, {id(tensor): tensor for tensor in kept})


def retire(module: nn.Module, held: Mapping[str, nn.Parameter], plan: str) -> None:
    """Let go of the module's weights, of which no rank may hold all from here on."""

    def refuse(*unused: Any) -> None:
        raise UsageError(
            f"this {type(module).__name__} was prepared under plan {plan}, whose steps hold its weights since the "
            "first backward; it has none.",
            fix="use what plait.prepare returned: model(...), model.state_dict(), or `with model.whole() as whole:`, "
            "on all ranks.",
        )

    known = {id(parameter): held[name] for name, parameter in module.named_parameters()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = known[id(parameter)]
                parameter.data = torch.empty_like(parameter)  # never written to: shapes alone are asked for
        part.register_forward_pre_hook(refuse, prepend=True)
        part.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
