"""One task of a run that an engine has started: it says who it is, trains, and writes what it has to say."""

import os
import signal
import sys
from pathlib import Path

_NAMES = ("PLAIT_TASK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while libraries are imported
    name, folder, place, *resume = sys.argv[1:]
    task = next(os.environ[variable] for variable in _NAMES if variable in os.environ)
    begun = Path(place) / f".task-{task}"
    begun.write_text(str(os.getpid()))
    begun.rename(Path(place) / f"task-{task}.pid")

    from bench.chaos.cases import CASES
    from bench.chaos.runs import be_the_run

    code, said = be_the_run(next(case for case in CASES if case.name == name), Path(folder), bool(resume))
    (Path(place) / f"told-{task}.json").write_bytes(said)
    sys.exit(code)


if __name__ == "__main__":
    main()
