"""Runs whose folders go when the exhibit has read them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plait


@contextmanager
def trained(
    job: plait.Job, plan: str | Path | plait.Plan, ranks: int | None = None, **options: Any
) -> Iterator[plait.Result]:
    """`plait.train` in a folder that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="plait-lecture-") as folder:
        yield plait.train(
            job, plan, ranks, out=Path(folder) / "run", watching=plait.Watching(progress=False), **options
        )
