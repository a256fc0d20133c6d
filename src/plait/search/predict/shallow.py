"""A deep model with fewer blocks: enough to learn what all of them cost.

In: a job whose model is built by a function. Out: the same job with most blocks of its longest list of equal blocks
left out, and how many there were; or nothing, where no list has blocks that are certainly alike. Never runs or changes
the user's own model.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from plait.errors import PlaitError
from plait.job.job import Job
from plait.torch_private.fake import FakeTensorMode

_FEWEST = 4
"""A list of so many blocks is captured as it is."""
_POSITION = ("idx", "index", "id", "number")
"""Ends of the names of attributes that say which block it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shallow:
    """A job with fewer blocks."""

    job: Job
    """Its model has the first few blocks only."""
    path: str
    """Of the list."""
    num_blocks: int
    """Of the whole model."""


def shallow_job(job: Job, num_blocks: int) -> Shallow | None:
    """The job with `num_blocks` blocks in its longest list; None where that cannot be told without trying."""
    build = job.model
    if isinstance(build, nn.Module):
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = job.build_model()
    except PlaitError:
        raise
    except Exception:  # a constructor that reads values: the whole model is captured, for real
        return None
    found = max(_lists(model), key=lambda entry: len(entry[1]), default=None)
    if found is None:
        return None
    path, blocks = found

    def built() -> nn.Module:
        made = build()
        kept = made.get_submodule(path)
        assert isinstance(kept, nn.ModuleList | nn.Sequential)
        del kept[num_blocks:]
        return made

    return Shallow(job=replace(job, model=built), path=path, num_blocks=len(blocks))


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > _FEWEST:
            blocks = list(module)
            first = _looks(blocks[0])
            if len(first) > 1 and all(_looks(block) == first for block in blocks[1:]):
                yield path, blocks


def _looks(block: nn.Module) -> list[object]:
    """Everything about a block that may decide what it computes, but for which one it is."""
    found: list[object] = []
    for path, module in block.named_modules():
        plain = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | bool | None) and not name.lower().endswith(_POSITION)
        }
        shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)]
        found.append((path, type(module), plain, shapes))
    return found
