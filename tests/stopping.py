"""Programs all of whose children are stopped at the moment at which they are born."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

_SOURCE = """
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
static void stop(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP); }
pid_t setsid(void) { stop(); return syscall(SYS_setsid); }
int setpgid(pid_t pid, pid_t group) { if (!pid) stop(); return syscall(SYS_setpgid, pid, group); }
"""
"""A child leaves its parent's group before it becomes another program."""


def run(code: str, folder: Path, *, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run Python code to its end, whose children stop where they leave its group or session."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "stopping.c", folder / "stopping.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    script = folder / "stopping_main.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        told = process.communicate(timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, *told)
