"""A run on a cluster of Ray: an actor on each host, in a placement group, each a task that starts its host's ranks.

In: a request. Out: the exit status of task 0, whose words are shown as they come. The cluster is one that runs (at
`address`, at RAY_ADDRESS, or on this host), else one that is started here. The job's file is shipped. Where the run is
elastic and a host is lost, its actor is started again as soon as Ray has a place for it; where that of task 0 is lost,
all others are started again at once, the next host first, and go on with what is in the run folder.
"""

import importlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from plait.errors import RunError, UsageError
from plait.run.engines.host import HostTask, Shipped
from plait.run.engines.ray_cluster import connected
from plait.run.engines.request import Request
from plait.run.start.watch.interrupts import Interrupts

_LOOK_S = 0.5
"""For which an actor waits for something to tell."""
_PLACE_S = 60.0
"""For Ray to find room for all hosts; more by the option `wait`."""
_SAVE_S = 150.0
"""For tasks that have lost the first one to write down what they hold, and to end."""
_MOST_STARTS = 4
"""Of a task: what ends it each time is no loss of a host."""
_OPTIONS = ("address", "cpus", "gpus", "wait", "first")


class Host:
    """The actor: one task on its host. Two calls may run at once, so that it can be told to end while it is read."""

    def __init__(self) -> None:
        self._task: HostTask | None = None

    def where(self) -> tuple[str, str, str]:
        """This host's address in the cluster, its name, and what Ray calls it."""
        ray = _ray()
        node = ray.get_runtime_context().get_node_id()
        return str(ray.util.get_node_ip_address()), socket.gethostname(), str(node)

    def start(
        self, arguments: list[str], variables: dict[str, str], shipped: Shipped | None, cwd: str
    ) -> None:
        """Start the task."""
        self._task = HostTask(arguments, variables, shipped, cwd)

    def read(self) -> tuple[bytes, int | None]:
        """What it printed, and how it ended."""
        assert self._task is not None
        return self._task.read(_LOOK_S)

    def signal(self, number: int) -> None:
        """Have the task end."""
        if self._task is not None:
            self._task.signal(number)

    def close(self) -> None:
        """End the task with all that it started."""
        if self._task is not None:
            self._task.close()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("--engine ray needs the package ray.", fix="pip install 'plait[ray]'.") from error


@dataclass(kw_only=True, slots=True)
class _Member:
    """One host of the run."""

    task: int
    bundle: int
    """Its place in the group."""
    actor: Any
    reading: Any = None
    """The answer to come."""
    code: int | None = None
    is_lost: bool = False
    """Whether its host is."""
    starts: int = 0
    """How often its task was started."""
    waits: Any = None
    """Whether its host has come back."""


class RayRun:
    """One run on a cluster."""

    def __init__(self, request: Request, variables: Mapping[str, str]) -> None:
        """`variables`: more for every task; with the token of the run."""
        self._request, self._elastic = request, request.least is not None
        self._options = request.known(*_OPTIONS)
        self._variables = dict(variables)
        self._shipped = Shipped.of(request.arguments)
        self._ray = _ray()
        self._members: list[_Member] = []
        self._group: Any = None
        self._interrupts = 0

    def run(self, say: Callable[[str], None], show: Callable[[bytes], None]) -> int:
        """To its end; `say` is told where it runs, `show` what task 0 prints."""
        address = self._options.get("address") or os.environ.get("RAY_ADDRESS") or None
        with connected(self._ray, address, max(os.cpu_count() or 1, self._request.ranks), say):
            try:
                self._place(say)
                with Interrupts() as asked:  # else Ray would end this process, and lose the run
                    return self._follow(asked, say, show)
            finally:
                self._end()

    def _bundle(self) -> dict[str, float]:
        each = self._request.ranks // self._request.hosts
        found = {"CPU": each * float(self._options.get("cpus", "1"))}
        return found | ({"GPU": each * float(self._options["gpus"])} if "gpus" in self._options else {})

    def _place(self, say: Callable[[str], None]) -> None:
        """Room on as many hosts as were asked for, and an actor on each."""
        ray, hosts = self._ray, self._request.hosts
        bundle, have = self._bundle(), ray.cluster_resources()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        told = ", ".join(f"{name} {have.get(name, 0):g}" for name in sorted(bundle))
        if len(nodes) < hosts and not self._elastic:
            raise RunError(
                f"{hosts} hosts were asked for; the cluster of Ray has {len(nodes)} ({told}).",
                fix=f"use --hosts {len(nodes)}, or start more hosts.",
            )
        strategy = "STRICT_SPREAD" if hosts > 1 else "STRICT_PACK"
        self._group = importlib.import_module("ray.util").placement_group([bundle] * hosts, strategy=strategy)
        patience_s = float(self._options.get("wait", _PLACE_S))
        if not self._group.wait(patience_s):
            wanted = ", ".join(f"{name} {count:g}" for name, count in bundle.items())
            free = ray.available_resources()
            raise RunError(
                f"Ray has no room for {hosts} hosts with {wanted} each within {patience_s:g} s: free are "
                + ", ".join(f"{name} {free.get(name, 0):g}" for name in bundle)
                + f" of {told}, on {len(nodes)} hosts.",
                fix="ask for fewer ranks, set --engine-set cpus=0.5, or wait longer with --engine-set wait=600.",
            )
        actors = [self._actor(bundle) for bundle in range(hosts)]
        where = ray.get([actor.where.remote() for actor in actors])
        here = ray.get_runtime_context().get_node_id()
        order = sorted(
            range(hosts), key=lambda bundle: (where[bundle][2] != here, bundle)
        )  # the folder is here
        self._members = [
            _Member(task=task, bundle=bundle, actor=actors[bundle]) for task, bundle in enumerate(order)
        ]
        where = [where[bundle] for bundle in order]
        each = ", ".join(f"{name} {count:g}" for name, count in bundle.items())
        names = ", ".join(f"{name} ({address})" for address, name, _ in where)
        say(f"ray: {hosts} host(s) of {len(nodes)} with {each} each: {names}; the cluster has {told}")
        self._variables |= {"PLAIT_ENGINE": "Ray", "PLAIT_TASKS": str(hosts)}
        self._start_all(self._options.get("first") or where[0][0])

    def _start_all(self, first: str) -> None:
        """Start the tasks of all hosts that are there, the first of which is at that address."""
        here = [member for member in self._members if not member.is_lost]
        self._variables |= {
            "PLAIT_FIRST_ADDRESS": first,
            "PLAIT_RUN_ID": uuid.uuid4().hex,
            "PLAIT_ABSENT": str(len(self._members) - len(here)),
            "PLAIT_RESTARTS": str(_MOST_STARTS - 1 - here[0].starts if self._elastic else 0),
        }
        self._ray.get([self._start(member) for member in here])

    def _actor(self, bundle: int) -> Any:
        made = importlib.import_module("ray.util.scheduling_strategies")
        strategy = made.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        room = self._bundle()
        kind = self._ray.remote(
            num_cpus=room["CPU"], num_gpus=room.get("GPU", 0), max_concurrency=4, max_restarts=0,
            scheduling_strategy=strategy,
        )(Host)  # fmt: skip
        return kind.remote()

    def _start(self, member: _Member) -> Any:
        variables = self._variables | {"PLAIT_TASK": str(member.task)}
        member.starts += 1
        return member.actor.start.remote(list(self._request.arguments), variables, self._shipped, os.getcwd())

    def _follow(self, asked: Interrupts, say: Callable[[str], None], show: Callable[[bytes], None]) -> int:
        while True:
            first = self._members[0]
            if asked.count > self._interrupts:
                self._interrupts += 1
                first.actor.signal.remote(asked.number)
            for member in self._members:
                self._look(member, say, show)
            if first.is_lost or (first.code or 0) < 0:
                self._start_again(say, show)
            elif first.code is not None:
                return first.code
            time.sleep(0.02)

    def _start_again(self, say: Callable[[str], None], show: Callable[[bytes], None]) -> None:
        """Task 0 is lost, with its host or alone: all that are left begin again, with what they find saved."""
        first = self._members[0]
        what = f"task 0 is lost, {'with its host' if first.is_lost else f'by signal {-(first.code or 0)}'}"
        if not self._elastic or self._interrupts or first.starts == _MOST_STARTS:
            raise RunError(
                f"{what}, and with it the run.",
                fix="start it again with --resume, where its folder can be seen; --elastic does so by itself.",
            )
        deadline = time.monotonic() + _SAVE_S
        while any(m.code is None and not m.is_lost for m in self._members) and time.monotonic() < deadline:
            for member in self._members[1:]:
                self._look(member, say, show, returns=False)
        here = [member for member in self._members if not member.is_lost]
        if not here:
            raise RunError(f"{what}, and so are all others.")
        self._ray.get([member.actor.close.remote() for member in here])
        self._members = here + [member for member in self._members if member.is_lost]
        for task, member in enumerate(self._members):
            member.task, member.code, member.reading, member.waits = task, None, None, None
        address, name, _ = self._ray.get(here[0].actor.where.remote())
        say(
            f"ray: {what}: {len(here)} of {len(self._members)} host(s) start again, the first is {name} ({address})"
        )
        self._start_all(address)

    def _look(
        self,
        member: _Member,
        say: Callable[[str], None],
        show: Callable[[bytes], None],
        *,
        returns: bool = True,
    ) -> None:
        """Take what a host has to say; find one that is lost, and start it again once it is back."""
        if member.code is not None:
            return
        if member.is_lost:
            if returns:
                self._return(member, say)
            return
        member.reading = member.reading if member.reading is not None else member.actor.read.remote()
        ready, _ = self._ray.wait([member.reading], timeout=0.05)
        if not ready:
            return
        reading, member.reading = member.reading, None
        try:
            said, member.code = self._ray.get(reading)
        except self._ray.exceptions.RayError as error:
            member.is_lost = True
            say(f"ray: the host of task {member.task} is lost: {_brief(error)}")
            return
        if said:
            show(said)
        if self._elastic and member.task > 0 and (member.code or 0) < 0 and member.starts < _MOST_STARTS:
            say(f"ray: task {member.task} was ended by signal {-(member.code or 0)}")
            self._ray.kill(member.actor)
            member.code, member.is_lost = None, True

    def _return(self, member: _Member, say: Callable[[str], None]) -> None:
        if not self._elastic:
            return
        if member.waits is None:
            member.actor = self._actor(member.bundle)
            member.waits = member.actor.where.remote()
        ready, _ = self._ray.wait([member.waits], timeout=0)
        if not ready:
            return
        try:
            address, name, _ = self._ray.get(member.waits)
            self._ray.get(self._start(member))
        except self._ray.exceptions.RayError:
            member.waits = None
            return
        member.waits, member.is_lost = None, False
        say(f"ray: task {member.task} is started again on {name} ({address})")

    def _end(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            return
        with suppress(Exception):  # whatever Ray says of hosts that are gone
            ray.wait(
                [m.actor.close.remote() for m in self._members], num_returns=len(self._members), timeout=5
            )
        for member in self._members:
            with suppress(Exception):
                ray.kill(member.actor)
        if self._group is not None:
            with suppress(Exception):
                importlib.import_module("ray.util").remove_placement_group(self._group)


def _brief(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")[:200]
