"""The company of a worker that marches in step with all others: what they do together.

In: steps that all of them make. Out: the journal and checkpoints, written by rank 0; measurements over all ranks. What
is measured and saved is what they hold together: the parts of a model, copies of it, or the mean of workers that train
on their own.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.errors import CheckpointError
from plait.job.data.share import LoadedStep
from plait.run.checkpoint.saver import Notice, Saver
from plait.run.checkpoint.state import TrainingState, snapshot
from plait.run.checkpoint.store import save_checkpoint
from plait.run.eager.batch_norm import fit_batch_norm
from plait.run.hold.away.copies import copies_of
from plait.run.hold.worker_states import of_one, with_workers
from plait.run.interpret.machine import Machine
from plait.run.link.fetch import ProcessShardFetcher, add_up
from plait.run.loop.compiling import COMPILED_SINCE
from plait.run.loop.task import Task
from plait.run.loop.watch import Watch
from plait.run.loop.worker import write_gradients
from plait.run.prepare.programs import Programs
from plait.run.record.evaluate import Kept, Progress, aim_of, evaluate
from plait.run.record.ledger import Ledger
from plait.run.record.shares import ShareLog
from plait.run.start.launch import Seat
from plait.units import format_bytes

_LATEST = 4
"""Steps by which rank 0, which tells of each at once, may be behind another rank."""
_SAVED = "saved before the run was spoiled"
"""The key under which rank 0 says so."""


class Together:
    """All ranks at one step."""

    def __init__(
        self,
        task: Task,
        seat: Seat,
        programs: Programs,
        machine: Machine,
        watch: Watch,
        ledger: Ledger | None,
        progress: dict[str, Any],
    ) -> None:
        """`ledger`: rank 0's; `progress`: of the run that this one continues."""
        self.task, self.seat, self.programs = task, seat, programs
        self.machine, self.watch, self.ledger = machine, watch, ledger
        self.places: Iterable[tuple[int, int]] | None = None
        self.stopped: str | None = None
        self.evaluation: dict[str, float] = {}
        self._state = machine.state
        self._progress = Progress(task.job.until)
        self._progress.load(progress)
        self._kept = Kept(aim_of(task.keep_best, task.job) if task.keep_best is not None else None)
        self._kept.load(progress)
        self.is_best = False
        self._saved = -1
        self._fitted = 0
        """Times that weights were taken for the average when batch norm saw it last."""
        self._gradients: list[dict[str, Tensor]] = []
        self._latest: deque[dict[str, Any]] = deque()
        """What was told of the last steps, in case that rank 0 is lost."""
        self._met: TrainingState | None = None
        """What workers that train on their own agreed on when they met last."""
        if task.record_gradients:
            machine.store.on_ready = self._keep_gradients
        first = seat.rank == 0
        self._saver = (
            Saver(
                task.folder / "checkpoints",
                keep=task.keep,
                best_step=self._kept.step,
                resumed=task.resume,
                time_limit_s=task.checkpoint_timeout_s,
            )
            if first
            else None
        )

    def awaits_save(self, step: int) -> bool:
        """Never: it takes part in every save."""
        return False

    def await_save(self, step: int) -> None:
        """Never asked for."""

    def did(self, loaded: LoadedStep) -> None:
        """All have. Where workers that train on their own have met in this step, each keeps what they agreed on: the
        rest goes with a worker that is lost."""
        plan, task = self.task.plan, self.task
        met = plan.agreement.averages and plan.agreement.due(loaded.step, loaded.ends_epoch)
        if met and task.outlives and task.holds_all:
            saved = self._state.to_checkpoint(self._extra())
            self._met = snapshot(of_one(saved, self.machine.averaging, plan))
            self._forget()

    def _forget(self) -> None:
        """What is known of steps that rank 0 has told of for sure."""
        while len(self._latest) > _LATEST:
            self._latest.popleft()

    def tell(self, loaded: LoadedStep, told: dict[str, Any]) -> None:
        """Rank 0 writes it down for all."""
        outlives = self.task.outlives
        if self.ledger is None and not outlives:
            return
        ids = loaded.ids.tolist() if self.task.record_samples else []
        share = told | {"share": 0, "samples": len(loaded.ids), "ids": ids}
        if outlives:
            self._latest.append(share)
            if not self.task.plan.agreement.averages:
                self._forget()
        if self.ledger is not None:
            self.ledger.take_share(0, share)
            if outlives:
                self.ledger.flush()

    def skip(self, step: int) -> None:
        """The others see it by themselves."""

    def measures(self, loaded: LoadedStep) -> bool:
        """All of them, or none."""
        every = self.task.job.evaluate_every
        return loaded.ends_epoch if every is None else (loaded.step + 1) % every == 0

    def measure(self, step: int, epoch: int) -> None:
        """Each measures its part of the held-out data."""
        held_out = self.programs.held_out
        assert held_out is not None
        self._fit_average()
        state, seat = self._state, self.seat
        room = state.room(self.task.limit_bytes, self._fetch)
        if room is not None and seat.rank == 0 and not self.evaluation:
            seat.emit({"notice": f"evaluation has room for {format_bytes(room)} of other ranks' parameters, which is"
                       " less than the model: the rest is fetched as it is used, for every batch."})  # fmt: skip
        with (
            self.watch.observer.beside(step, "evaluate"),
            self.machine.averaging.shown(self.task.plan, self._add_up),
            self._average_shown(),
            state.whole_model(self._fetch, room),
        ):
            alike = room is not None
            self.evaluation = evaluate(state, held_out, seat.rank, seat.ranks, self._add_up, alike=alike)
        if self.ledger is not None:
            self.ledger.write_evaluation({"step": step, "epoch": epoch, "evaluate": self.evaluation})
        self._state.observe(self.evaluation)
        self.stopped = self._progress.reached(self.evaluation) or self.stopped
        self.is_best = self._kept.take(self.evaluation, self._state.steps_done)

    def _average_shown(self) -> AbstractContextManager[None]:
        rule, averages = self.task.job.average, self._state.averages
        return (
            averages.shown() if averages is not None and rule is not None and rule.evaluate else nullcontext()
        )

    def _fit_average(self) -> None:
        """Let batch norm see averaged weights before anybody looks at them, where the job asks for it."""
        rule, averages, state = self.task.job.average, self._state.averages, self._state
        if rule is None or averages is None or not rule.update_bn or self._fitted == averages.count:
            return
        source = self.programs.captures.source
        with (
            self.watch.observer.beside(state.steps_done - 1, "evaluate"),
            averages.shown(),
            state.whole_model(self._fetch),
        ):
            fit_batch_norm(state, source, rule.update_bn, self.seat.rank, self.seat.ranks, self._add_up)
            for name, buffer in state.buffers.items():
                averages.tensors[name].copy_(buffer)
        self._fitted = averages.count

    def ends(self, loaded: LoadedStep) -> bool:
        """Whether an interrupted run ends here, which all ranks must know of: it lasts until they have met."""
        ahead = self.task.plan.agreement.round
        if ahead is None and not loaded.ends_epoch:
            return False
        return self.seat.board.stop_after(loaded.step, ahead or 1)

    def save(self) -> None:
        """Put together what all have; rank 0 writes it."""
        plan, state, averaging = self.task.plan, self._state, self.machine.averaging
        averages = plan.agreement.averages
        if self._saved == state.steps_done or (
            self._saver is None and state.holding is None and not averages
        ):
            return
        self._fit_average()
        if self.ledger is not None:
            self.ledger.flush()  # a run resumed from here must find what led here, whatever kills this one
        with self.watch.observer.beside(state.steps_done - 1, "checkpoint"):
            with averaging.shown(plan, self._add_up):
                saved = state.to_checkpoint(self._extra(), self._fetch)
                saved = snapshot(saved) if averages else saved  # before each has its own back
            saved = with_workers(saved, state, averaging, plan, self.seat.rank)
            if self._saver is not None:
                self._tell(
                    self._saver.poll()
                )  # of those before: what becomes of this one is asked at the end
                self._saver.submit(saved, is_best=self.is_best)
        self._saved, self.is_best = state.steps_done, False

    def abandon(self) -> None:
        """Finish writing what was saved; ranks that ended sooner would end the one that writes."""
        if self._saver is not None:
            self._tell(self._saver.close())
        if self.seat.ranks > 1:
            if self.seat.rank == 0:
                self.seat.store.set(_SAVED, b"")
            else:
                self.seat.store.wait([_SAVED], timedelta(seconds=2 * self.task.checkpoint_timeout_s))

    def hand_over(self, error: Exception) -> dict[str, Any]:
        """Others are lost: say what this rank holds, and write it down where it is asked to; `error` where it does not
        hold everything. Between two updates every rank of such a plan holds the same, or did when all met last."""
        alone = self.task.plan.agreement.averages
        if not self.task.holds_all or (self._met is None if alone else self.machine.commits.is_updating):
            raise error
        if not alone:
            self.machine.commits.undo()
        if self._saver is not None:
            self._tell(self._saver.close())
        if self.ledger is not None:
            self.ledger.flush()
        self.seat.emit({"holds": self._state.steps_done if self._met is None else self._met.step})
        self.seat.wait_to_give()
        self.seat.emit({"handed": str(self._write_alone())})
        return {}

    def _write_alone(self) -> Path:
        """What all ranks hold, and what is known of the last steps, of which rank 0 may not have told."""
        log = ShareLog(self.task.folder, self.seat.rank)
        for told in self._latest:
            log.write({"share": told})
        log.close()
        task = self.task
        saved = self._met if self._met is not None else self._state.to_checkpoint(self._extra())
        return save_checkpoint(task.folder / "checkpoints", saved, keep=task.keep, best_step=self._kept.step)

    def close(self) -> dict[str, Any]:
        """Measure and save the end."""
        job, state = self.task.job, self._state
        if job.evaluate is not None and not self.evaluation and self.stopped != "interrupted":
            self.measure(state.steps_done - 1, 0)
        self.save()
        self.seat.board.enter(state.steps_done - 1, -1, "finish")
        notices = self._saver.close() if self._saver is not None else []
        self._tell(notices)
        if self.task.record_gradients:
            self._write_proof()
        lost = [n.message for n in notices if n.kind != "saved" and n.step == state.steps_done]
        if lost:
            raise CheckpointError(f"the last checkpoint was not saved: {lost[-1]}")
        counted: dict[str, Any] = {"evaluation": self.evaluation, "bytes_sent": self.machine.bytes_sent}
        if self.ledger is not None:
            self.ledger.close()
            counted["losses"] = self.ledger.in_order()
            counted["updates"] = len(counted["losses"]) * (
                self.task.plan.mesh.size if self.task.plan.agreement.alone else 1
            )
        return counted

    def _add_up(self, tensor: Tensor) -> Tensor:
        return add_up(tensor, self.seat.ranks, self._state.device)

    @property
    def _fetch(self) -> ProcessShardFetcher | None:
        holding = self._state.holding
        return ProcessShardFetcher(holding.layout) if holding is not None else None

    def _extra(self) -> dict[str, Any]:
        compiled = self.machine.segments.compiled
        since = (
            {} if compiled is None or compiled.first_step is None else {COMPILED_SINCE: compiled.first_step}
        )
        return self.task.kept(self._progress.state() | self._kept.state() | since)

    def _tell(self, notices: list[Notice]) -> None:
        for notice in notices:
            self.seat.emit(notice.event())

    def _keep_gradients(self, gradients: dict[str, Tensor]) -> None:
        holding, fetch = self._state.holding, self._fetch
        if holding is not None and fetch is not None:
            names = sorted({name for told in fetch.tell(list(gradients)) for name in told})
            nothing = torch.empty(0, dtype=self.task.dtype, device=self._state.device)
            gradients = {n: holding.assemble(n, gradients.get(n, nothing), fetch) for n in names}
        if self.seat.rank == 0:
            self._gradients.append(
                {name: g.detach().cpu().clone().contiguous() for name, g in gradients.items()}
            )

    def _write_proof(self) -> None:
        """What a verification compares and a checkpoint does not hold: gradients, and every rank's own copies."""
        write_gradients(self.task, self._gradients)  # of the first rank
        if self.task.plan.agreement.mix is None:  # those differ until they meet
            rank = self.seat.rank
            held = {n: t.cpu().clone().contiguous() for n, t in copies_of(self._state, rank).items()}
            save_file(held, self.task.folder / f"held-{rank:06d}.safetensors")
