"""What a run writes down step by step: metrics, evaluations and, on request, sample ids.

In: what rank 0 knows after a step. Out: lines in `metrics.jsonl` and `samples.jsonl`, and events for whoever
watches; those only every now and then, and always the last one. Records are only ever appended, each with a sum; a run
that is resumed first drops, in one rename, those of the steps that it does again. So every step has one line.
"""

import resource
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from plait.files.records import RecordFile

_SAY_EVERY_S = 0.1
"""Between two reports to the screen: nobody reads faster."""


class Journal:
    """The files of one run, open for appending; on resume, what came after the checkpoint is dropped first."""

    def __init__(
        self,
        folder: Path,
        emit: Callable[[dict[str, Any]], None],
        *,
        keep_below: int | None,
        samples: bool,
        says_all: bool = False,
        anew: Collection[int] = (),
    ) -> None:
        """`says_all`: whoever watches wants to hear of every step; `anew`: steps that are written once more."""
        self._emit = emit
        self._says_all = says_all
        self._files = ExitStack()

        def open_file(name: str) -> RecordFile:
            keep = None if keep_below is None else _steps_below(keep_below, anew)
            return self._files.enter_context(RecordFile(folder / name, keep=keep))

        self._metrics = open_file("metrics.jsonl")
        self._samples = open_file("samples.jsonl") if samples else None
        self._said_s = 0.0
        self._unsaid: dict[str, Any] | None = None

    def write_step(self, entry: dict[str, Any], ids: Tensor, lost: Sequence[int] = ()) -> None:
        """The metrics of a step and the ids of its samples, over all ranks; and of those that died with a worker."""
        self._metrics.write(entry)
        self.write_samples(entry["step"], entry["epoch"], ids.tolist(), lost)
        self._unsaid = entry
        now = time.monotonic()
        if self._says_all or now - self._said_s > _SAY_EVERY_S:
            self._said_s = now
            self.say_newest()

    def write_samples(self, step: int, epoch: int, ids: Sequence[int], lost: Sequence[int]) -> None:
        """The ids of a step's samples, where they are recorded; `lost`: those that were not trained on."""
        if self._samples is not None:
            named = {"lost": list(lost)} if lost else {}
            self._samples.write({"step": step, "epoch": epoch, "ids": list(ids), **named})

    def write_evaluation(self, entry: dict[str, Any]) -> None:
        """What was measured on held-out data after a step."""
        self.say_newest()
        self._metrics.write(entry)
        self._emit({"metrics": entry})

    def say_newest(self) -> None:
        """Tell of the newest step, if that was not done yet."""
        if self._unsaid is not None:
            self._emit({"metrics": self._unsaid})
            self._unsaid = None

    def flush(self) -> None:
        """Hand everything to the system, so that it outlives this process."""
        for file in (self._metrics, self._samples):
            if file is not None:
                file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _steps_below(step: int, anew: Collection[int]) -> Callable[[Mapping[str, Any]], bool]:
    def keeps(entry: Mapping[str, Any]) -> bool:
        number = entry.get("step")
        return isinstance(number, int) and number < step and (number not in anew or "evaluate" in entry)

    return keeps


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: of the allocator on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
