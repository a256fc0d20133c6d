"""A Slurm of two nodes on this machine, for as long as it is needed."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

CONFIGURATION = """
ClusterName=plait
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
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
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(Exception):
    """It cannot be had here, and why."""


@contextmanager
def two_nodes(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch find it; its files are in `folder`."""
    for name, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("munged", "munge")):
        if shutil.which(name) is None:
            raise NoSlurmError(f"needs {name}: apt-get install {package}")
    if os.getuid() != 0:
        raise NoSlurmError("needs root, to be the Slurm of all users")
    for above in (folder, *folder.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055) if above.owner() == "root" and above != Path("/") else None
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=free_ports(3)))
    found = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.sock",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / "log").open("ab") as log:
                daemons.append(subprocess.Popen(command, env=found, stdout=log, stderr=log))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        asked = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        while subprocess.run(asked, env=found, capture_output=True, check=False).stdout != b"2\n":
            if time.monotonic() > deadline:
                raise NoSlurmError(f"Slurm does not run here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.2)
        yield found
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def free_ports(count: int) -> list[int]:
    """Of this machine, for now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [made.getsockname()[1] for made in sockets]
