"""What Open MPI's and MPICH's mpirun tell a task. Neither says where task 0 is; both say where mpirun is."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from plait.run.join.place import Place, number
from plait.run.join.starter import Starter

_OPEN, _MPICH = "Open MPI", "MPICH"
_MPICH_RANK = "PMI_RANK"


def read_open_mpi(environment: Mapping[str, str]) -> Place | None:
    """The place that OMPI_COMM_WORLD_* name."""
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    head = environment.get("OMPI_MCA_orte_hnp_uri", environment.get("PMIX_SERVER_URI2", ""))
    local, tasks = (
        number(environment, _OPEN, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        number(environment, _OPEN, "OMPI_COMM_WORLD_SIZE"),
    )
    return Place(
        engine=_OPEN,
        task=number(environment, _OPEN, "OMPI_COMM_WORLD_RANK"),
        tasks=tasks,
        local_tasks=local,
        first=_head(head),
        run=environment.get("OMPI_MCA_ess_base_jobid", environment.get("PMIX_NAMESPACE", head)),
        mark="OMPI_COMM_WORLD_RANK",
    )


def read_mpich(environment: Mapping[str, str]) -> Place | None:
    """The place that PMI_* name; MPI_LOCALNRANKS tells MPICH from Slurm, which may set the others too."""
    if "PMI_SIZE" not in environment or "MPI_LOCALNRANKS" not in environment:
        return None
    head = _mpiexec()
    return Place(
        engine=_MPICH,
        task=number(environment, _MPICH, _MPICH_RANK),
        tasks=number(environment, _MPICH, "PMI_SIZE"),
        local_tasks=number(environment, _MPICH, "MPI_LOCALNRANKS"),
        first=head.rpartition(":")[0] or None,
        run=environment.get("PMI_JOBID", head),
        mark=_MPICH_RANK,
    )


def _mpiexec() -> str:
    """Where mpiexec listens, as its proxy on this host, which started this task, was told: host:port; the variables do
    not say. Empty where the proxy cannot be seen from here."""
    try:
        words = Path(f"/proc/{Starter.find(_MPICH_RANK).line[-1]}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return next((after for word, after in pairwise(words) if word == "--control-port"), "")


def _head(uri: str) -> str | None:
    """The addresses in `2731.0;tcp://10.0.0.1,172.17.0.1:4000`."""
    found = re.search(r"tcp4?://([0-9.,]+)", uri)
    return found.group(1) if found is not None else None
