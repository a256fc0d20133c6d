"""What the end of an objective does with tensors of given shapes, found by running it on made-up numbers.

In: an ending, fake tensors of its inputs. Out: the same with what it gives gradients to and, where its loss was found
to be a sum over samples, with leave to run on shares of them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.graph.capture import probe
from plait.graph.capture.probe import NoIslandError, made_up
from plait.graph.capture.rows import is_sum_over_samples
from plait.graph.ops.ending import Ending, LaterCallError
from plait.job.generators import kept_generators
from plait.job.model.watch import Watch
from plait.threads import at_most
from plait.torch_private.autograd import version_of
from plait.torch_private.dispatch import without_modes

_VALUES = (0.0, 1.0, None, None, None)
"""Of all elements; None: any numbers."""


def probe_ending(own: Ending, inputs: list[Tensor], numbers: list[int]) -> tuple[Ending, torch.dtype]:
    """The same with what it gives gradients to, and the dtype of its loss, from runs on made-up numbers."""
    wanted, dtypes, failed = set[int](), set[torch.dtype](), ""
    in_shares, shown = _by_samples(own, inputs, numbers), False
    for seed, value in enumerate(_VALUES):
        watch = Watch({"model": own.module, "loss": own.job.loss, "objective": own.job.objective})
        try:
            with at_most(probe.PROBE_S), without_modes(), kept_generators():
                tried = _tried(own, made_up(inputs, value, seed), numbers, in_shares)
            changed = watch.changes()
        except (NoIslandError, LaterCallError):
            raise
        except Exception as error:  # made-up numbers may be none that it takes
            failed = f"{type(error).__name__}: {error}"
            continue
        finally:
            watch.restore()
        if changed:
            raise NoIslandError(f"the objective changes Python state, {changed[0].path}")
        dtypes.add(tried.dtype)
        wanted |= tried.wanted
        in_shares, shown = in_shares if tried.adds_up is not False else None, shown or bool(tried.adds_up)
    if len(dtypes) != 1:
        raise NoIslandError(f"the objective cannot be run on numbers of these shapes ({failed})")
    chosen = in_shares if in_shares is not None and shown else own
    return replace(chosen, wanted=tuple(sorted(wanted))), dtypes.pop()


def _by_samples(own: Ending, inputs: list[Tensor], numbers: list[int]) -> Ending | None:
    """The same as it may run on shares; None: nothing tells its samples apart."""
    *others, num_samples = numbers
    given = inputs[: len(inputs) - len(own.names)]
    cut = [i for i, t in enumerate(given) if t.ndim and t.shape[0] and t.shape[0] % num_samples == 0]
    if not cut or num_samples < 2 or others:
        return None
    return replace(own, sampled=tuple(cut), extent=given[cut[0]].shape[0] // num_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    dtype: torch.dtype
    wanted: set[int]
    adds_up: bool | None
    """Whether shares of the samples give summands of the whole; None: these numbers do not show it."""


def _tried(own: Ending, leaves: list[Tensor], numbers: list[int], in_shares: Ending | None) -> _Tried:
    versions, drawn = [version_of(leaf) for leaf in leaves], torch.get_rng_state()
    held = _held(own)
    total, _, gradients = own.differentiated(leaves, numbers)
    if held != _held(own):
        raise NoIslandError("the objective writes into parameters or buffers")
    if total.device.type == "meta":
        raise NoIslandError("the objective reads parameters of the model")
    if versions != [version_of(leaf) for leaf in leaves]:
        raise NoIslandError("the objective writes into what it is given")
    if not torch.equal(drawn, torch.get_rng_state()):
        raise NoIslandError("the objective draws random numbers")
    wanted = {i for i, gradient in zip(own.asked, gradients, strict=True) if gradient is not None}
    adds_up: bool | None = False
    if in_shares is not None and _is_sum(in_shares, leaves, numbers):
        whole = replace(in_shares, wanted=tuple(sorted(wanted)))
        adds_up = _adds_up(whole, leaves, numbers)
    return _Tried(dtype=total.dtype, wanted=wanted, adds_up=adds_up)


def _held(own: Ending) -> list[tuple[int, int]]:
    tensors = [*own.module.parameters(), *own.module.buffers()]
    return [(id(tensor), version_of(tensor)) for tensor in tensors]


def _is_sum(own: Ending, leaves: list[Tensor], numbers: list[int]) -> bool:
    """Whether it is known of each op that shares of the samples will do."""
    cut = set(own.sampled)
    samples, others = (
        [leaf for i, leaf in enumerate(leaves) if (i in cut) == of_samples] for of_samples in (True, False)
    )
    with torch.enable_grad():
        return is_sum_over_samples(lambda: own.result(leaves, numbers[:-1])[1], samples, others, numbers[-1])


def _adds_up(own: Ending, leaves: list[Tensor], numbers: list[int]) -> bool | None:
    """Whether the loss of a micro-batch is the sum of those of two shares of it; None: one of them counts nothing."""
    parts, num_samples = [], numbers[-1]
    extents = {i: leaves[i].shape[0] // num_samples for i in own.sampled}
    for cut in (slice(0, (num_samples + 1) // 3), slice((num_samples + 1) // 3, None)):
        share = [leaf[_times(cut, extents[i])] if i in extents else leaf for i, leaf in enumerate(leaves)]
        try:
            parts.append(own.loss(share, numbers))
        except Exception:  # so few samples are not what it takes
            return False
    whole = own.loss(leaves, numbers)
    for place, (first, second, expected) in enumerate(zip(*parts, whole, strict=True)):
        cut_too = place >= 2 and own.wanted[place - 2] in own.sampled
        found = torch.cat([first, second]) if cut_too else first + second
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return False
    moved = all(any(bool(gradient.any()) for gradient in part[2:]) for part in parts)
    return True if moved else None


def _times(cut: slice, extent: int) -> slice:
    start, stop = cut.start * extent, None if cut.stop is None else cut.stop * extent
    return slice(start, stop)
