"""All ranks of a plan whose ranks are threads, as the machine of the first one.

In: the program of all of them, the samples of a whole step. Out: what the first rank makes of it, while every other one
has done its part on a thread of its own. They are started anew every step, as torch.nn.DataParallel does it; a failure
of one is raised here, and ends all.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from plait.job.data.reader import Rows
from plait.job.data.share import Share
from plait.program.cost.layouts import prefers_channels_last
from plait.program.program import Program
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.interpret.observer import WorkerObserver
from plait.run.link.thread_links import AbandonedMeetingError, Meetings, ThreadLinks
from plait.run.loop.task import Task
from plait.run.loop.watch import Watch
from plait.run.setup.device import device_of
from plait.run.start.launch import Seat
from plait.threads import start_thread


class Replicas(Machine):
    """The first rank, with the others beside it."""

    others: Sequence[Machine] = ()
    """The machines of the other ranks, in their order."""
    rows: Rows
    """Takes samples out of a batch."""

    def add_others(self, task: Task, seat: Seat, program: Program, rows: Rows) -> None:
        """Make the other ranks ready; what they compute with is given to them before every step."""
        self.rows, self.segments.captured = rows, None  # a CUDA graph is captured by one thread alone
        self._watches, others = list[Watch](), list[Machine]()
        for rank in range(1, task.plan.mesh.size):
            device = device_of(task.device, rank)
            last = prefers_channels_last(task.plan, program, device)
            state = ModelState(task.job, device, task.dtype, channels_last=last)
            state.lay_beside(program.beside)
            state.narrow, state.averages = self.state.narrow, None
            self._watches.append(Watch.of(task, seat, device, rank))
            links = ThreadLinks(self._meetings, rank)
            others.append(Machine(rank, state, links, self._watches[-1].observer, self.segments.compiled))
        self.others = others

    def write_traces(self, task: Task, seat: Seat, program: Program) -> None:
        """What the other ranks have recorded."""
        for watch in self._watches:
            watch.write(task, seat, program, self.state.steps_done)

    @property
    def _meetings(self) -> Meetings:
        assert isinstance(self.links, ThreadLinks)
        return self.links.meetings

    def execute(self, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        """One step of all ranks; `shares` hold the samples of all of them."""
        errors: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._guarded(other, program, step, self._cut(shares, other.rank), errors),
                name=f"plait-replica-{other.rank}",
                daemon=True,
            )
            for other in self.others
        ]
        before = torch.get_num_threads()
        torch.set_num_threads(max(1, before // (1 + len(threads))))  # as many in all as one rank would have
        try:
            for thread in threads:
                start_thread(thread)
            yield from super().execute(program, step, self._cut(shares, 0))
        except BaseException as error:
            errors.append(error)
            self._meetings.abandon()
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            torch.set_num_threads(before)
        causes = [error for error in errors if not isinstance(error, AbandonedMeetingError)]
        if errors:
            raise (causes or errors)[0]

    def _guarded(
        self, machine: Machine, program: Program, step: int, shares: list[Share], errors: list[BaseException]
    ) -> Callable[[], None]:
        """What a thread runs: a failure is kept, and nobody waits for it."""

        def run() -> None:
            try:
                _replica(machine, program, step, shares)
            except BaseException as error:
                errors.append(error)
                self._meetings.abandon()

        return run

    def _cut(self, shares: Sequence[Share], rank: int) -> list[Share]:
        """One rank's samples of the micro-batches of a step."""
        found = []
        for share in shares:
            count, offset = share.sizes[rank], sum(share.sizes[:rank])
            found.append(
                replace(
                    share,
                    batch=self.rows(share.batch, offset, count),
                    ids=share.ids[offset : offset + count],
                    offset=offset,
                )
            )
        return found


def _replica(machine: Machine, program: Program, step: int, shares: list[Share]) -> None:
    """One step of another rank, on its own thread."""
    device = machine.state.device
    if isinstance(machine.observer, WorkerObserver):
        machine.observer.use(program, machine.rank)
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for _ in machine.execute(program, step, shares):
            raise AssertionError("a thread waits inside its links, never outside")
