"""The srun line of lecture 002, run under a real Slurm of two nodes on this machine.

python -m examples.lectures.lecture002_srun
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.lectures.exhibit import Exhibit, Number, show
from examples.lectures.slurm import NoSlurmError, two_nodes

JOB = Path(__file__).parents[1] / "digits_mlp.py"


def run_it() -> tuple[str, float]:
    """What the run printed, and its held-out accuracy."""
    plait = [sys.executable, "-c", "from plait.cli.main import main; main()"]
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as of_slurm,
        tempfile.TemporaryDirectory(prefix="plait-lecture-") as folder,
        two_nodes(Path(of_slurm), {**os.environ, "OMP_NUM_THREADS": "1"}) as environment,
    ):
        command = [
            "srun",
            "-N2",
            "-n2",
            *plait,
            "run",
            str(JOB),
            "--plan",
            "ddp",
            "--steps",
            "69",
            "--out",
            f"{folder}/run",
        ]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
    lines = [line.replace(folder, "FOLDER").rstrip() for line in done.stdout.splitlines()]
    found = [line for line in lines if "accuracy" in line]
    return "\n".join(lines[-14:]), float(found[-1].split("accuracy")[1].split()[0].strip(":,"))


def exhibit() -> Exhibit:
    why, text, accuracy = "", "", 0.0
    try:
        text, accuracy = run_it()
    except NoSlurmError as error:
        why = str(error)
    return Exhibit(
        lecture="002",
        title="srun starts one process a rank",
        idea="The lecture warns: on a cluster `srun` starts the script once a task, so a script that "
        "spawns processes of its own spawns them twice. A `plait run` that finds itself among Slurm's "
        "tasks joins them instead of starting any.",
        numbers=[
            Number(
                what="held-out accuracy, two tasks on two nodes",
                ours=f"not run here: {why}" if why else accuracy,
            )
        ],
        texts={} if why else {"srun -N2 -n2 plait run examples/digits_mlp.py --plan ddp --steps 69": text},
        seen=f"Not run here: {why}."
        if why
        else "Two tasks on two nodes of a real Slurm (both are this machine) trained one model "
        "as two ranks: nothing was started twice.",
    )


if __name__ == "__main__":
    show(exhibit())
