"""What happens around a run, for code of your own: `plait.train(job, watching=Watching(callbacks=[Mine()]))`.

In: the events that a run tells of. Out: calls of `Callback`s, in the process that called `plait.train`: never in a
worker, so a callback needs no care of ranks, sees each event once, and may keep state. It sees numbers, not tensors.
"""

import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import DiskError, UsageError, did_you_mean
from plait.files.write import open_to_append
from plait.options import Listener


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """All is prepared; the first step comes next."""

    folder: Path
    """The run folder."""
    start_step: int
    """The first step's number: 0, or where a run is gone on with."""
    total_steps: int | None
    """Where it is to end; None: where the data ends."""
    about: Mapping[str, Any]
    """Model, parameters, plan, mesh, device, batch: what the first lines of `plait run` say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """The weights were updated."""

    step: int
    """Its number, from 0, as in metrics.jsonl."""
    epoch: int
    """The pass over the data that it belongs to, from 0."""
    loss: float
    """Over the whole batch, all ranks together."""
    lr: float
    """Of the first group of parameters."""
    samples_per_s: float
    """Of all ranks together."""
    step_s: float
    """How long it took."""
    grad_norm: float | None
    """Before clipping; None: the job does not clip."""
    memory_bytes: int
    """The most that a rank has used so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The model was measured on the held-out data."""

    step: int
    """After which."""
    epoch: int
    """In which."""
    metrics: Mapping[str, float]
    """`loss` and the job's own, over all of the data, each sample counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone:
    """A pass over the data is over."""

    epoch: int
    """Which, from 0."""
    step: int
    """Its last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is on the disk."""

    step: int
    """Steps done in it."""
    path: Path
    """Its folder."""
    is_best: bool
    """Whether it was saved for the best value of `keep_best`."""
    write_s: float
    """How long it was written, while training went on."""
    pause_s: float
    """How long training waited for it: the time of a copy in memory."""
    deleted: tuple[str, ...]
    """Older checkpoints that made way for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The run has failed; the error is raised after this."""

    error: BaseException
    """What `plait.train` will raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The run is over, by itself or because it was stopped."""

    stopped: str | None
    """Why it ended early; None: it came to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Return one from `on_step`, `on_evaluation`, `on_epoch` or `on_save` to end the run.

    One rank ends at once; several go on while they hear of it: the step under way is finished, and the one after it, so
    that all end at the same. A checkpoint is saved then, as at every end.
    """

    reason: str
    """What `Result.stopped` will say."""


class Callback:
    """Methods to override; each is called in the process that called `plait.train`, after what it names.

    One that raises is told of, with its traceback in the run folder, and not called again: the run goes on.
    """

    def __init_subclass__(cls) -> None:
        """Refuse a method that would never be called."""
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in known:
                raise UsageError(
                    f"{cls.__name__}.{name} would never be called: there is no such event.",
                    fix=f"{did_you_mean(name, known)}the methods are {', '.join(known)}.",
                )

    def on_start(self, event: Started) -> None:
        """Before the first step."""

    def on_step(self, event: StepDone) -> Stop | None:
        """After a step, which is the end of its accumulation too: micro-batches have no event of their own."""
        return None

    def on_evaluation(self, event: Evaluated) -> Stop | None:
        """After a measurement on the held-out data."""
        return None

    def on_epoch(self, event: EpochDone) -> Stop | None:
        """After the last step of a pass over the data."""
        return None

    def on_save(self, event: Saved) -> Stop | None:
        """After a checkpoint is on the disk, which is some steps after it was taken."""
        return None

    def on_failure(self, event: Failed) -> None:
        """Before the error is raised."""

    def on_end(self, event: Ended) -> None:
        """After the last checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """Who is told how a run goes."""

    callbacks: Sequence[Callback] = ()
    """Code of your own, called in the process that trains, see `plait.Callback`."""
    listener: Listener | None = None
    """Is told everything as it happens."""
    progress: bool | None = None
    """Show how it goes: True everywhere, False nowhere; None: in a terminal or notebook where nobody listens."""


class Callbacks:
    """Gives the events of one run to its callbacks, and on to whoever else listens."""

    def __init__(self, callbacks: Sequence[Callback], listener: Listener) -> None:
        self._living = list(callbacks)
        self._listener = listener
        self._about: Mapping[str, Any] = {}
        self._folder: Path | None = None
        self.stop: str | None = None
        """Why one of them wants the run to end."""

    @property
    def wants_steps(self) -> bool:
        """Whether one of them is to hear of every step, not only of some."""
        names = ("on_step", "on_epoch")
        return any(
            getattr(type(one), name) is not getattr(Callback, name) for one in self._living for name in names
        )

    def __call__(self, event: dict[str, Any]) -> None:
        """Hear of something, as any listener."""
        self._listener(event)
        if "run" in event:
            self._about = event["run"]
        if "started" in event:
            self._folder = Path(event["started"])
            self._call(
                "on_start",
                Started(
                    folder=self._folder,
                    start_step=event["start_step"],
                    total_steps=event["total_steps"],
                    about=self._about,
                ),
            )
        if "saved" in event:
            saved = event["saved"]
            self._call(
                "on_save", Saved(**saved | {"path": Path(saved["path"]), "deleted": tuple(saved["deleted"])})
            )
        metrics = event.get("metrics", {})
        if "evaluate" in metrics:
            self._call(
                "on_evaluation",
                Evaluated(step=metrics["step"], epoch=metrics["epoch"], metrics=metrics["evaluate"]),
            )
        elif "loss" in metrics:
            self._step(metrics)

    def fail(self, error: BaseException) -> None:
        """The run has failed."""
        self._call("on_failure", Failed(error=error))

    def end(self, stopped: str | None) -> None:
        """The run is over."""
        self._call("on_end", Ended(stopped=stopped))

    def _step(self, metrics: Mapping[str, Any]) -> None:
        told = {name: metrics.get(name) for name in StepDone.__slots__}
        self._call("on_step", StepDone(**told))  # type: ignore[arg-type]
        if metrics.get("ends_epoch"):
            self._call("on_epoch", EpochDone(epoch=metrics["epoch"], step=metrics["step"]))

    def _call(self, name: str, event: Any) -> None:
        for callback in list(self._living):
            try:
                answer = getattr(callback, name)(event)
            except Exception as error:
                self._living.remove(callback)
                self._tell_of(callback, name, error)
                continue
            if isinstance(answer, Stop) and self.stop is None:
                self.stop = answer.reason

    def _tell_of(self, callback: Callback, name: str, error: Exception) -> None:
        what = f"{type(callback).__name__}.{name} raised {type(error).__name__}: {error}"
        where = ""
        if self._folder is not None:
            path, told = self._folder / "callbacks.txt", "".join(traceback.format_exception(error))
            with suppress(OSError, DiskError):  # no room, perhaps for the callback either
                with open(open_to_append(path), "w", encoding="utf-8", errors="replace") as file:
                    file.write(f"{what}\n{told}\n")
                where = f"; see {path}"
        self._listener({"notice": f"{what}. It is not called again, and the run goes on{where}."})
