"""What `save_state` writes and `load_state` reads: states of what was prepared, and every rank's generator."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.errors import UsageError
from plait.run.own_loop import ShareLoader


def save(
    folder: Path, kept: Mapping[str, Sequence[Any]], loaders: Sequence[ShareLoader], process: int
) -> None:
    """This rank's part; the states are the main process's."""
    folder.mkdir(parents=True, exist_ok=True)
    if process == 0:
        states = {kind: [one.state_dict() for one in entries] for kind, entries in kept.items()}
        torch.save({**states, "epochs": [loader.epoch for loader in loaders]}, folder / "state.pt")
    torch.save(torch.get_rng_state(), folder / f"random-{process}.pt")


def load(
    folder: Path, kept: Mapping[str, Sequence[Any]], loaders: Sequence[ShareLoader], process: int
) -> None:
    """Into the same objects, on any number of ranks."""
    if not (folder / "state.pt").is_file():
        raise UsageError(f"{folder} holds no state.pt.", fix="name a folder that save_state wrote.")
    saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    for kind, entries in kept.items():
        if len(saved[kind]) != len(entries):
            raise UsageError(
                f"{folder} has {len(saved[kind])} {kind}; {len(entries)} were prepared.",
                fix="prepare the same objects as the script that saved it.",
            )
        for one, state in zip(entries, saved[kind], strict=True):
            one.load_state_dict(state)
    for loader, epoch in zip(loaders, saved["epochs"], strict=False):
        loader.set_epoch(epoch)
    own = folder / f"random-{process}.pt"
    if own.is_file():
        torch.set_rng_state(torch.load(own, weights_only=True))
