"""`plait run JOB --engine slurm --hosts 2`: have an engine start this very command, and stay with it.

In: the arguments of the command line. Out: the exit status of what was started; with --dry-run, what would be, printed.
"""

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

from plait.errors import RunError, UsageError
from plait.files.document import Format, read_yaml
from plait.options import Elsewhere
from plait.processes import run_program
from plait.run.engines.kubernetes import manifest
from plait.run.engines.launchers import mpi, torchrun
from plait.run.engines.ray import RayRun
from plait.run.engines.request import Request
from plait.run.engines.slurm import script
from plait.run.engines.spark import run_command

_OWN = {"--engine": 1, "--hosts": 1, "--engine-set": 1, "--dry-run": 0}
"""Options for the engine alone, and how many words follow each."""
COMMAND_LINE: list[str] = []
"""What the user typed after `plait`."""
_FORMAT = Format(noun="options of an engine", error=UsageError, fix="write lines like time: 1:00:00.")
_LOOK_S = 1.0
"""Between two looks at a job of Slurm."""
_ANSWER_S = 300.0
"""For Slurm to answer: its commands try for long where it is busy."""
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


def without_engine(arguments: Sequence[str]) -> tuple[str, ...]:
    """What is left for every task."""
    found, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in _OWN:
            found.append(word)
        elif not equals:
            for _ in range(_OWN[name]):
                next(words, None)
    return tuple(found)


def check_here(elsewhere: Elsewhere, *, dry_run: bool) -> None:
    """Refuse what is for an engine alone where none is named: it would be left out in silence."""
    given = {
        "--hosts": elsewhere.hosts != 1,
        "--engine-set": bool(elsewhere.engine_set),
        "--dry-run": dry_run,
    }
    if any(given.values()):
        raise UsageError(
            f"{', '.join(name for name, is_given in given.items() if is_given)} without --engine: nothing else would "
            "be started than on this host.",
            fix="name the engine, such as --engine slurm; or leave it out, and have the hosts' own engine start plait.",
        )


def start(
    elsewhere: Elsewhere,
    ranks: int | None,
    arguments: Sequence[str],
    *,
    dry_run: bool,
    name: str,
    out: Path | None = None,
    runs: bool = True,
) -> int:
    """Build it, and run it unless it is only to be shown; `runs`: it is a run, which leaves a folder."""
    engine = elsewhere.engine
    request = Request(
        arguments=without_engine(arguments),
        hosts=elsewhere.hosts,
        ranks=ranks if ranks is not None else elsewhere.hosts,
        options={name: value for text in elsewhere.engine_set for name, value in _settings(text).items()},
    )
    if engine == "kubernetes":
        if not dry_run:
            fix = "add --dry-run, and give what is printed to kubectl apply -f -."
            raise UsageError("plait starts nothing on Kubernetes.", fix=fix)
        print(manifest(request, name), end="")
        return 0
    if engine == "ray":
        if dry_run:
            raise UsageError("--engine ray has nothing to show before it runs.", fix="drop --dry-run.")
        if request.least is not None and out is None and runs:  # whoever starts again must find it
            named = ("--out", f"runs/{name}-ray-{time.strftime('%Y%m%d-%H%M%S')}")
            request = replace(request, arguments=(*request.arguments, *named))
        run = RayRun(request, _token())
        return run.run(lambda text: print(text, file=sys.stderr), _show_piece)
    if engine == "spark":
        if dry_run:
            raise UsageError("--engine spark has nothing to show before it runs.", fix="drop --dry-run.")
        return run_command(request, _token(), _show_piece)
    if engine == "slurm":
        text = script(request, name, str(out.absolute()) if out is not None else None, runs=runs)
        if dry_run:
            print(text, end="")
            return 0
        return _batch(text, name)
    makers = {"torchrun": torchrun, "mpi": mpi}
    if engine not in makers:
        raise UsageError(
            f"--engine {engine} is not known.", fix="use torchrun, mpi, slurm, ray, spark or kubernetes."
        )
    command = makers[engine](request)
    if not dry_run:
        _become(command)
    print(shlex.join(command))
    return 0


def _settings(text: str) -> dict[str, str]:
    """One option, or those in a file."""
    if text.endswith((".yaml", ".yml")) and "=" not in text:
        found = read_yaml(Path(text), _FORMAT).values
        if not isinstance(found, dict) or not all(isinstance(v, str | int | float) for v in found.values()):
            raise UsageError(f"{text} holds no options of an engine.", fix="write lines like time: 1:00:00.")
        return {str(name): str(value) for name, value in found.items()}
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"--engine-set {text!r} is not KEY=VALUE.", fix="write it like --engine-set time=1:00:00."
        )
    return {name: value}


def _token() -> dict[str, str]:
    """A token for the run, unless the environment has one."""
    given = {name: os.environ[name] for name in ("PLAIT_TOKEN_FILE", "PLAIT_TOKEN") if name in os.environ}
    return given or {"PLAIT_TOKEN": token_hex(32)}


def _environment() -> dict[str, str]:
    """This one, with a token for the run."""
    return {**os.environ, **_token()}


def _become(command: list[str]) -> NoReturn:
    """Be the engine from now on: whatever signal comes is for it, and nobody is left where it is killed."""
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, _environment())
    except FileNotFoundError as error:
        raise UsageError(
            f"{command[0]} is not installed here.", fix="install it, or use --engine torchrun."
        ) from error


def _batch(text: str, name: str) -> int:
    """Submit a batch script, show its log as it grows, cancel it at Ctrl-C."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(text)
        file.flush()
        job = _ask(["sbatch", "--parsable", file.name], env=_environment()).strip().partition(";")[0]
    log = Path(f"{name}-{job}.log")
    print(f"job {job} was submitted; its log is {log}", file=sys.stderr)
    state, shown = "", 0
    try:
        while state.split()[:1] == [] or state.split()[0] not in _OVER:
            time.sleep(_LOOK_S)
            # Not scontrol, which says that a job is over while its tasks still save.
            found = _ask(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]).strip()
            if found != state:
                state = found
                print(f"job {job}: {state.lower()}", file=sys.stderr)
            shown = _show(log, shown)
    except KeyboardInterrupt:
        _ask(["scancel", job])
        print(f"job {job} was cancelled; what it saved stays", file=sys.stderr)
        return 1
    return 0 if state == "COMPLETED" else 1


def _show(log: Path, shown: int) -> int:
    try:
        with log.open("rb") as file:
            file.seek(shown)
            piece = file.read()
    except OSError:
        return shown
    _show_piece(piece)
    return shown + len(piece)


def _show_piece(piece: bytes) -> None:
    sys.stdout.write(piece.decode(errors="replace"))
    sys.stdout.flush()


def _ask(command: list[str], env: dict[str, str] | None = None) -> str:
    try:
        done = run_program(command, env, patience_s=_ANSWER_S)
    except FileNotFoundError as error:
        raise UsageError(
            f"{command[0]} is not installed here.", fix="run it where Slurm's commands are."
        ) from error
    except TimeoutError as error:
        raise RunError(f"{error}.") from error
    if done.status:
        raise RunError(f"{command[0]} failed: {done.err.strip()}")
    return done.out
