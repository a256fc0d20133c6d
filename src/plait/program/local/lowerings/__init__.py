"""Local forms of ops, one small file per family, all entered in one table."""

from importlib import import_module
from pkgutil import iter_modules

REGISTERED = tuple(import_module(f"{__name__}.{family.name}") for family in iter_modules(__path__))
"""Importing them enters their lowerings: a new file is enough."""
