"""Modes that see every op below autograd. Private to torch (`torch.utils._python_dispatch`)."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
