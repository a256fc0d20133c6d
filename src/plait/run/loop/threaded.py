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
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.interpret.observer import WorkerObserver
from plait.run.link.thread_links import AbandonedMeetingError, Meetings
from plait.threads import start_thread


class Replicas(Machine):
    """The first rank, with the others beside it."""

    others: Sequence[Machine] = ()
    """The machines of the other ranks, in their order."""
    meetings: Meetings
    """Where they meet."""
    rows: Rows
    """Takes samples out of a batch."""

    def execute(self, program: Program, step: int, shares: Sequence[Share]) -> Iterator[None]:
        """One step of all ranks; `shares` hold the samples of all of them."""
        errors: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._guarded(
                    self._replica, other, program, step, self._cut(shares, other.rank), errors
                ),
                name=f"plait-replica-{other.rank}",
                daemon=True,
            )
            for other in self.others
        ]
        try:
            for thread in threads:
                start_thread(thread)
            yield from super().execute(program, step, self._cut(shares, 0))
        except BaseException as error:
            errors.append(error)
            self.meetings.abandon()
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        causes = [error for error in errors if not isinstance(error, AbandonedMeetingError)]
        if errors:
            raise (causes or errors)[0]

    def _guarded(self, work: Callable[..., None], *args: object) -> Callable[[], None]:
        errors = args[-1]
        assert isinstance(errors, list)

        def run() -> None:
            try:
                work(*args[:-1])
            except BaseException as error:
                errors.append(error)
                self.meetings.abandon()

        return run

    def _replica(self, machine: Machine, program: Program, step: int, shares: Sequence[Share]) -> None:
        device = machine.state.device
        if isinstance(machine.observer, WorkerObserver):
            machine.observer.use(program, machine.rank)
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for _ in machine.execute(program, step, shares):
                raise AssertionError("a thread waits inside its links, never outside")

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
