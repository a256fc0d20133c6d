"""A function of one row, as graphs over many rows at once.

In: a function of one row (parameters, inputs of its own, states of others), an example of each. Out: four graphs: what
needs no state, for all rows at once; the forward and the backward of the rows of one level; and, for all rows at once
again, what only the gradients of parameters and inputs need. So every product with a weight that can wait is one
product. Rows never see each other: they are batched by `vmap`, and a gradient of a parameter is a sum over rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, vjp, vmap

from plait.dynamic.row_graphs import Cut, RowFunction, cut_graphs
from plait.torch_private.dispatch import without_modes, without_row_by_row
from plait.torch_private.tracing import Sizes, make_fx


def row_function(
    function: Callable[..., Sequence[Tensor]],
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    others: int | None = None,
    out: Sequence[Tensor] | None = None,
) -> RowFunction:
    """Trace `function(parameters, inputs, states)` of one row, which gives new states like `out`.

    `inputs` and `states` are examples for one row and one state; with `others` a row sees so many of each state, in its
    first dim, and makes one of each. Parameters and inputs that can get gradients.
    """
    is_number = [value.requires_grad for value in parameters.values()]
    is_number += [value.is_floating_point() or value.is_complex() for value in (*inputs, *states)]
    made = states if out is None else out
    has_grad = [value.is_floating_point() or value.is_complex() for value in made]
    names, num_inputs = tuple(parameters), len(inputs)

    def joint(given: Sequence[Tensor], grads: Sequence[Tensor]) -> Any:
        def of(*numbers: Tensor) -> Any:
            known = iter(numbers)
            every = [next(known) if number else value for value, number in zip(given, is_number, strict=True)]
            known_parameters = dict(zip(names, every, strict=False))
            rest = every[len(names) :]
            batched = vmap(function, in_dims=(None, 0, 0), randomness="different")
            made = tuple(batched(known_parameters, rest[:num_inputs], rest[num_inputs:]))
            return tuple(value for value, number in zip(made, has_grad, strict=True) if number), made

        numbers = [value for value, number in zip(given, is_number, strict=True) if number]
        if not (numbers and grads):
            return of(*numbers)[1], [torch.zeros_like(value) for value in numbers]
        derived: Any = vjp(of, *numbers, has_aux=True)
        _, back, out = derived
        return out, back(tuple(grads))

    for symbols in (True, False):
        sizes = Sizes(others or 0, symbols=symbols)
        given = [sizes.fake(value) for value in parameters.values()]
        given += [sizes.fake(value, rows=True) for value in inputs]
        given += [sizes.fake(value, rows=True, others=others is not None) for value in states]
        grads = [sizes.fake(value, rows=True) for value, number in zip(made, has_grad, strict=True) if number]
        try:
            with without_modes(), without_row_by_row(), sizes.mode:
                functional: Any = functionalize(joint, remove="mutations")
                traced = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(given, grads)
        except RuntimeError as error:
            if not symbols or "INTERNAL ASSERT" not in str(error):
                raise
            continue  # torch 2.11 cannot batch linear layers of open sizes
        if sizes.is_open:
            break
    counts = (len(names), num_inputs, len(states), len(grads))
    return cut_graphs(Cut(traced, sizes, counts), names, is_number, has_grad, others=others is not None)
