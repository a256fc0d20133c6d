"""Memory that processes of one host share: a file without a name for each rank, which the others open through /proc.

In: sizes. Out: regions as tensors, and words that ranks meet by. The memory vanishes with its processes. It is never
used on processors that show stores in another order than they were made, which the counters rely on.
"""

import mmap
import os
import platform
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from plait.run.link.shm.core import HEADER_BYTES
from plait.run.link.shm.rows import SLOT_BYTES
from plait.run.start.memory_file import anonymous_file

HEAD_WORDS = 8
"""Of a file: its owner's bell, in words of 64 bits."""
TABLE_WORDS = 4 * 512
"""After it: the table of messages."""
_HEAD_BYTES = 8 * (HEAD_WORDS + TABLE_WORDS)
_MEETING_BYTES = HEADER_BYTES + 2 * SLOT_BYTES
"""Of one rank in a group."""


class Region:
    """A piece of one rank's shared file, mapped here."""

    __slots__ = ("bytes", "offset", "size")

    def __init__(self, file: int, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.bytes = torch.frombuffer(mmap.mmap(file, size, offset=offset), dtype=torch.uint8)

    def tensor(self, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        """Elements from byte `start` on, as a flat tensor."""
        return self.bytes[start : start + count * dtype.itemsize].view(dtype)


class Arena:
    """One rank's shared file: its bell, a table of messages, a header and slots for each group that it meets, regions.

    Only its owner makes it longer.
    """

    def __init__(self, file: int, pid: int, num_meetings: int) -> None:
        self.file = file
        self.pid = pid
        self._regions: dict[int, Region] = {}
        self._meetings = _rounded(_HEAD_BYTES)
        self._end = self._meetings + num_meetings * _MEETING_BYTES
        head = self.region(0, self._meetings).bytes
        self.bell = head[: 8 * HEAD_WORDS]
        """Rung when something came for the owner, and how many of its threads sleep."""
        self.table = memoryview(head.numpy()).cast("Q")[HEAD_WORDS : HEAD_WORDS + TABLE_WORDS]  # type: ignore[arg-type]
        """Messages that the owner has sent."""

    @classmethod
    def create(cls, num_meetings: int) -> Self:
        """The own one."""
        file = anonymous_file("plait-gradients")
        os.posix_fallocate(file, 0, _rounded(_HEAD_BYTES) + num_meetings * _MEETING_BYTES)
        return cls(file, os.getpid(), num_meetings)

    def meeting(self, index: int) -> tuple[Tensor, list[Tensor]]:
        """The header and the two slots of one group."""
        region = self.region(self._meetings + index * _MEETING_BYTES, _MEETING_BYTES)
        slots = [HEADER_BYTES, HEADER_BYTES + SLOT_BYTES]
        return region.bytes[:HEADER_BYTES], [region.bytes[start : start + SLOT_BYTES] for start in slots]

    def extend(self, num_bytes: int) -> Region:
        """A new region. The memory is claimed at once: a full host is an error here, not a crash at a later write."""
        size = _rounded(max(1, num_bytes))
        os.posix_fallocate(self.file, self._end, size)
        region = self._regions[self._end] = Region(self.file, self._end, size)
        self._end += size
        return region

    def region(self, offset: int, size: int) -> Region:
        """A region that its owner has told of."""
        if offset not in self._regions:
            self._regions[offset] = Region(self.file, offset, size)
        return self._regions[offset]


def open_arenas(own: Arena, rank: int, told: Sequence[tuple[int, int]], num_meetings: int) -> list[Arena]:
    """The memory of all ranks, from the (file, process) of each."""
    return [
        own if peer == rank else Arena(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), pid, num_meetings)
        for peer, (file, pid) in enumerate(told)
    ]


def flat_of(tensor: Tensor, *, read: bool = True) -> Tensor:
    """The elements in order: the tensor's own memory where it is contiguous."""
    if tensor.is_contiguous():
        return tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    if read:
        return tensor.detach().contiguous().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype)


def is_suitable() -> bool:
    """Linux, for files without a name; and a processor that shows stores in their order, as the counters rely on it."""
    return os.path.exists("/proc/self/ns/pid") and platform.machine() in ("x86_64", "AMD64", "i686")


def host() -> str:
    """Equal for processes that see each other's ids."""
    if not is_suitable():
        return ""
    said = os.environ.get("PLAIT_HOST", "")  # parts of one machine that are to be hosts of their own
    return f"{machine()} {os.readlink('/proc/self/ns/pid')} {said}"


def machine() -> str:
    """Equal for processes that share processors and memory, whatever they see of each other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that its parent has not yet noticed."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _rounded(num_bytes: int) -> int:
    page = mmap.ALLOCATIONGRANULARITY
    return -(-num_bytes // page) * page
