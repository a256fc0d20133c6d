"""Small disks for folders of runs: made, filled or turned read-only by faults, mended and let go of.

In: a folder. Out: a disk mounted there, where this user may; else nothing.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Literal

DISK_BYTES = 16 << 20
"""Of a disk that is filled: a few checkpoints of the job."""
Disk = Literal["memory", "ext4"]
"""Of a run's folder: one that can be filled; one that turns read-only, as after an error of the device."""


def can_mount(place: Path, disk: Disk) -> bool:
    """Whether this user may make such a disk."""
    place.mkdir()
    if not mount(place, disk):
        return False
    unmount(place)
    return True


def mount(place: Path, disk: Disk) -> bool:
    """Make a small disk of a folder."""
    if disk == "memory":
        return _done("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(place))
    image = _image(place)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    return _done("mkfs.ext4", "-q", "-F", str(image)) and _done("mount", "-o", "loop", str(image), str(place))


def mend(place: Path, disk: Disk) -> None:
    """Room again, or the right to write."""
    (place / "filler").unlink(missing_ok=True)
    if disk == "ext4":
        unmount(place)
        image = _image(place)
        # another file is another disk, though somebody's mount namespace may hold the broken one for longer
        shutil.copyfile(image, copy := image.with_suffix(".again"))
        copy.replace(image)
        _done("e2fsck", "-fy", str(image))
        assert _done("mount", "-o", "loop", str(image), str(place))


def unmount(place: Path) -> None:
    """Let go of it."""
    if not _done("umount", str(place)):
        _done("umount", "-l", str(place))


def _image(place: Path) -> Path:
    return place.with_name(f"{place.name}.ext4")


def _done(*order: str) -> bool:
    try:
        return subprocess.run(order, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
