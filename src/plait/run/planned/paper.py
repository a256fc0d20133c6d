"""What a model returns on given shapes, without its values: the outcome of a call that is recorded."""

from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import UsageError
from plait.graph.capture.capture import as_fake
from plait.job.batch import map_tensors, tensors_in
from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode


class Paper:
    """A module without memory."""

    def __init__(self, module: nn.Module) -> None:
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._module = as_fake(module, self._fakes).train()
        self._results: dict[str, Any] = {}
        """What the model returns, by the shapes that it is given."""

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """What the model returns on these shapes: tensors without memory."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = f"{spec} {[(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in leaves]}"
        if key not in self._results:
            with self._fakes, torch.no_grad():
                fakes = [torch.empty(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for v in leaves]
                given, named = pytree.tree_unflatten(fakes, spec)
                try:
                    found = self._module(*given, **named)
                except Exception as error:
                    raise UsageError(
                        f"the model cannot be looked at without values: {type(error).__name__}: {error}",
                        fix="mend that line; where forward reads values of tensors, use plan='ddp'.",
                    ) from error
            if next(tensors_in(found), None) is None:
                raise UsageError("the model returned no tensor.", fix="return tensors from forward().")
            self._results[key] = found
        return map_tensors(
            lambda fake: torch.empty(fake.shape, dtype=fake.dtype, device="meta"), self._results[key]
        )
