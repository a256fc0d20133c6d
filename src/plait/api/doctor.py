"""What of plait works on this machine, and what to install or change for the rest.

In: nothing. Out: a `Diagnosis`. It looks and tries small things, trains nothing, writes nothing, and never raises for
what it finds: a torch that is missing or broken is a finding like every other.
"""

import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.api.packages import ENGINES, OPTIONAL, REQUIRED, installed, is_new_enough
from plait.units import format_bytes
from plait.version import VERSION

_PROGRAMS = {
    "Slurm": ("sbatch", "--engine slurm, srun", "apt install slurm-client, on a host of the cluster."),
    "MPI": ("mpirun", "started by mpirun", "apt install openmpi-bin."),
    "Java": ("java", "--engine spark", "apt install openjdk-17-jre-headless."),
}
"""Programs of such engines, what for, and where they come from."""
_SMALL_SHM_BYTES = 64 * 2**20
"""What a container is given where nobody says more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    group: str
    """environment, devices, links, engines or optional."""
    name: str
    """What was looked at."""
    ok: bool
    """Whether it is there and works."""
    what: str
    """What was found, with the numbers."""
    fix: str = ""
    """What to do where it is absent and wanted."""
    required: bool = False
    """Whether plait can train nothing without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What of plait works on this machine."""

    plait: str
    """The version of plait."""
    findings: tuple[Finding, ...]
    """Everything that was looked at, group by group."""

    @property
    def ok(self) -> bool:
        """Whether plait can train here; what is absent beyond that can be done without."""
        return all(finding.ok for finding in self.findings if finding.required)


def doctor() -> Diagnosis:
    """Look at this machine: environment, devices, links, engines, optional parts; what works, and what to do about the
    rest."""
    torch, error = _torch()
    findings = (*_environment(torch, error), *_devices(torch), *_links(torch), *_engines(), *_optional())
    return Diagnosis(plait=VERSION, findings=findings)


def _torch() -> tuple[Any, str]:
    """The module, or why there is none."""
    try:
        import torch
    except Exception as error:  # a build that does not fit this machine fails in many ways
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return torch, ""


def _environment(torch: Any, error: str) -> Iterator[Finding]:
    python = f"{platform.python_version()}, {sys.executable}"
    new = sys.version_info >= (3, 11)
    yield Finding(
        group="environment",
        name="Python",
        ok=new,
        what=python,
        fix="use Python 3.11 or newer.",
        required=True,
    )
    if torch is None:
        fix = "pip install torch, as https://pytorch.org/get-started says for this machine."
        yield Finding(group="environment", name="torch", ok=False, what=error, fix=fix, required=True)
    else:
        cuda, hip = torch.version.cuda, torch.version.hip
        build = (
            f"built for CUDA {cuda}" if cuda else f"built for ROCm {hip}" if hip else "built for processors"
        )
        new = is_new_enough(torch.__version__, REQUIRED["torch"])
        fix = f'pip install "torch>={REQUIRED["torch"]}".'
        yield Finding(
            group="environment",
            name="torch",
            ok=new,
            what=f"{torch.__version__}, {build}",
            fix=fix,
            required=True,
        )
    lacking = [
        f'"{package}>={least}"'
        for package, least in REQUIRED.items()
        if package != "torch" and not is_new_enough(installed(package), least)
    ]
    what = (
        f"lacking or too old: {' '.join(lacking)}" if lacking else f"all {len(REQUIRED) - 1} that plait needs"
    )
    fix = f"pip install {' '.join(lacking)}."
    yield Finding(group="environment", name="packages", ok=not lacking, what=what, fix=fix, required=True)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        group="environment", name="cores", ok=True, what=f"{usable} of {os.cpu_count()} may be used"
    )
    yield _memory()
    yield _shm(Path("/dev/shm"))
    free = shutil.disk_usage(Path.cwd()).free
    writable = os.access(Path.cwd(), os.W_OK)
    what = f"{format_bytes(free)} free in {Path.cwd()}" + ("" if writable else ", which cannot be written")
    fix = "run where you may write, or give --out DIR."
    yield Finding(group="environment", name="disk", ok=writable, what=what, fix=fix)


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    what = format_bytes(total)
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    told = [text for path in limits if (text := _read(Path(path)).strip()).isdigit()]
    if told and int(told[0]) < total:
        what = f"{format_bytes(int(told[0]))} by this container's limit, of {what}"
    return Finding(group="environment", name="memory", ok=True, what=what)


def _shm(path: Path) -> Finding:
    """The place where torch's own DataLoader workers and NCCL share memory; plait's links need none of it."""
    fix = "give the container more: docker run --shm-size 8g."
    if not path.is_dir():
        what = "there is none; workers of a DataLoader and NCCL use it, plait's own links do not"
        return Finding(group="environment", name=str(path), ok=False, what=what, fix=fix)
    size = shutil.disk_usage(path).total
    small = size <= _SMALL_SHM_BYTES
    what = format_bytes(size) + (", little for workers of a DataLoader and for NCCL" if small else "")
    return Finding(group="environment", name=str(path), ok=not small, what=what, fix=fix)


def _devices(torch: Any) -> Iterator[Finding]:
    model = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    what = model[1] if model else platform.machine()
    yield Finding(group="devices", name="cpu", ok=True, what=what)
    if torch is None:
        yield _without_torch("devices", "cuda")
    elif torch.version.cuda is None and torch.version.hip is None:
        fix = "install a CUDA build of torch to train on GPUs."
        yield Finding(group="devices", name="cuda", ok=False, what="torch is built without it", fix=fix)
    elif not torch.cuda.is_available():
        fix = "see whether nvidia-smi lists a GPU, and whether its driver is new enough for this torch."
        yield Finding(group="devices", name="cuda", ok=False, what="torch sees no GPU", fix=fix)
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            what = f"{device.name}, {format_bytes(device.total_memory)}"
            yield Finding(group="devices", name=f"cuda:{index}", ok=True, what=what)
    try:
        from plait.cluster.parse import measured_path  # needs packages that may be lacking
    except ImportError:
        return
    measured = measured_path()
    what = f"in {measured}" if measured.exists() else "predictions for this machine measure it first"
    yield Finding(
        group="devices", name="measured", ok=measured.exists(), what=what, fix="plait measure, ten seconds."
    )


def _links(torch: Any) -> Iterator[Finding]:
    if torch is None:
        yield from (_without_torch("links", name) for name in ("shared memory", "sockets", "NCCL"))
        return
    yield _tried(
        "shared memory", _share, "between processes of this host",
        "needs Linux on x86 with /proc; runs use sockets instead, which is slower.",
    )  # fmt: skip
    yield _tried("sockets", _exchange, "between processes of this host", "allow Unix sockets in the sandbox.")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        fix = "install a CUDA build of torch, where there are GPUs."
        yield Finding(group="links", name="NCCL", ok=False, what="not in this build of torch", fix=fix)
    elif not torch.cuda.is_available():
        what = "in this build of torch, but there is no GPU to use it"
        yield Finding(group="links", name="NCCL", ok=False, what=what, fix="needs a GPU that torch sees.")
    else:
        what = f"{'.'.join(map(str, torch.cuda.nccl.version()))}, between {torch.cuda.device_count()} GPUs"
        yield Finding(group="links", name="NCCL", ok=True, what=what)


def _tried(name: str, attempt: Callable[[], None], what: str, fix: str) -> Finding:
    try:
        attempt()
    except (OSError, ImportError) as error:
        return Finding(group="links", name=name, ok=False, what=f"{what}: {error}", fix=fix)
    return Finding(group="links", name=name, ok=True, what=what, fix=fix)


def _share() -> None:
    """Make memory as a rank does, and open it as its peers do."""
    from plait.run.link.shm.memory import Arena, is_suitable  # needs torch, which may be broken

    if not is_suitable():
        raise OSError(f"not on {platform.system()} {platform.machine()}")
    own = Arena.create(1)
    try:
        os.close(os.open(f"/proc/{own.pid}/fd/{own.file}", os.O_RDWR))
        own.extend(1)
    finally:
        os.close(own.file)


def _exchange() -> None:
    """Hand one end of a line over another, as ranks are connected, and say something on it."""
    here, there = socket.socketpair()
    left, right = socket.socketpair()
    with here, there, left, right:
        socket.send_fds(here, [b"."], [right.fileno()])
        _, handed, _, _ = socket.recv_fds(there, 1, 1)
        with socket.socket(fileno=handed[0]) as end:
            end.sendall(b".")
        if left.recv(1) != b".":
            raise OSError("what was sent did not arrive")


def _engines() -> Iterator[Finding]:
    torchrun = "torchrun, and plait's own processes on this host; on several: see docs/hosts.md"
    yield Finding(group="engines", name="processes", ok=True, what=torchrun)
    yield from _packages("engines", ENGINES)
    for name, (program, purpose, fix) in _PROGRAMS.items():
        where = shutil.which(program)
        what = f"{where}, {purpose}" if where else f"no {program}: {purpose}"
        yield Finding(group="engines", name=name, ok=where is not None, what=what, fix=fix)


def _packages(group: str, wanted: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for package, (least, purpose) in wanted.items():
        found = installed(package)
        what = f"{found}, {purpose}" if found else purpose
        fix = f'pip install "{package}>={least}".'
        yield Finding(group=group, name=package, ok=is_new_enough(found, least), what=what, fix=fix)


def _optional() -> Iterator[Finding]:
    yield from _packages("optional", OPTIONAL)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    where, header = shutil.which(compiler), Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacking = [compiler] * (where is None) + ["Python.h"] * (not header.exists())
    what = "compile=on on processors" + (f": no {' and no '.join(lacking)}" if lacking else f", {where}")
    fix = "install a C++ compiler and Python's headers: apt install g++ python3-dev."
    yield Finding(group="optional", name="C++ compiler", ok=not lacking, what=what, fix=fix)
    triton = installed("triton")
    what = f"{triton + ', ' if triton else ''}compile=on on GPUs"
    fix = "comes with CUDA builds of torch."
    yield Finding(group="optional", name="triton", ok=triton is not None, what=what, fix=fix)


def _without_torch(group: str, name: str) -> Finding:
    return Finding(
        group=group, name=name, ok=False, what="cannot be looked at without torch", fix="see torch."
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
