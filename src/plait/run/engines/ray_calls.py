"""A function on every rank of a cluster of Ray: an actor a rank, each of which calls it in a process of its own.

In: a function. Out: what it returned, by rank. The cluster is the one at hand, else one that runs on this host or at
RAY_ADDRESS, else one that is started here. It starts no plan: the function meets the others by `plait.horovod`.
"""

import importlib
import os
import socket
import uuid
from collections.abc import Callable
from contextlib import closing
from secrets import token_hex
from typing import Any

import cloudpickle

from plait.errors import RunError, UsageError
from plait.files.scratch import scratch_folder
from plait.run.engines.host import CALL, Ended, HostTask, values_of

_LOOK_S = 0.5
"""For which an actor waits for something to be printed."""
_KEPT_BYTES = 1 << 16
"""Of what a rank said that comes back."""
_PLACE_S = 60.0
"""For Ray to find room for all ranks."""


class Caller:
    """The actor: one rank."""

    def where(self) -> tuple[str, str]:
        """This host's address in the cluster, and its name."""
        return str(importlib.import_module("ray").util.get_node_ip_address()), socket.gethostname()

    def call(self, rank: int, function: bytes, variables: dict[str, str], cwd: str) -> Ended:
        """Call the function in a process."""
        with scratch_folder() as folder:
            given, value = folder / "given", folder / "value"
            given.write_bytes(function)
            files = {"PLAIT_GIVEN": str(given), "PLAIT_VALUE": str(value)}
            with closing(HostTask((), variables | files, None, cwd, CALL)) as process:
                said, code = b"", None
                while code is None:
                    piece, code = process.read(_LOOK_S)
                    said = (said + piece)[-_KEPT_BYTES:]
            returned = value.read_bytes() if value.exists() else None
            return Ended(task=rank, code=code, said=said.decode(errors="replace"), value=returned)


def call_everywhere(function: Callable[[], Any], ranks: int) -> list[Any]:
    """What a function returns in a process of each rank."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("Ray needs the package ray.", fix="pip install 'plait[ray]'.") from error
    began = not ray.is_initialized()
    if began:
        quiet = {"log_to_driver": False, "logging_level": "error"}
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **quiet)
        except ConnectionError:
            ray.init(num_cpus=max(os.cpu_count() or 1, ranks), **quiet)
    group = importlib.import_module("ray.util").placement_group([{"CPU": 1}] * ranks, strategy="PACK")
    try:
        if not group.wait(_PLACE_S):
            raise RunError(
                f"Ray has no room for {ranks} ranks with a CPU each within {_PLACE_S:g} s: free are "
                f"{ray.available_resources().get('CPU', 0):g} of {ray.cluster_resources().get('CPU', 0):g}.",
                fix="ask for fewer ranks.",
            )
        return _called(ray, group, cloudpickle.dumps(function), ranks)
    finally:
        importlib.import_module("ray.util").remove_placement_group(
            group
        )  # its actors end, and their processes
        if began:
            ray.shutdown()


def _called(ray: Any, group: Any, function: bytes, ranks: int) -> list[Any]:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    actors = []
    for bundle in range(ranks):
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        actors.append(ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy=strategy)(Caller).remote())
    where = ray.get([actor.where.remote() for actor in actors])
    names = [name for _, name in where]
    shared = {
        "PLAIT_ENGINE": "Ray", "PLAIT_TASKS": str(ranks), "PLAIT_FIRST_ADDRESS": where[0][0],
        "PLAIT_RUN_ID": uuid.uuid4().hex, "PLAIT_TOKEN": token_hex(32),
    }  # fmt: skip
    under_way = [
        actor.call.remote(
            rank,
            function,
            shared | {"PLAIT_TASK": str(rank), "PLAIT_LOCAL_TASKS": str(names.count(names[rank]))},
            os.getcwd(),
        )
        for rank, actor in enumerate(actors)
    ]
    try:
        return values_of(ray.get(under_way))
    except ray.exceptions.RayActorError as error:
        raise RunError(f"a host of the cluster of Ray is lost: {error}") from error
