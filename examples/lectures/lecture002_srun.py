"""The srun line of lecture 002, run under a real Slurm of two nodes on this machine.

python -m examples.lectures.lecture002_srun
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.lectures.exhibit import Exhibit, Number, show

JOB = Path(__file__).parents[1] / "digits_mlp.py"
CONFIGURATION = """
ClusterName=lecture
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort=17010
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17011-17012] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""Two nodes that are this machine."""


def missing() -> str:
    """What keeps a Slurm from running here; empty: nothing."""
    for name, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("munged", "munge")):
        if shutil.which(name) is None:
            return f"there is no {name}: apt-get install {package}"
    return "" if os.getuid() == 0 else "a Slurm for all users needs root"


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """A Slurm while the block runs; the environment in which srun finds it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        found = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        commands = [
            ["munged", "--force", "--foreground", f"--socket={folder}/munge.sock", *munge],
            ["slurmctld", "-D"],
        ]
        commands += [["slurmd", "-D", "-N", node] for node in ("n0", "n1")]
        daemons = []
        try:
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, env=found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
                time.sleep(0.5)
            deadline = time.monotonic() + 60
            ask = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
            while subprocess.run(ask, env=found, capture_output=True, check=False).stdout != b"2\n":
                if time.monotonic() > deadline:
                    raise TimeoutError("Slurm's two nodes are not idle after 60 s")
                time.sleep(0.2)
            yield found
        finally:
            subprocess.run(
                ["scancel", "--state=RUNNING", "--signal=KILL"], env=found, capture_output=True, check=False
            )
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(20)


def run_it() -> tuple[str, float]:
    """What the run printed, and its held-out accuracy."""
    plait = [sys.executable, "-c", "from plait.cli.main import main; main()"]
    with slurm() as environment, tempfile.TemporaryDirectory(prefix="plait-lecture-") as folder:
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
    why = missing()
    text, accuracy = ("", 0.0) if why else run_it()
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
