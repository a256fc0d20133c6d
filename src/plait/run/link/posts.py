"""How a rank reaches the others of a run with servers: collectives among workers, messages between all.

In: a mesh, the number of servers, a rank. Out: links for the mesh, and a `Post`. Messages go through memory that the
host's processes share, whatever device they compute on; between hosts, over the ranks' own sockets. At most one step of
every worker lies at its receiver: the next one begins with weights, which come after it is taken.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from plait.options import Emulation
from plait.plan.plan import Plan
from plait.run.link.between import network_here, with_lanes
from plait.run.link.links import Links, NoLinks
from plait.run.link.process_links import ProcessLinks
from plait.run.link.shared_links import share_memory
from plait.run.link.wire import Post
from plait.run.wire.peers import Peers
from plait.run.wire.store import RunStore

_LONGEST_SLEEP_S = 0.002
"""Between two looks for an answer: looking all the time would take a processor from the others."""


def posts_between(
    plan: Plan,
    rank: int,
    device: torch.device,
    store: RunStore,
    *,
    timeout_s: float,
    emulation: Emulation | None = None,
) -> tuple[Links, Post]:
    """This rank's links and messages; workers and servers must all call it. `store`: the run's.

    What workers push and pull are messages between two ranks: only what workers sum and gather among themselves is made
    by the plan's algorithm.
    """
    mesh, servers = plan.mesh, plan.sync.servers
    share = plan.links.transport != "sockets"
    shared = share_memory(mesh, rank, timeout_s, servers) if share else None
    on_host = shared is not None and device.type == "cpu"

    def fresh() -> Links:
        found = share_memory(mesh, rank, timeout_s, servers) if on_host else None
        return found if found is not None else ProcessLinks(mesh, rank, servers, fresh=True)

    links: Links = NoLinks()
    if mesh.size > 1:
        links = shared if on_host and shared is not None else ProcessLinks(mesh, rank, servers)
        if device.type == "cpu":
            network = network_here(emulation)
            workers = replace(network, hosts=network.hosts[: mesh.size])
            links = with_lanes(links, plan, rank, workers, fresh)
    if shared is not None:
        return links, shared.mail
    return links, PeersPost(store.peers(), timeout_s)


class PeersPost:
    """Messages over this rank's own sockets to the others, which keep what comes until it is taken."""

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self._peers = peers
        self._timeout_s = timeout_s

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a message; its parts may be written to afterwards."""
        content = b"".join(part.cpu().numpy().tobytes() for part in parts)
        self._peers.send(to, _tag(message), memoryview(content))

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Where a message is there: have its bytes used, and forget it. Never waits."""
        content = self._peers.take(source, _tag(message))
        if content is None:
            return False
        use(torch.frombuffer(content, dtype=torch.uint8))
        return True

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Wait for a message and have its bytes used; an error where its sender is gone."""
        began_s, sleep_s = time.monotonic(), 1e-5
        while not self.take(message, source, use):
            lost = self._peers.lost(source)
            if lost is not None:
                if self.take(message, source, use):  # it came before the end
                    return
                raise lost
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            if time.monotonic() - began_s > self._timeout_s:
                raise ConnectionError(
                    f"rank {source} did not answer within {self._timeout_s:.0f} s: timed out."
                )


def _tag(message: str) -> int:
    """The number by which a message is found: of 64 bits, so that no two names share one; groups use others."""
    return int.from_bytes(blake2b(message.encode(), digest_size=8, person=b"plait post").digest(), "little")
