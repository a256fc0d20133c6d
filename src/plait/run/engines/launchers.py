"""Command lines of torchrun and mpirun."""

import sys

from plait.errors import UsageError
from plait.processes import run_program
from plait.run.engines.request import Request


def torchrun(request: Request) -> list[str]:
    """All ranks on this host, or those of one host of several, which a person names."""
    options = request.known("node_rank", "master_addr", "master_port")
    each = str(request.ranks // request.hosts)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", each, "--no-python"]
    if request.hosts == 1:
        return [*start, "--standalone", *request.command]
    if not {"node_rank", "master_addr"} <= set(options):
        raise UsageError(
            f"torchrun is started on each of {request.hosts} hosts, and does not reach others by itself.",
            fix="run this on every host with --engine-set node_rank=0 (1, ...) --engine-set master_addr=HOST0.",
        )
    where = ["--nnodes", str(request.hosts), "--node-rank", options["node_rank"]]
    port = options.get("master_port", "29500")
    return [*start, *where, "--master-addr", options["master_addr"], "--master-port", port, *request.command]


def mpi(request: Request) -> list[str]:
    """One task a rank; the token travels in the environment, of which the command line has the name alone."""
    options = request.known("hosts", "first", "oversubscribe", "allow_root", "mpirun")
    mpirun = options.get("mpirun", "mpirun")
    is_hydra = _is_hydra(mpirun)
    found = [mpirun, "-n", str(request.ranks)]
    found += [] if is_hydra else ["-x", "PLAIT_TOKEN"]  # MPICH hands on all variables
    if "hosts" in options:
        names, each = options["hosts"].split("+"), request.ranks // request.hosts
        if len(names) != request.hosts:
            raise UsageError(
                f"--engine-set hosts={options['hosts']} names {len(names)} hosts; --hosts says {request.hosts}.",
                fix=f"use --hosts {len(names)}, or name {request.hosts} with + between them.",
            )
        hosts = ",".join(f"{name}:{each}" for name in names)
        found += ["-hosts" if is_hydra else "-H", hosts]
    if "first" in options:
        first = f"PLAIT_FIRST_ADDRESS={options['first']}"
        found += ["-genv", *first.split("=", 1)] if is_hydra else ["-x", first]
    if is_hydra and request.least is not None:
        found.append("-disable-auto-cleanup")  # a task that is killed does not end the others
    if not is_hydra:  # MPICH asks for neither
        found += ["--oversubscribe"] if "oversubscribe" in options else []
        found += ["--allow-run-as-root"] if "allow_root" in options else []
    return [*found, *request.command]


def _is_hydra(mpirun: str) -> bool:
    """Whether this is MPICH's (or Intel's) mpirun, whose options differ from Open MPI's."""
    try:
        return "hydra" in run_program([mpirun, "--version"], patience_s=10).out.lower()
    except OSError:
        return False
