"""Ops of steps that branch on values: all outcomes are computed, the one that holds is used.

In: a flag, and what each outcome makes. Out: what holds. A parameter that an outcome does not use has no gradient
there, which torch's optimizers tell from a gradient of zero: it is a tensor of negative zeros, of which no gradient
that is used has any (`present`), and which sums over ranks and micro-batches keep: -0 + -0 = -0 and -0 + x = x.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.errors import OutcomeError

MEND = "mend what the line complains about."
ABSENT = -0.0
"""Every element of a gradient that is not there."""


@torch.library.custom_op("plait::chosen", mutates_args=())
def chosen(flag: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor:
    """`yes` where the flag holds, else `no`; one that is not there gives negative zeros."""
    return run_chosen(flag, yes, no)


@chosen.register_fake
def _(flag: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor:
    made = yes if yes is not None else no
    assert made is not None
    return torch.empty_like(made, memory_format=torch.contiguous_format)


@torch.library.custom_op("plait::present", mutates_args=())
def present(gradient: Tensor) -> Tensor:
    """The same, without negative zeros."""
    return run_present(gradient)


@present.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


@torch.library.custom_op("plait::unless", mutates_args=())
def unless(total: Tensor, flag: Tensor, outcome: bool, message: str) -> Tensor:
    """`total`, or the error that the user's code raises where the flag has this outcome."""
    return run_unless(total, flag, outcome, message)


@unless.register_fake
def _(total: Tensor, flag: Tensor, outcome: bool, message: str) -> Tensor:
    return torch.empty_like(total)


def run_chosen(flag: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor:
    """The op on real tensors; nobody waits for the flag."""
    made = yes if yes is not None else no
    assert made is not None
    absent = torch.full((), ABSENT, dtype=made.dtype, device=made.device)
    first, second = (absent if entry is None else entry for entry in (yes, no))
    return torch.where(flag, first, second).contiguous()


def run_present(gradient: Tensor) -> Tensor:
    """The op on real tensors."""
    return gradient + 0.0


def run_unless(total: Tensor, flag: Tensor, outcome: bool, message: str) -> Tensor:
    """The op on real tensors."""
    if bool(flag) == outcome:
        raise OutcomeError(message, fix=MEND)
    return total.clone()


def is_absent(gradient: Tensor) -> bool:
    """Whether a gradient that may be absent, or a rank's piece of it, is: any of its elements tells."""
    first = gradient.flatten()[:1]
    first = first.real if first.is_complex() else first
    return bool(((first == 0) & torch.signbit(first)).all())  # no elements: nothing to update


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.chosen.default: run_chosen,
        torch.ops.plait.present.default: run_present,
        torch.ops.plait.unless.default: run_unless,
    }
)
