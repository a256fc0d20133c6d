"""Where code lies that is not the user's: torch's, plait's, Python's own, and installed packages.

In: names of files. Out: whose they are. Folders end with a slash: torch_geometric lies beside torch.
"""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

import torch

TORCH = f"{Path(torch.__file__).parent}/"
PLAIT = f"{Path(__file__).parent}/"
PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = tuple(f"{sysconfig.get_paths()[kind]}/" for kind in ("purelib", "platlib"))


def is_package(filename: str) -> bool:
    """Whether a file is an installed package's."""
    return filename.startswith(_INSTALLED) or "/site-packages/" in filename or "/dist-packages/" in filename


def is_standard(filename: str) -> bool:
    """Whether a file is Python's own."""
    return filename.startswith((PYTHON, "<frozen")) and not is_package(filename)


def can_be_named(frame: FrameType) -> bool:
    """Whether a frame's line is one that people know a model by: the user's own, or that of a library of models.

    Packages that do not know torch (numpy, einops) are called by such lines.
    """
    filename = frame.f_code.co_filename
    if filename.startswith((PLAIT, TORCH, "<")) or is_standard(filename):
        return False
    return not is_package(filename) or _knows_torch(frame.f_globals.get("__name__", ""))


@cache
def _knows_torch(module: str) -> bool:
    values = vars(sys.modules[module]).values() if module in sys.modules else ()
    names = (
        getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "") for value in values
    )
    return any(str(name).partition(".")[0] == "torch" for name in names)
