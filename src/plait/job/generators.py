"""The random generators of whoever calls plait stay as they were.

In: nothing. Out: a block, or a function, that may seed torch, random and numpy as it likes.
"""

import hashlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

from plait.folders import PLAIT, TORCH

_BUILD = f"{PLAIT}job/build.py"


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give the caller's generators back as they were; also a decorator."""
    numpy = sys.modules.get("numpy")
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_cuda = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
        if of_cuda is not None:
            torch.cuda.set_rng_state_all(of_cuda)


@contextmanager
def noted_draws() -> Iterator[list[str]]:
    """What code does about random numbers that nobody finds in a generator's state when it has ended, as it does it."""
    told: list[str] = []
    thread = threading.get_ident()  # others, such as those that read data, draw as they like
    urandom, generator = vars(random)["_urandom"], torch.random.default_generator  # type: ignore[attr-defined]

    def ask(size: int) -> bytes:
        if threading.get_ident() == thread and not _builds(sys._getframe(1)):
            told.append("draws random numbers of the system (a generator without a seed), each time others")
        return urandom(size)  # type: ignore[no-any-return]

    class Noted:
        def __getattr__(self, name: str) -> Any:
            caller = sys._getframe(1)
            seeds = name in ("manual_seed", "seed") and threading.get_ident() == thread
            if seeds and not _is_ours(caller) and not _builds(caller):
                told.append("seeds torch's random numbers itself (torch.manual_seed)")
            return getattr(generator, name)

    with (
        mock.patch.object(random, "_urandom", ask),
        mock.patch.object(torch.random, "default_generator", Noted()),
    ):
        yield told


def _is_ours(frame: FrameType | None) -> bool:
    """Whether plait itself called torch here, as it does before it builds a model."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PLAIT)


def _builds(frame: FrameType | None) -> bool:
    """Whether a model is made here, which is no part of a step: layers that run eagerly are those of a real one."""
    while frame is not None and frame.f_code.co_filename != _BUILD:
        frame = frame.f_back
    return frame is not None


@contextmanager
def seeded_alike(seed: int) -> Iterator[None]:
    """What Python's `random` and numpy draw inside depends on the seed alone; afterwards they are as before."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def seed_for(text: str) -> None:
    """Seed torch on the processor, random, and numpy where it is in use, from what a draw is for."""
    seed = number_of(text)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """What `torch.manual_seed` does, which asks every kind of device that there might be: 100 times as long."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def number_of(text: str) -> int:
    """A seed for what the text names. A hash, not a sum: otherwise epoch 1 of seed 0 would be epoch 0 of seed 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
