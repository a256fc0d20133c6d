"""How gradients lie in memory when an optimizer is given them.

In: a gradient as a graph made it, in any order of its dims, and its parameter. Out: one that lies as that does.
"""

import torch
from torch import Tensor


def lying_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, as autograd leaves it: an optimizer's kernel that goes through
    memory (`fused=True`) and code that takes both as flat rely on it."""
    if gradient.is_sparse or gradient.shape != parameter.shape or _steps(gradient) == _steps(parameter):
        return gradient
    made = torch.empty_like(parameter.detach(), dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)


def _steps(tensor: Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
