"""What a backward pass of a loop of the user's own is: its loss, whom it reaches, the samples behind it.

In: what `backward` was called with, and the arguments of a model's forward. Out: one loss, parameters, counts. It calls
no collective and changes no gradient.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from plait.job.batch import tensors_in


def one_loss(tensors: Any, grad_tensors: Any) -> tuple[Tensor, Tensor | None]:
    """What is differentiated as one scalar, and what its gradient begins with: values of several elements, and several
    values, are a sum of products with their gradients."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) or grad_tensors is None else list(grad_tensors)
    given += [None] * (len(roots) - len(given))
    if len(roots) == 1 and roots[0].numel() == 1:
        return roots[0], given[0]
    total: Tensor | None = None
    for root, gradient in zip(roots, given, strict=True):
        part = root if gradient is None else root * gradient
        total = part.sum() if total is None else total + part.sum()
    assert total is not None
    return total, None


def reached(root: Tensor) -> set[int]:
    """Ids of the leaves that its graph shows; what a hand-written function computes again is not seen."""
    found, seen, waiting = set[int](), set[Any](), [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        waiting += [before for before, _ in node.next_functions]
    return found


def samples_of(arguments: Sequence[Any]) -> int:
    """Rows of the first tensor; of images and targets in lists, as detection has them, the entries of the list."""
    lists = [value for value in arguments if isinstance(value, list | tuple) and value]
    targets = {len(value) for value in lists if all(isinstance(entry, Mapping) for entry in value)}
    for value in lists:
        of_tensors = all(isinstance(entry, Tensor) for entry in value)
        if of_tensors and (len(value) in targets or len({entry.shape[:1] for entry in value}) > 1):
            return len(value)
    first = next((tensor for tensor in tensors_in(list(arguments)) if tensor.dim()), None)
    return 1 if first is None else first.shape[0]
