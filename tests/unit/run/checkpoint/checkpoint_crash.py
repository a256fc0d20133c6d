"""A script: save checkpoints in child processes, kill -9 them, and see that the last good one is always there.

`python checkpoint_crash.py FOLDER calls` kills one save at each of its file operations in turn; `... random` kills a
child that saves in a loop, at a dozen random moments. Exits with a message at the first loss.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from plait.run.checkpoint.state import OptimizerState, TrainingState
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint

WATCHED = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
)


def make_state(step: int) -> TrainingState:
    weight = torch.full((64, 64), float(step))
    optimizer = OptimizerState(groups=[], tensors={"weight": {"exp_avg": weight + 1}}, values={})
    return TrainingState(step=step, parameters={"weight": weight}, buffers={}, optimizer=optimizer)


def check(folder: Path, *, at_least: int, at_most: int) -> int:
    notices: list[str] = []
    state = load_checkpoint(folder, on_notice=notices.append)
    if not at_least <= state.step <= at_most:
        sys.exit(f"step {state.step} was loaded; {at_least} was complete and {at_most} begun")
    whole = torch.equal(state.parameters["weight"], torch.full((64, 64), float(state.step)))
    if not whole or not torch.equal(
        state.optimizer.tensors["weight"]["exp_avg"], state.parameters["weight"] + 1
    ):
        sys.exit(f"step {state.step} is torn")
    if notices:
        sys.exit(f"a kill left a damaged checkpoint behind: {notices}")
    return state.step


def kill_at_call(folder: Path, step: int, number: int) -> bool:
    """Save in a child that kills itself at its `number`-th watched call; True where it lived to the end."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, _arguments: object) -> None:
            nonlocal seen
            if event in WATCHED:
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save_checkpoint(folder, make_state(step), keep=1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def kill_at_every_call(folder: Path) -> None:
    number, survived = 0, False
    while not survived:
        number += 1
        attempt = folder / str(number)
        save_checkpoint(attempt, make_state(1), keep=1)
        survived = kill_at_call(attempt, 2, number)
        check(attempt, at_least=2 if survived else 1, at_most=2)
        save_checkpoint(attempt, make_state(3), keep=1)
        if (left := sorted(path.name for path in attempt.iterdir())) != ["step-00000003"]:
            sys.exit(f"the next save leaves {left} after a kill at call {number}")
    print(f"{number} calls")


def kill_at_random(folder: Path) -> None:
    save_checkpoint(folder, make_state(1), keep=2)
    good = 1
    for attempt in range(12):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for step in range(good + 1, good + 100_000):
                save_checkpoint(folder, make_state(step), keep=2)
                os.write(writer, f"{step} ".encode())
        os.close(writer)
        time.sleep(random.Random(attempt).uniform(0.005, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reader) as pipe:
            reported = pipe.read().split()
        last = int(reported[-1]) if reported else good
        good = check(folder, at_least=last, at_most=last + 1)
    print(f"12 kills, step {good}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"calls": kill_at_every_call, "random": kill_at_random}[sys.argv[2]](Path(sys.argv[1]))
