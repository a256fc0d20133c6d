"""A job named on the command line.

Goes in: `path.py`, `path.py:function`, `module:function`, and arguments of the function. Comes out: the Job that the
function returns. As with `python path.py`, the file's folder stays at the front of sys.path, so that what the job
imports later is found too, and the module is registered, so that its classes can be found by name. Never runs anything
but the import and that one function.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import JobError, PlaitError, UsageError, did_you_mean
from plait.files.source import check_file, file_of
from plait.job.batch import describe
from plait.job.job import Job
from plait.job.named.arguments import bound_arguments
from plait.job.origin import RAISED, told

_DEFAULT = "job"


def load_job(reference: str, args: Mapping[str, Any] | None = None) -> Job:
    """The Job behind `path.py[:function]` or `module[:function]`; the function is `job` when none is named.

    `args` are its arguments; text is read as the parameter's own type: {"lr": "3e-4"}.
    """
    found, noun = _named(reference)
    given = _bound(found, args or {}, noun)
    hint = "; arguments of the function are given by --arg NAME=VALUE"
    job = _guarded(lambda: found(**given), noun, hint) if callable(found) else found
    if inspect.iscoroutine(job):
        job.close()  # else Python warns that it was never awaited
    if not isinstance(job, Job):
        raise JobError(
            f"{noun} returned {describe(job)}, not a plait.Job.", fix="return plait.Job(...) from it."
        )
    return job


def check_arguments(reference: str, several: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the function would be called with; refused where it does not take it. It is not called."""
    found, noun = _named(reference)
    return [_bound(found, args, noun) for args in several]


def _bound(found: Any, args: Mapping[str, Any], noun: str) -> dict[str, Any]:
    if callable(found):
        return bound_arguments(found, args, noun)
    if args:
        raise UsageError(
            f"{noun} is {describe(found)}, which takes no arguments (--arg {', '.join(args)}).",
            fix=f"make it a function: `def {noun.rpartition(':')[2]}({', '.join(args)}) -> plait.Job`.",
        )
    return {}


def _named(reference: str) -> tuple[Any, str]:
    """What a reference names, and what to call it."""
    source, name = _parts(reference)
    file = file_of(source)
    module = _module_of_file(file) if file is not None else _module_by_name(source)
    found = getattr(module, name, None)
    if found is None:
        others = _functions(module)
        raise UsageError(
            f"{source} has no function {name!r}; it has {', '.join(others) if others else 'no functions'}.",
            fix=f"{did_you_mean(name, others)}write {source}:FUNCTION with one that returns a plait.Job."
            if others
            else "define `def job() -> plait.Job` in it.",
        )
    return found, f"{source}:{name}"


def _parts(reference: str) -> tuple[str, str]:
    source, colon, name = reference.rpartition(":")
    if not colon:
        source, name = reference, _DEFAULT
    if not source or not name.isidentifier():
        raise UsageError(
            f"{reference!r} names no job.", fix="write path.py, path.py:function or module:function."
        )
    return source, name


def _module_of_file(path: Path) -> ModuleType:
    check_file(path)
    path = path.resolve()
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file.", fix="write path.py:function.")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _search_first(path.parent)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        _guarded(lambda: loader.exec_module(module), str(path))
    except BaseException:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's own name, unless that would hide another module."""
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is None and name.isidentifier() and name not in sys.stdlib_module_names:
        return name
    is_same = loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path
    return name if is_same else f"plait_job_{name}"


def _module_by_name(name: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        exists = importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        exists = False
    if not exists:
        hint = f"{name.replace('.', '/')}.py"
        fix = (
            f"write {hint} for that file."
            if Path(hint).is_file()
            else "write path.py:function, or install the package."
        )
        raise UsageError(f"there is no module {name}.", fix=fix)
    module: ModuleType = _guarded(lambda: importlib.import_module(name), name)
    if module.__file__ is None and Path(name).is_dir():  # a package of nothing: any folder is one to Python
        check_file(Path(name))
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _guarded(function: Callable[[], Any], noun: str, hint: str = "") -> Any:
    """function(), with the user's own line in the message when it fails."""
    try:
        return function()
    except PlaitError:
        raise
    except RAISED as error:
        raise JobError(
            f"{noun} failed{told(error)}",
            fix=f"{_meant(error)}mend that line{hint}.",
        ) from error


def _meant(error: BaseException) -> str:
    """What a field that no Job has was to be."""
    odd = re.search(r"\bJob\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    return did_you_mean(odd[1], [field.name for field in fields(Job)]) if odd else ""


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Job) or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
