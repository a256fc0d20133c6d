"""What a run says that could not write: the cause, what was saved before, and how to go on.

In: a run folder. Out: an error that says it, also in the folder's failure.txt, for which room is held from the start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import CheckpointError, DiskError
from plait.files.write import hold_reserve, release_reserve, write_last_words
from plait.run.checkpoint.store import locate_checkpoint


@contextmanager
def room_for_last_words(folder: Path) -> Iterator[None]:
    """Whatever cannot be written, what is told of it says what was saved, and is kept in the folder."""
    hold_reserve(folder)
    try:
        yield
    except (DiskError, CheckpointError) as error:
        release_reserve(folder)
        if not (folder / "checkpoints").is_dir():  # nothing was begun
            raise
        told = type(error)(f"{error.what.rstrip('.')}. {_saved_in(folder)}", fix=error.fix)
        write_last_words(folder / "failure.txt", f"{told}\n")
        raise told from error
    finally:
        release_reserve(folder)


def _saved_in(folder: Path) -> str:
    try:
        last = locate_checkpoint(folder, on_notice=lambda text: None)
    except CheckpointError:
        return "No checkpoint was saved."
    return f"Saved is {last.name}: --resume {folder} goes on from there."
