"""One task of a run that an engine has started: it says who it is, trains, and writes what it has to say."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import plait  # noqa: F401, before the rest, as the command line does: it notes who started this process

_NAMES = ("PLAIT_TASK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_INTERRUPTED = 130
"""What the command line makes of a run that was interrupted."""


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))  # while libraries are imported
    name, folder, place, *resume = sys.argv[1:]
    task = next(os.environ[variable] for variable in _NAMES if variable in os.environ)
    begun = Path(place) / f".task-{task}"
    begun.write_text(str(os.getpid()))
    begun.rename(Path(place) / f"task-{task}.pid")

    from bench.chaos.cases import CASES
    from bench.chaos.runs import be_the_run

    code, said = be_the_run(next(case for case in CASES if case.name == name), Path(folder), bool(resume))
    (Path(place) / f"told-{task}.json").write_bytes(said)
    gc.freeze()  # as the command line does
    is_interrupted = json.loads(said).get("stopped") == "interrupted"
    sys.exit(
        _INTERRUPTED if is_interrupted else code
    )  # as the command line does: engines must not take it for done


if __name__ == "__main__":
    main()
