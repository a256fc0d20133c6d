"""What tests of sockets start from: three ranks that can reach each other."""

import socket
from collections.abc import Iterator

import pytest

from plait.run.wire.store import RunStore
from plait.run.wire.switchboard import Switchboard


@pytest.fixture
def stores() -> Iterator[list[RunStore]]:
    """The store of each rank."""
    pairs = [socket.socketpair() for _ in range(3)]
    switchboard = Switchboard([near for near, _ in pairs])
    switchboard.start()
    made = [RunStore(far.detach(), rank, timeout_s=5) for rank, (_, far) in enumerate(pairs)]
    yield made
    for store in made:
        store.close()
    switchboard.close()
