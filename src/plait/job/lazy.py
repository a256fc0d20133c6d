"""Lazily initialized modules: shapes and first weights come from the first forward, as in a loop of the user's own.

In: a model that was just built under the job's seed, and the job. Out: the same model with all
parameters, and otherwise as it was: buffers and plain attributes that the forward changed are put back, so that the
first step counts once. Observers of torch.ao that see each channel for itself get their
channels, and have seen nothing.
"""

import copy
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import JobError
from plait.job.data.open import open_data
from plait.job.generators import kept_generators
from plait.job.model.dtypes import leaf_dtype
from plait.job.model.watch import Watch
from plait.job.order import micro_batch_sizes
from plait.job.origin import told
from plait.torch_private import pytree
from plait.torch_private.modules import attributes_of, is_lazy, tables_of

_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, tuple, type(None))


def lacks_shapes(model: nn.Module) -> bool:
    """Whether the first forward gives something in the model its shape."""
    return any(is_lazy(module) or _is_unsized(module) for module in model.modules())


def give_shapes(model: nn.Module, job: Any) -> None:
    """Run the job's code once, which makes the parameters of lazy modules; raises JobError where it does not."""
    parts = job.parts()
    with kept_generators():
        source = open_data(job.data, job.collate, skip_bad=job.skip_bad, drop_last=job.drop_last)
        batch = source.fetch(_first_ids(job, source.num_samples))
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in model.parameters())

    def given(leaf: Tensor) -> Tensor:
        return leaf.to(leaf_dtype(leaf.dtype, torch.float32, narrow=not wide), copy=True)

    batch = pytree.tree_map_only(Tensor, given, batch)
    watch = Watch({"loss": job.loss, "objectives": [part.objective for part in parts]})
    kept: dict[nn.Module, _Kept] = {}
    hooks = []

    def keep(own: nn.Module, given: Any) -> None:
        if _is_unsized(own):
            _give_channels(own, given[0])
        for each in own.modules():
            kept.setdefault(each, _Kept(each))

    late = {m: None for m in model.modules() if is_lazy(m)}
    late |= {part: None for m in model.modules() if _is_unsized(m) for part in m.modules()}
    for module in model.modules():
        if module in late:  # once it knows its shapes, before it computes
            hooks.append(module.register_forward_pre_hook(keep))
        else:
            kept[module] = _Kept(module)
    try:
        model.train()
        with torch.enable_grad():
            for part in parts:
                part.objective_of(model, batch)
    except Exception as error:
        raise JobError(
            f"the first forward of {type(model).__name__}, which gives its lazy modules their shapes, failed"
            f"{told(error)}",
            fix="mend that line, or state the input sizes.",
        ) from error
    finally:
        watch.restore()
        for hook in hooks:
            hook.remove()
    for module, held in kept.items():
        held.put_back(module)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise JobError(
                f"{name} of {type(model).__name__} has no shape yet (a lazy module): the first batch misses it.",
                fix="state the input size, or run one batch through the network inside the model function.",
            )


def _is_unsized(module: nn.Module) -> bool:
    """Whether it is an observer of channels, by torch's fused op, that has not seen any."""
    quantization = sys.modules.get("torch.ao.quantization")
    fused = getattr(quantization, "FusedMovingAvgObsFakeQuantize", None)
    if fused is None or not isinstance(module, fused):
        return False
    observer: Any = module.activation_post_process
    return bool(module.is_per_channel) and observer.min_val.numel() == 0


def _give_channels(module: Any, x: Tensor) -> None:
    """What the op does with an observer that it sees for the first time."""
    observer, channels = module.activation_post_process, x.shape[module.ch_axis]
    for owner, name, nothing in (
        (observer, "min_val", math.inf),
        (observer, "max_val", -math.inf),
        (module, "scale", 1),
        (module, "zero_point", 0),
    ):
        held = tables_of(owner)[1]
        held[name] = held[name].new_full((channels,), nothing)


def _first_ids(job: Any, num_samples: int | None) -> Tensor:
    """The first micro-batch."""
    order = job.order(num_samples)
    ids = torch.arange(job.batch) if order is None else order.at(0).ids
    return ids[: micro_batch_sizes(len(ids), job.accumulate)[0]]


class _Kept:
    """What one module holds besides parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers: dict[str, Tensor | None] = {
            name: buffer if buffer is None else buffer.detach().clone()
            for name, buffer in tables_of(module)[1].items()
        }
        self._plain = {n: _copy(v) for n, v in attributes_of(module).items() if isinstance(v, _PLAIN)}

    def put_back(self, module: nn.Module) -> None:
        held = tables_of(module)[1]
        with torch.no_grad():
            for name, value in self._buffers.items():
                now = held.get(name)
                if now is None or value is None or now.shape != value.shape:
                    held[name] = value
                else:
                    now.copy_(value)
        for name, value in self._plain.items():
            vars(module)[name] = value


def _copy(value: Any) -> Any:
    """A copy of what holds plain values alone, else the thing itself."""
    return copy.deepcopy(value) if _is_plain(value) else value


def _is_plain(value: Any) -> bool:
    items = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
    )
    return isinstance(value, _PLAIN) and all(map(_is_plain, items))
