"""Local forms of ops, one small file per family, all entered in one table."""

from plait.program.lowerings import losses, norms, random, shapes

REGISTERED = (losses, norms, random, shapes)
"""Importing them enters their lowerings."""
