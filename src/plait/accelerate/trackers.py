"""Loggers of a script: what `log` is given goes to TensorBoard, wandb, MLflow or a file, from the main process."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.api.display.loggers import LOGS, loggers
from plait.callbacks import Callback, Started
from plait.errors import UsageError


class Trackers:
    """Those that a script asked for."""

    def __init__(self, names: Any) -> None:
        """`names` as `log_with` has them: one, several, or "all" whose libraries are installed."""
        asked = [names] if isinstance(names, str) or not isinstance(names, list | tuple) else names
        self._names = [str(getattr(name, "value", name)) for name in asked if name is not None]
        if "all" in self._names:
            known = {name: log.needs for name, log in LOGS.items() if log.needs is not None}
            self._names = [name for name, needs in known.items() if importlib.util.find_spec(needs)]
        self._open: list[Callback] = []
        self._num_logged = 0
        loggers(",".join(self._names))  # those that are not known or not installed are refused here

    def begin(self, project: str, folder: str | Path | None, config: Mapping[str, Any] | None) -> None:
        """Start them; `config` is what the run was started with."""
        place = Path(folder or ".") / project
        place.mkdir(parents=True, exist_ok=True)
        self._open = loggers(",".join(self._names))
        for one in self._open:
            one.on_start(Started(folder=place, start_step=0, total_steps=None, about=dict(config or {})))

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Numbers of a step; without one, of the next."""
        numbers = dict(_numbers(values))
        self._num_logged = self._num_logged if step is None else step
        for one in self._open:
            one.write(self._num_logged, numbers)  # type: ignore[attr-defined]
        self._num_logged += 1

    def end(self) -> None:
        """Nothing more comes."""
        for one in self._open:
            one.close(failed=False)  # type: ignore[attr-defined]
        self._open = []


def _numbers(values: Mapping[str, Any], before: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{before}{name}/")
        elif isinstance(value, Tensor) or hasattr(value, "__float__"):
            found.append((f"{before}{name}", float(value)))
        else:
            raise UsageError(
                f"log({name}={value!r}) is no number.",
                fix="log numbers; texts belong to init_trackers(config=...).",
            )
    return found
