"""Collectives of torch.distributed that are under way in shared memory, and the thread that moves them along.

In: tasks of a `Meeting`. Out: works as torch has them, with futures. Whoever waits moves the task along itself.
"""

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.run.link.background import UnderWay
from plait.run.link.shm.meeting import Meeting
from plait.run.link.shm.task import Task

_TURN_S = 0.2
"""For which the thread waits for another rank before it looks around."""


class ShmWork(dist.Work):
    """A collective under way."""

    def __init__(self, meeting: Meeting, task: Task, outcome: Any) -> None:
        super().__init__()
        self._meeting, self._task, self._outcome = meeting, task, outcome
        self._future: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        task.told = self._tell

    def is_completed(self) -> bool:
        return self._task.is_done or self._error is not None

    def is_success(self) -> bool:
        return self._task.is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._task.is_done:
            if self._error is not None:
                raise self._error
            self._meeting.finish(self._task)
        return True

    def result(self) -> Any:
        self.wait()
        return self._outcome

    def get_future(self) -> "torch.futures.Future[Any]":
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._settle(self._future)
            return self._future

    def _tell(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: "torch.futures.Future[Any]") -> None:
        if self._error is not None:
            future.set_exception(RuntimeError(str(self._error)))
        else:
            future.set_result(self._outcome)


class Progress:
    """A thread that moves collectives along which nobody waits for; it starts with the first of them."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self._meeting = meeting
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._attend, name=name, daemon=True)
        self._is_started = False

    def wake(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        self._bell.put(True)

    def close(self) -> None:
        if self._is_started:
            self._bell.put(False)
            self._thread.join(5.0)

    def _attend(self) -> None:
        while self._bell.get():
            try:
                while not self._meeting.is_idle:
                    self._meeting.progress(_TURN_S)
            except Exception:  # whoever waits is told
                return


class Together(dist.Work):
    """Several collectives as one."""

    def __init__(self, works: Sequence[dist.Work], outcome: Any) -> None:
        super().__init__()
        self._works, self._outcome = works, outcome

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._outcome)


class HostWork(dist.Work):
    """A collective of several hosts, or a message between them, under way on a thread."""

    def __init__(self, started: UnderWay, outcome: Any) -> None:
        super().__init__()
        self._started, self._outcome = started, outcome

    def is_completed(self) -> bool:
        return self._started.is_done()

    def wait(self, timeout: Any = None) -> bool:
        self._started.result()
        return True

    def result(self) -> Any:
        self.wait()
        return self._outcome

    def get_future(self) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(error: BaseException | None) -> None:
            if error is not None:
                future.set_exception(RuntimeError(str(error)))
            else:
                future.set_result(self._outcome)

        self._started.tell(settle)
        return future


class Copied(dist.Work):
    """A message for a tensor that is not contiguous."""

    def __init__(self, work: dist.Work, tensor: Tensor, room: Tensor) -> None:
        super().__init__()
        self._work, self._tensor, self._room = work, tensor, room

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        with torch.no_grad():
            self._tensor.copy_(self._room.view(self._tensor.shape))
        return True
