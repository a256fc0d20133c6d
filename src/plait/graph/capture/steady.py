"""Trace a step whose Python code does the same every time, and refuse one that does not.

In: what is traced. Out: the traced step. A forward may change Python objects: where a second trace is the same, changes
nothing but tensors that it keeps, and never reads those of the first, a graph loses nothing of it. Otherwise the model
carries state from step to step that a graph cannot hold. All objects are left as they were found.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.errors import CaptureError, JobError
from plait.graph.capture.branches import Decisions
from plait.graph.capture.trace import StaleTensorError, Subject, Traced, trace
from plait.job.generators import noted_draws
from plait.job.model.watch import Change, Watch
from plait.torch_private.fake import FakeTensor, FakeTensorMode
from plait.torch_private.modules import hooks_of_module

_FIX = "keep it in a buffer and compute it with tensors to have it captured; plans single and ddp run it eagerly."


def trace_steady(subject: Subject, mode: FakeTensorMode, decisions: Decisions) -> Traced:
    """The traced step; raises where the next one would not be the same."""
    roots = {"model": subject.model, "loss": subject.job.loss, "objective": subject.job.objective}
    watch = Watch(roots)
    try:
        with noted_draws() as told:
            traced = trace(subject, mode, decisions)
        if told:
            raise CaptureError(
                f"the forward {told[0]}.",
                fix="draw with torch, and let the job's seed decide, to have it captured; plans single and ddp run it "
                "eagerly.",
            )
        changed = watch.changes()
        return _traced_again(subject, mode, decisions, traced, changed, roots) if changed else traced
    finally:
        _refuse_what_is_lost(watch.restore())


def _refuse_what_is_lost(paths: list[str]) -> None:
    """What is not the model's own, as that is built anew, must be what it was when a run begins."""
    lost = [path for path in paths if not path.startswith("model")]
    if lost:
        raise JobError(
            f"the step changes {lost[0]}, which is none of the model's own: it changed when the step was looked at, "
            "and cannot be put back (a place in an iterator, a large tensor).",
            fix="make it in the model's constructor, as a buffer where it is a tensor; let the job's data and collate "
            "give what an iterator gave.",
        )


def _traced_again(
    subject: Subject,
    mode: FakeTensorMode,
    decisions: Decisions,
    traced: Traced,
    changed: list[Change],
    roots: dict[str, Any],
) -> Traced:
    kept = {id(change.tensor): change.path for change in changed if change.tensor is not None}
    second = Watch(roots)
    try:
        again = trace(subject, mode, decisions, kept)
    except StaleTensorError as error:
        raise _refusal(subject, error.path, "is read in the next one") from None
    changes = second.changes()
    for change in changes:
        if change.tensor is None or id(change.tensor) in again.numbers:
            raise _refusal(subject, change.path, "a graph would not do")
    if _written(again) != _written(traced):
        raise _refusal(subject, changed[0].path, "makes the second forward another one than the first")
    if not changes:
        return traced
    paths = ", ".join(change.path for change in changes[:3])
    notice = f"the forward keeps tensors in {paths}, which no later step reads: in a captured run they are not kept."
    return replace(traced, notices=(*traced.notices, notice))


def _refusal(subject: Subject, path: str, why: str) -> CaptureError:
    line = _line_that_changes(subject, path)
    told = f" ({line})" if line else ""
    return CaptureError(f"the forward changes Python state, {path}{told}, which {why}.", fix=_FIX, where=line)


def _written(traced: Traced) -> tuple[str, list[Any]]:
    """The graph as text, and its constants."""
    constants = []
    for node in traced.module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced.module, str(node.target))
            real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            constants.append(value.tolist() if real and value.numel() < 1024 else str(value))
    return str(traced.module.graph), constants


def _line_that_changes(subject: Subject, path: str) -> str | None:
    """The user's line that seems to write to the last name of `path`."""
    names = re.findall(r"[A-Za-z_]\w*", path.removesuffix(".requires_grad"))
    if path.endswith(".requires_grad"):
        names.append("requires_grad_?")
    if "random" in path:
        names.append(r"random\.\w+")
    for name in reversed(names):
        pattern = re.compile(
            rf"\b{name}\b(\[[^=]*\]|\.\w+)*\s*([-+*/|&]|//|\*\*)?=[^=]|\b{name}(\[.*\])?\.\w+\("
        )
        for code in _codes(subject):
            try:
                lines, start = inspect.getsourcelines(code)
            except (OSError, TypeError):
                continue
            for number, line in enumerate(lines):
                inside = not any(word in line for word in ("def __init__", "register_buffer"))
                if inside and pattern.search(line) and not _is_constructor(lines, number):
                    return f"{inspect.getsourcefile(code)}:{start + number}"
    return None


def _is_constructor(lines: list[str], number: int) -> bool:
    above = [line for line in lines[: number + 1] if re.match(r"\s*def ", line)]
    depth = len(lines[number]) - len(lines[number].lstrip())
    owners = [line for line in above if len(line) - len(line.lstrip()) < depth]
    return bool(owners) and "__init__" in owners[-1]


def _codes(subject: Subject) -> Iterator[Any]:
    """The user's functions and classes, the nearest to the objective first."""
    for entry in (subject.job.objective, subject.job.loss):
        if inspect.isfunction(entry) or inspect.ismethod(entry):
            yield entry
    hooks = [h for m in subject.model.modules() for t in hooks_of_module(m).values() for h in t]
    yield from (hook for hook in hooks if inspect.isfunction(hook))
    kinds = dict.fromkeys(type(module) for module in subject.model.modules())
    yield from (kind for kind in kinds if not kind.__module__.startswith("torch."))
