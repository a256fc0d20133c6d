"""Metrics for the tools that people already look at: `--log tensorboard,wandb`.

In: names. Out: `Callback`s that write each step's and evaluation's numbers with the tool's own library, in the process
that started the run, so once however many ranks there are. A run that is gone on with continues its own log: what was
logged after the checkpoint is dropped, where the tool can.
"""

import csv
import importlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.callbacks import Callback, Ended, Evaluated, Failed, Started, StepDone
from plait.errors import UsageError
from plait.files.write import open_to_append, ordinary, write_whole

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the tools call a run."""


class _Log(Callback):
    """What all logs have in common: they write numbers of a step under names."""

    needs: str | None = None
    """The module of the tool's library."""
    extra: str = ""
    """What installs it."""

    def check(self) -> None:
        """Refuse before anything starts where the library is missing."""
        if self.needs is None:
            return
        try:
            importlib.import_module(self.needs)
        except ImportError as error:
            raise UsageError(
                f"--log {self.extra} needs the package {self.needs}, which is not installed.",
                fix=f"pip install 'plait[{self.extra}]'.",
            ) from error

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one step."""
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """Nothing more comes."""

    def on_step(self, event: StepDone) -> None:
        numbers = {name: float(getattr(event, name)) for name in ("loss", "lr", "samples_per_s", "epoch")}
        if event.grad_norm is not None:
            numbers["grad_norm"] = event.grad_norm
        self.write(event.step, numbers)

    def on_evaluation(self, event: Evaluated) -> None:
        self.write(event.step, {f"evaluation/{name}": value for name, value in event.metrics.items()})

    def on_failure(self, event: Failed) -> None:
        self.close(failed=True)

    def on_end(self, event: Ended) -> None:
        self.close(failed=False)


class _Csv(_Log):
    """metrics.csv in the run folder: a row for each number, so that columns never change."""

    def on_start(self, event: Started) -> None:
        path = event.folder / "metrics.csv"
        kept: list[list[str]] = []
        if event.start_step and path.exists():
            with open(path, encoding="utf-8", errors="replace", newline="", opener=ordinary) as file:
                rows = [row for row in csv.reader(file) if len(row) == 3 and row[0].isdecimal()]
            kept = [row for row in rows if int(row[0]) < event.start_step]
        begun = io.StringIO(newline="")
        csv.writer(begun).writerows([["step", "name", "value"], *kept])
        write_whole(path, begun.getvalue())  # or what was there stays
        self._file = open(open_to_append(path), "w", encoding="utf-8", newline="")  # noqa: SIM115, until `close`
        self._writer = csv.writer(self._file)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._writer.writerows([step, name, repr(value)] for name, value in numbers.items())
        self._file.flush()

    def close(self, failed: bool) -> None:
        self._file.close()


class _TensorBoard(_Log):
    """Event files in tensorboard/ of the run folder."""

    needs, extra = "tensorboard", "tensorboard"

    def on_start(self, event: Started) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            log_dir=str(event.folder / "tensorboard"), purge_step=event.start_step or None
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb(_Log):
    """A run of Weights & Biases, under the project and mode that its own environment variables say."""

    needs, extra = "wandb", "wandb"

    def on_start(self, event: Started) -> None:
        import wandb

        path = event.folder / "wandb-run"
        known = _known(path) if event.start_step else None
        self._run: Any = wandb.init(
            name=event.folder.name, id=known, resume="allow", dir=str(event.folder), config=dict(event.about)
        )
        self._run.define_metric("*", step_metric="step")
        write_whole(path, f"{self._run.id}\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class _MLflow(_Log):
    """A run of MLflow, in the store and experiment that its own environment variables say."""

    needs, extra = "mlflow", "mlflow"

    def on_start(self, event: Started) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        path = event.folder / "mlflow-run"
        known = _known(path) if event.start_step else None
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "plait")
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            known = self._client.create_run(experiment, run_name=event.folder.name).info.run_id
            for key, value in event.about.items():
                self._client.log_param(known, key, value)
            write_whole(path, f"{known}\n")
        self._id = known

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


LOGS: Mapping[str, type[_Log]] = {
    "csv": _Csv,
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}
"""By name."""


def loggers(names: str | None) -> list[Callback]:
    """The logs of these names; refused where one is not known or its library is missing."""
    found: list[Callback] = []
    for name in [part.strip() for part in names.split(",")] if names else []:
        if name not in LOGS:
            raise UsageError(f"--log {name} is not known.", fix=f"use {', '.join(LOGS)}, joined by commas.")
        log = LOGS[name]()
        log.check()
        found.append(log)
    return found


def _known(path: Path) -> str | None:
    """What the tool called this run when it was started."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _ID.fullmatch(text) else None
