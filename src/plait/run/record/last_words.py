"""What a run says that failed: the cause, what was saved before, and how to go on.

In: a run folder. Out: an error that says it; of one that could not write also in the folder's failure.txt, for which
room is held from the start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import CheckpointError, DiskError, PlaitError, RunError
from plait.files.write import hold_reserve, release_reserve, write_last_words
from plait.run.checkpoint.store import locate_checkpoint


@contextmanager
def room_for_last_words(folder: Path) -> Iterator[None]:
    """Whatever ends the run, what is told of it says what was saved; where it could not write, in the folder too."""
    hold_reserve(folder)
    try:
        yield
    except (DiskError, CheckpointError) as error:
        release_reserve(folder)
        if not (folder / "checkpoints").is_dir():  # nothing was begun
            raise
        told = type(error)(f"{error.what.rstrip('.')}. {_saved_in(folder, error)}".strip(), fix=error.fix)
        write_last_words(folder / "failure.txt", f"{told}\n")
        raise told from error
    except RunError as error:
        if any((folder / "checkpoints").glob("step-*")):
            error.fix = " ".join(filter(None, (error.fix, _saved_in(folder, error))))
        raise
    finally:
        release_reserve(folder)


def _saved_in(folder: Path, error: PlaitError) -> str:
    """Nothing where that is the very checkpoint that the error is about."""
    try:
        last = locate_checkpoint(folder, on_notice=lambda text: None)
    except CheckpointError:
        return "No checkpoint was saved."
    if last.name in error.what:
        return ""
    return f"Saved is {last.name}: plait run --resume {folder} goes on from there."
