"""Tasks of one run as an engine starts them: processes with a place in their environment, each a host of its own; and
networks of their own for them."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLAIT = (sys.executable, "-c", "from plait.cli.main import main; main()")
"""The command line, of the source that is tested."""


def environment(**more: str) -> dict[str, str]:
    """Without what another engine may have left."""
    path = f"{ROOT / 'src'}:{ROOT}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def start_tasks(
    command: Sequence[str | Path],
    tasks: int,
    cwd: Path,
    *,
    differing: Sequence[Sequence[str]] = (),
    **more: str,
) -> list[subprocess.Popen[str]]:
    """The same command on `tasks` hosts, plus what differs; in sessions of their own, which are killed with them."""
    return [
        subprocess.Popen(
            [*map(str, command), *(differing[task] if differing else ())],
            cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=place,
        )
        for task, place in enumerate(places(tasks, **more))
    ]  # fmt: skip


def places(tasks: int, **more: str) -> list[dict[str, str]]:
    """The environments of tasks that are one run, each on a host of its own."""
    shared = {
        "PLAIT_TASKS": str(tasks), "PLAIT_FIRST_ADDRESS": "127.0.0.1", "PLAIT_RUN_ID": uuid.uuid4().hex,
        "PLAIT_TOKEN": uuid.uuid4().hex,
    }  # fmt: skip
    return [
        environment(**shared, PLAIT_TASK=str(task), PLAIT_HOST=f"host{task}", **more) for task in range(tasks)
    ]


def ended(tasks: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str, str]]:
    """(exit status, what was said, what was complained of) of each; nobody is left."""
    found = []
    try:
        for task in tasks:
            out, err = task.communicate(timeout=timeout_s)
            found.append((task.returncode, out, err))
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
                task.wait()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """A network of its own, joined to the others by a bridge."""

    name: str
    address: str
    interface: str

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The same, within it."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def unplug(self) -> None:
        """As if the host had lost its power: nothing leaves it, nothing comes, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def namespaces(count: int, rate: str | None = None) -> Iterator[list[Namespace]]:
    """So many networks, each with one wire to the others, of so many bits a second (`1gbit`) in each direction.

    Raises OSError where `ip` or `tc` say why not: it takes root, and the packages iproute2.
    """
    mark = uuid.uuid4().hex[:6]
    switch = f"pl{mark}"
    found = [
        Namespace(name=f"plait-{mark}-{n}", address=f"10.213.7.{n + 1}", interface="wire")
        for n in range(count)
    ]
    hub = f"plait-{mark}-hub"
    made = []
    try:
        _ip("netns", "add", hub)
        made.append(hub)
        _ip("-n", hub, "link", "add", switch, "type", "bridge")
        _ip("-n", hub, "link", "set", switch, "up")
        for number, space in enumerate(found):
            _ip("netns", "add", space.name)
            made.append(space.name)
            near, name = f"port{number}", space.name
            _ip(
                "-n", hub, "link", "add", near, "type", "veth", "peer", "name", space.interface, "netns", name
            )
            _ip("-n", hub, "link", "set", near, "master", switch, "up")
            _ip("-n", name, "addr", "add", f"{space.address}/24", "dev", space.interface)
            _ip("-n", name, "link", "set", space.interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for where, wire in ((name, space.interface), (hub, near)) if rate is not None else ():
                limit = ["root", "tbf", "rate", str(rate), "burst", "128k", "latency", "100ms"]
                command = ["ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", wire, *limit]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise OSError(f"tc tbf: {done.stderr.strip()}")
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
