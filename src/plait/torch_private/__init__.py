"""Everything of torch that torch does not promise to keep: one small module for each topic, and nowhere else.

In: nothing of ours. Out: torch's private names under names of ours, so that a new torch is tried and mended here. A
test reads the whole package and fails where a private name of torch is used outside of this folder. Names of aten ops
are not private: a captured graph is made of them. Whoever comes here has torch's cache where nobody else can write.
"""

from plait.torch_private.cache import own_cache

TRIED = ("2.11", "2.13")
"""Versions of torch with which every module of this folder was tried: the oldest that plait takes, and the newest."""

own_cache()  # torch reads it at its own pleasure
