"""The batch script of a run on Slurm.

In: a request. Out: text. One task a host starts that host's ranks. A job that Slurm requeues, as after a preemption,
finds what it saved and goes on from there.
"""

import re
import shlex

from plait.errors import UsageError
from plait.run.engines.request import Request

_LINES = (
    "partition",
    "time",
    "account",
    "qos",
    "gpus-per-node",
    "cpus-per-task",
    "mem",
    "constraint",
    "reservation",
)
_AHEAD_S = 120
"""Before its end, a job is told: time for a checkpoint."""

_GO_ON = (
    "# told before its limit, it has saved: it goes on after; a job that is cancelled does not run any more",
    'if [ $code = 130 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then',
    '  scontrol requeue "$SLURM_JOB_ID" && sleep 600',
    "fi",
)

_OWN_CODE = (
    'if [ -s "$PLAIT_STATUS" ]; then code=$(cat "$PLAIT_STATUS")   # of task 0: those of lost nodes do not count',
    'elif [ "$out/metrics.jsonl" -nt "$PLAIT_STATUS" ]; then code=130; fi   # killed, after new steps: as if told',
    'rm -f "$PLAIT_STATUS"',
)

_REQUEUE = (
    "export PLAIT_REQUEUE=1   # where this node is lost, tasks of others ask Slurm to run this script again"
)

_RESUME = '[ -d "$out/checkpoints" ] && more=(--resume "$out")   # a job that was requeued goes on'


def script(request: Request, name: str, out: str | None, *, runs: bool = True) -> str:
    """What sbatch is given; `out`: the run folder, where it is a run."""
    options = request.known(*_LINES, "container", "setup")
    folder = out if out is not None else f"runs/{name}-slurm-$SLURM_JOB_ID"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_word(name)}",
        f"#SBATCH --nodes={_nodes(request)}",  # not how many tasks each has: of 1-2 nodes Slurm would then give one
        f"#SBATCH --output={_word(name)}-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=USR1@{_AHEAD_S}",
    ]
    for option in _LINES:
        if option in options:
            lines.append(f"#SBATCH --{option}={_word(options[option])}")
    outlives, each = request.least is not None, request.ranks // request.hosts
    if outlives:
        lines.append("#SBATCH --no-kill")
    stays = " --no-kill" if outlives else ""  # a node that is lost ends neither the job nor the step
    container = f" --container-image={_word(options['container'])}" if "container" in options else ""
    arguments = " ".join(shlex.quote(word) for word in request.command)
    quoted = shlex.quote(out) if out is not None else f'"{folder}"'
    lines += [
        "",
        *([options["setup"]] if "setup" in options else []),
        *([f"export PLAIT_RANKS_EACH={each}   # of as many nodes as there are"] if outlives else []),
        *(["export PLAIT_STATUS=$(mktemp)"] if outlives else []),
        *([_REQUEUE] if outlives and runs else []),
        *(
            (
                f"out={quoted}",
                'more=(--out "$out")',
                *([] if outlives else [_RESUME]),  # an elastic run finds it by itself
            )
            if runs
            else ("more=()",)
        ),
        f'srun --ntasks-per-node=1 --kill-on-bad-exit=0{stays}{container} {arguments} "${{more[@]}}"',
        "code=$?",
        *(_OWN_CODE if outlives else ()),
        *(_GO_ON if runs else ()),
        "exit $code",
        "",
    ]
    return "\n".join(lines)


def _nodes(request: Request) -> str:
    """How many; an elastic job that is requeued begins with those that are left."""
    each, most = request.ranks // request.hosts, request.hosts
    least = most if request.least is None else max(1, -(-request.least // each))
    return f"{least}-{most}" if least < most else str(most)


def _word(text: str) -> str:
    """A value of a directive, which may not end it."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:/@%+=\[\]-]+", text):
        raise UsageError(
            f"{text!r} is no value for a line of a batch script.", fix="use letters, digits and . , : / - _"
        )
    return text
