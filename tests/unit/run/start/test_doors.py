"""A first host whose name has several addresses: it listens at those that are its own, until the others have come."""

import os
import socket

import pytest

from plait.errors import RunError
from plait.run.join.addresses import addresses_of_first
from plait.run.join.place import Place
from plait.run.join.token import ports_of
from plait.run.start.tasks import follower
from plait.run.start.tasks.doors import Doors
from plait.run.wire.frames import pack

_TOKEN = os.urandom(32)  # it names ports, which another test may have meanwhile
_ELSEWHERE = "240.0.0.1"
"""No host has it, and nothing leads there."""
PLACE = Place(engine="torchrun", task=1, tasks=2, local_tasks=1, first="node0", run="1")


def _receive(hello: dict[str, object], made: socket.socket) -> None:
    made.sendall(pack({}))
    made.close()


def test_all_addresses_of_a_name_are_tried_and_unused_doors_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doors = Doors((_ELSEWHERE, "127.0.0.3", "127.0.0.2"), ports_of(_TOKEN), _TOKEN, _receive)
    try:
        assert doors.address[0] == "127.0.0.3"
        doors.keep(())
        assert doors.address[0] == "127.0.0.3"  # nobody has come
        assert doors.hosts == "127.0.0.3 or 127.0.0.2"
        doors.keep(["127.0.0.2"])
        assert doors.address[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", doors.address[1]), timeout=5)
        monkeypatch.setattr(follower, "addresses_of_first", lambda place: (_ELSEWHERE, "127.0.0.2"))
        where, made = follower._call_first(PLACE, _TOKEN, {}, None, 5.0)
        made.close()
        assert where == doors.address
    finally:
        doors.close()
    with pytest.raises(RunError, match="cannot listen at 240.0.0.1"):
        Doors((_ELSEWHERE,), ports_of(_TOKEN), _TOKEN, _receive)


def test_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["127.0.1.1", "10.1.2.3", "10.4.5.6", "10.1.2.3"]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in told]
    )
    assert addresses_of_first(PLACE) == ("10.1.2.3", "10.4.5.6")
    told[:] = ["127.0.1.1"]
    assert addresses_of_first(PLACE) == ("127.0.1.1",)
