"""What training gave, read from its run folder.

In: a run that has ended. Out: its losses, its history, the trained model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from plait.files.records import read_records
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.run.checkpoint.store import load_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What training gave."""

    losses: tuple[float, ...]
    """The loss of every step that was run."""
    evaluation: Mapping[str, float]
    """The last measurements on the evaluation data."""
    folder: Path
    """The run folder: plan, metrics, trace, checkpoints."""
    stopped: str | None
    """Why training ended early: `interrupted`, or what `until` found; None: it ran to its end."""
    notices: tuple[str, ...]
    """What the user should know about how the model was run."""
    job: Job = field(repr=False)
    """What was trained."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: of a step `loss`, `lr`, `samples_per_s`, ...; of a measurement `evaluate`."""
        return [
            {k: v for k, v in e.items() if k != "sum"}
            for e in read_records(self.folder / "metrics.jsonl").entries
        ]

    @property
    def model(self) -> nn.Module:
        """The trained model on the CPU, in `eval` mode: one of its own, also where the job was given an instance."""
        with kept_generators():
            built = self.job.build_model()
        model = copy_of(built) if built is self.job.model else built
        model.load_state_dict(self.weights)
        return model.eval()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trained weights and buffers as a `state_dict` with the user's own names."""
        state = load_checkpoint(self.folder)
        persistent = {k: v for k, v in (state.parameters | state.buffers).items() if k not in state.transient}
        return persistent | {
            alias: persistent[name] for alias, name in state.aliases.items() if name in persistent
        }

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights and buffers of a job with `average`, named like `weights`; empty: none were taken."""
        state = load_checkpoint(self.folder)
        found = {name: tensor for name, tensor in state.average.items() if name not in state.transient}
        return found | {alias: found[name] for alias, name in state.aliases.items() if name in found}

    @classmethod
    def of(cls, summary: Mapping[str, Any], folder: Path, notices: tuple[str, ...], job: Job) -> Self:
        """From what the ranks of a run have told."""
        return cls(
            losses=tuple(summary["losses"]),
            evaluation=summary["evaluation"],
            folder=folder,
            stopped=summary["stopped"],
            notices=notices,
            job=job,
        )
