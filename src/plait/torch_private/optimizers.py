"""What is called around an optimizer's step. Private to torch (`Optimizer._optimizer_step_pre_hooks`)."""

import torch
from torch.optim import optimizer as of_torch


def has_hooks_beside(optimizer: torch.optim.Optimizer, module: str) -> bool:
    """Whether functions of other modules than this one are called before or after its steps."""
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *of_torch._global_optimizer_pre_hooks.values(),
        *of_torch._global_optimizer_post_hooks.values(),
    )
    return any(getattr(hook, "__module__", None) != module for hook in hooks)
