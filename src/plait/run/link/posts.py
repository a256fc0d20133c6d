"""How a rank reaches the others of a run with servers: collectives among workers, messages between all.

In: a mesh, the number of servers, a rank. Out: links for the mesh, and a `Post`. Messages go through memory that the
host's processes share, whatever device they compute on; where there is none, through the parent's store: slower, but
everywhere. At most one step of every worker lies there: the next one begins with weights, which come after it is taken.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from plait.plan.mesh import Mesh
from plait.run.link.links import Links, NoLinks, ProcessLinks
from plait.run.link.shared_links import share_memory
from plait.run.link.wire import Post

_LONGEST_SLEEP_S = 0.002
"""Between two looks for an answer: looking all the time would take a processor from the others."""


def posts_between(
    mesh: Mesh, servers: int, rank: int, device: torch.device, store: Store, *, timeout_s: float
) -> tuple[Links, Post]:
    """This rank's links and messages; workers and servers must all call it. `store`: the run's."""
    shared = share_memory(mesh, rank, timeout_s, servers)
    links: Links = NoLinks()
    if mesh.size > 1:
        on_host = shared is not None and device.type == "cpu"
        links = shared if on_host and shared is not None else ProcessLinks(mesh, rank, servers)
    if shared is not None:
        return links, shared.mail
    return links, StorePost(PrefixStore("post", store), rank, timeout_s)


class StorePost:
    """Messages that the parent's store keeps until they are taken."""

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a message; its parts may be written to afterwards."""
        content = b"".join(part.cpu().numpy().tobytes() for part in parts)
        self._store.set(f"{self._rank}>{to} {message}", content)  # type: ignore[arg-type]

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Where a message is there: have its bytes used, and forget it. Never waits."""
        key = f"{source}>{self._rank} {message}"
        if not self._store.check([key]):
            return False
        content = bytearray(self._store.get(key))
        with suppress(RuntimeError):  # a store that cannot forget keeps it
            self._store.delete_key(key)
        use(torch.frombuffer(content, dtype=torch.uint8))
        return True

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Wait for a message and have its bytes used."""
        began_s, sleep_s = time.monotonic(), 1e-5
        while not self.take(message, source, use):
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            if time.monotonic() - began_s > self._timeout_s:
                raise ConnectionError(
                    f"rank {source} did not answer within {self._timeout_s:.0f} s: timed out."
                )
