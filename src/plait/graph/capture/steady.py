"""Trace a step whose Python code does the same every time, and refuse one that does not.

In: what is traced. Out: the traced step. A forward may change Python objects: where a second trace is the same, changes
nothing but tensors that it keeps, and reads of those of the first only what depends on nothing (a table that the first
forward makes), a graph loses nothing of it. Otherwise the model carries state from step to step that a graph cannot
hold. All objects are left as they were found.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.errors import CaptureError, JobError
from plait.graph.capture.branches import Decisions
from plait.graph.capture.same import NoMeaningError, meaning_of
from plait.graph.capture.trace import StaleTensorError, Subject, Traced, trace
from plait.job.generators import noted_draws
from plait.job.model.outside import LATER_S, Asked, noted_asks
from plait.job.model.watch import Change, Watch
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.modules import hooks_of_module

_MOST = 3
"""Traces after the first, where each leaves something in another place, as one that is kept in a list."""
_TRAIL = "makes a step another one after a batch of another shape"
_DRAW = (
    "draw with torch (torch.rand, torch.randint) to have it captured; plans single and ddp run it eagerly."
)
_FIX = "keep it in a buffer and compute it with tensors to have it captured; plans single and ddp run it eagerly."


def trace_steady(
    subject: Subject, mode: FakeTensorMode, decisions: Decisions, others: Sequence[Callable[[], Subject]] = ()
) -> Traced:
    """The traced step; raises where the next one would not be the same, or another after one of `others` is."""
    roots = {"model": subject.model, "loss": subject.job.loss, "objective": subject.job.objective}
    watch = Watch(roots)
    try:
        with noted_draws() as told, noted_asks() as asked:
            traced = trace(subject, mode, decisions)
        if asked.clocks or asked.files:
            _refuse_answers(subject, mode, decisions, traced, asked, watch)
        if asked.draws:
            told.append(f"draws random numbers of the system ({asked.draws[0]}), each time others")
        if told:
            raise CaptureError(
                f"the forward {told[0]}.",
                fix="draw with torch, and let the job's seed decide, to have it captured; plans single and ddp run it "
                "eagerly.",
            )
        changed = watch.changes()
        if not changed:
            return traced
        try:
            traced = _traced_again(subject, mode, decisions, traced, changed, roots)
        except NoMeaningError:
            raise _refusal(subject, changed[0].path, "a graph would not do") from None
        watch.restore()
        for make in others:
            _refuse_trails(subject, make(), mode, decisions, roots)
        return traced
    finally:
        _refuse_what_is_lost(watch.restore())


def _refuse_answers(
    subject: Subject, mode: FakeTensorMode, decisions: Decisions, traced: Traced, asked: Asked, watch: Watch
) -> None:
    """What is in a file may be another thing next time; for the time a step may ask, if it does not compute with it."""
    line, what = (asked.files or asked.clocks)[0], "opens a file" if asked.files else "computes with the time"
    if not asked.files:
        watch.restore()
        with noted_asks(LATER_S):
            later = trace(subject, mode, Decisions(decisions.outcomes))
        with suppress(NoMeaningError):
            if meaning_of(later, [], {}, mode).keys == meaning_of(traced, [], {}, mode).keys:
                return
    raise CaptureError(
        f"the forward {what} ({line}): a graph would know the answer of one moment.",
        fix="let the job's data give it, or read it in the model's constructor, to have it captured; plans single and "
        "ddp run it eagerly.",
        where=line,
    )


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
    """What was traced, where the next traces are the same and find what they leave; raises where they are not."""
    first = meaning_of(traced, _tensors(changed), {}, mode)
    known, seen = dict(first.left), {change.path: change for change in changed}
    for _ in range(_MOST):
        stale = {
            id(c.tensor): c.path for c in seen.values() if c.tensor is not None and id(c.tensor) not in known
        }
        second = Watch(roots)
        try:
            again = trace(subject, mode, decisions, stale)
        except StaleTensorError as error:
            raise _refusal(subject, error.path, "is read in the next one") from None
        changes = second.changes()
        next_one = meaning_of(again, _tensors(changes), known, mode)
        for change in changes:
            before = known.get(id(seen[change.path].tensor)) if change.path in seen else None
            now = next_one.left.get(id(change.tensor))
            same = before is None or (now is not None and now.equal(before))
            if change.tensor is None or id(change.tensor) in again.numbers or not same:
                raise _refusal(subject, change.path, "a graph would not do")
        if next_one.keys != first.keys:
            raise _refusal(subject, changed[0].path, "makes the second forward another one than the first")
        if all(change.path in seen for change in changes):
            break
        known |= next_one.left
        seen |= {change.path: change for change in changes}
    if not changes:
        return traced
    paths = ", ".join(change.path for change in changes[:3])
    notice = f"the forward keeps tensors in {paths}, which no later step reads: in a captured run they are not kept."
    return replace(traced, notices=(*traced.notices, notice))


def _refuse_trails(
    subject: Subject, other: Subject, mode: FakeTensorMode, decisions: Decisions, roots: dict[str, Any]
) -> None:
    """Of steps of two shapes, none may be another one where it comes after the other."""
    for before, after in ((subject, other), (other, subject)):
        watch, path = Watch(roots), "model"
        try:
            alone = meaning_of(trace(after, mode, Decisions(decisions.outcomes)), [], {}, mode)
            watch.restore()
            earlier = trace(before, mode, Decisions(decisions.outcomes))
            changed = watch.changes()
            path = changed[0].path if changed else path
            left = meaning_of(earlier, _tensors(changed), {}, mode).left
            stale = {
                id(c.tensor): c.path for c in changed if c.tensor is not None and id(c.tensor) not in left
            }
            later = meaning_of(trace(after, mode, Decisions(decisions.outcomes), stale), [], left, mode)
        except Exception as error:
            raise _refusal(subject, path, _TRAIL) from error
        finally:
            watch.restore()
        if later.keys != alone.keys:
            raise _refusal(subject, path, _TRAIL)


def _tensors(changes: list[Change]) -> list[Tensor]:
    return [change.tensor for change in changes if change.tensor is not None]


def _refusal(subject: Subject, path: str, why: str) -> CaptureError:
    line = _line_that_changes(subject, path)
    told = f" ({line})" if line else ""
    fix = _DRAW if path.startswith("the state of ") else _FIX
    return CaptureError(f"the forward changes Python state, {path}{told}, which {why}.", fix=fix, where=line)


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
    kinds = {kind: None for kind in kinds if not kind.__module__.startswith("torch.")}
    yield from kinds
    yield from _functions_behind([subject.job.objective, subject.job.loss, *kinds])


def _functions_behind(codes: Sequence[Any]) -> Iterator[Any]:
    """Functions that these name, and those that they name."""
    inside = [
        entry for code in codes for entry in (vars(code).values() if inspect.isclass(code) else (code,))
    ]
    waiting = [entry for entry in inside if inspect.isfunction(entry)]
    seen = set(waiting)
    while waiting:
        function = waiting.pop(0)
        for name in function.__code__.co_names:
            named = function.__globals__.get(name)
            if inspect.isfunction(named) and named not in seen and not named.__module__.startswith("torch."):
                seen.add(named)
                waiting.append(named)
                yield named
