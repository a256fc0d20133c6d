"""Processes that read batches beside the rank that trains on them.

Goes in: a function, and one request after another. Comes out: what the function makes of each, in the order of the
requests. A worker is a fork of this process, so it has the dataset as it is; batches come back over a socket without a
name, their tensors in memory that both map. Workers die with the process that forked them, however it ends; nobody else
can send here. Never used for streams, which only one process can walk.
"""

import contextlib
import gc
import io
import itertools
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError, PlaitError
from plait.job.origin import RAISED, told
from plait.processes import die_with_parent, fork

_ALIGN = 64
"""Bytes that a tensor in shared memory begins at a multiple of."""
_HEAD = struct.Struct("<QQQ")
"""A message: bytes of the memory that comes with it, of the tensors in it, and of the pickle after them."""
Read = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    pid: int
    line: socket.socket


class Pool:
    """Some workers; close() it. Made by the thread that lives as long as they are to."""

    def __init__(self, read: Read, workers: int, begin: Callable[[int], None] | None = None) -> None:
        """`begin` is called first in each worker, with its number."""
        assert workers >= 1
        self._workers: list[_Worker] = []
        self._closed = False
        sys.stdout.flush()
        sys.stderr.flush()
        for number in range(workers):
            self._workers.append(self._fork(read, partial(begin, number) if begin is not None else None))

    def _fork(self, read: Read, begin: Callable[[], None] | None) -> _Worker:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                ours.close()
                for worker in self._workers:  # so that they see when the parent hangs up
                    worker.line.close()
                _serve(read, theirs, begin)
            finally:
                os._exit(0)
        theirs.close()
        return _Worker(pid=pid, line=ours)

    def ordered(self, requests: Iterable[Any], ahead: int) -> Iterator[Any]:
        """What each request gives; every worker has up to `ahead` of them."""
        turns, asked, wanted = itertools.cycle(self._workers), deque[_Worker](), iter(requests)

        def ask(count: int) -> None:
            for worker, request in zip(itertools.islice(turns, count), wanted, strict=False):
                _send(worker.line, request)
                asked.append(worker)

        ask(ahead * len(self._workers))
        while asked:
            answer = self._answer(asked.popleft())
            ask(1)
            yield answer

    def _answer(self, worker: _Worker) -> Any:
        try:
            fine, value = _receive(worker.line)
        except (EOFError, OSError) as error:
            if self._closed:
                raise EOFError from error
            raise DataError(
                f"the data worker with process id {worker.pid} died {_ending(worker.pid)}.",
                fix="look for what ended it (memory: dmesg; a fault in a decoder), or try workers=0.",
            ) from error
        if not fine:
            what, fix = value
            raise DataError(what, fix=fix)
        return value

    def close(self) -> None:
        """End the workers, also in the middle of a sample."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.line.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
            worker.line.close()


def in_order(read: Read, requests: Sequence[Any], workers: int, ahead: int) -> Generator[Any, None, None]:
    """What each request gives, read by workers where there are any."""
    if not workers:
        yield from map(read, requests)
        return
    pool = Pool(read, min(workers, max(1, len(requests))))
    try:
        yield from pool.ordered(requests, ahead)
    finally:
        pool.close()


def _begun(read: Read, begin: Callable[[], None] | None) -> Read:
    """What reads once the worker has begun; where that fails, each request is told why."""
    try:
        if begin is not None:
            begin()
    except Exception as error:
        failed = error

        def failing(request: Any) -> Any:
            raise failed

        return failing
    return read


def _ending(pid: int) -> str:
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return f"of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with status {code}"
    return "for a reason that is not known"


def _serve(read: Read, line: socket.socket, begin: Callable[[], None] | None) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # which all processes are sent at once: the rank still trains
    gc.freeze()  # pages that are shared with the parent stay so
    torch.set_num_threads(1)
    read = _begun(read, begin)
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = _receive(line)
            try:
                answer = (True, read(request))
            except PlaitError as error:
                answer = (False, (error.what, error.fix))
            except RAISED as error:
                answer = (False, (told(error).removeprefix(": ").strip(), _FIX))
            sys.stdout.flush()
            sys.stderr.flush()
            _send(line, answer)


_FIX = "mend the dataset or the collate function for these samples."


class _Packer(pickle.Pickler):
    """Leaves tensors of the processor out of the pickle: (dtype, shape, offset) stands for each."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.tensors: list[Tensor] = []
        self.begins: list[int] = []
        self.size = 0
        self._known: dict[int, tuple[Any, ...]] = {}

    def persistent_id(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad:
            return None
        if id(value) not in self._known:
            self._known[id(value)] = (value.dtype, tuple(value.shape), self.size)
            self.tensors.append(value)
            self.begins.append(self.size)
            self.size += _aligned(value.numel() * value.element_size())
        return self._known[id(value)]


class _Unpacker(pickle.Unpickler):
    """Puts them back, over the memory that came along."""

    def __init__(self, text: bytes, memory: mmap.mmap, buffers: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(text), buffers=buffers)
        self._memory = memory

    def persistent_load(self, known: Any) -> Tensor:
        return _placed(self._memory, *known)


def _placed(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _send(line: socket.socket, value: Any) -> None:
    """All of it lies in memory that goes along, so that neither side ever waits for the other to read."""
    text, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    packer = _Packer(text, buffers)
    packer.dump(value)
    views = [buffer.raw() for buffer in buffers]
    packed = pickle.dumps((text.getvalue(), [view.nbytes for view in views]), protocol=5)
    parts = [memoryview(packed), *views]
    size = packer.size + sum(_aligned(part.nbytes) for part in parts)
    fd = os.memfd_create("plait-batch")
    try:
        os.ftruncate(fd, size)
        memory, offset = mmap.mmap(fd, size), packer.size
        for tensor, begin in zip(packer.tensors, packer.begins, strict=True):
            if tensor.numel():
                _placed(memory, tensor.dtype, tuple(tensor.shape), begin).copy_(tensor)
        for part in parts:
            memory[offset : offset + part.nbytes] = part
            offset += _aligned(part.nbytes)
        socket.send_fds(line, [_HEAD.pack(size, packer.size, len(packed))], [fd])
    finally:
        os.close(fd)


def _receive(line: socket.socket) -> Any:
    head, fds, _, _ = socket.recv_fds(line, _HEAD.size, 1, socket.MSG_WAITALL)
    if len(head) < _HEAD.size:
        raise EOFError
    size, offset, length = _HEAD.unpack(head)
    try:
        memory = mmap.mmap(fds[0], size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fds[0])
    text, sizes = pickle.loads(memory[offset : offset + length])
    views, offset = [], offset + _aligned(length)
    for count in sizes:
        views.append(memoryview(memory)[offset : offset + count])
        offset += _aligned(count)
    return _Unpacker(text, memory, views).load()
