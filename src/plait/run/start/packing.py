"""Packing the caller's `main` for a fresh interpreter.

In: any callable: a lambda, a closure, something from `__main__`, a notebook or a file loaded by its path.
Out: a file without a name that `cloudpickle.loads` reads in the worker. It is read by nobody but the workers
that this process started.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from plait.run.start.child import Main
from plait.run.start.memory_file import anonymous_file


def write_payload(main: Main) -> int:
    """Pickle `main` into a file without a name; modules that no import finds again travel by value."""
    with _by_value(_unimportable_modules()):
        pickled: bytes = cloudpickle.dumps(main)
    payload = anonymous_file("plait-main")
    with open(payload, "wb", closefd=False) as file:
        file.write(pickled)
    return payload


def _unimportable_modules() -> list[ModuleType]:
    # A job file loaded by its path (`plait run path.py:job`), a test module: in sys.modules, but nowhere on
    # sys.path.
    found = []
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not isinstance(getattr(module, "__file__", None), str):
            continue
        parent = sys.modules.get(name.rpartition(".")[0])
        path = getattr(parent, "__path__", None) if "." in name else None
        if getattr(module, "__name__", None) == name and not _can_be_imported(name, path):
            found.append(module)
    return found


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    new = [module for module in modules if module.__name__ not in known]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str, path: Any) -> bool:
    """Whether a fresh process would find the module; those whose packages play tricks are taken to be installed."""
    try:
        return PathFinder.find_spec(name, path) is not None
    except Exception:  # a package may put anything in sys.modules and __path__
        return True
