"""What is done with a run that ended.

In: a run folder. Out: the trained weights as a file.
"""

from pathlib import Path
from typing import Literal

from plait.errors import UsageError
from plait.run.checkpoint.store import export_checkpoint


def export(
    folder: str | Path,
    *,
    to: Literal["safetensors", "state_dict"] = "safetensors",
    out: str | Path | None = None,
) -> Path:
    """Write the trained weights of a run, or of a checkpoint, under the model's own names; returns the file."""
    if to not in ("safetensors", "state_dict"):
        raise UsageError(f"--to {to!r} is not known.", fix="use safetensors or state_dict.")
    beside = Path(folder) / ("weights.safetensors" if to == "safetensors" else "weights.pt")
    return export_checkpoint(Path(folder), to=to, out=Path(out) if out is not None else beside)
