"""Placeholder until the real one lands (being written by a helper)."""
from pathlib import Path
from rich.console import Console
def graph_command(job_reference: str, *, batch: int | None, json_output: bool, html: Path | None, console: Console) -> int:
    return 1
