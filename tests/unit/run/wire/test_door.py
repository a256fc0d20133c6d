"""Whoever does not prove the token is heard for 72 bytes and a few seconds, and keeps nobody else waiting."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from plait.errors import RunError
from plait.run.wire import door as doors
from plait.run.wire.door import Door, StrangerError, dial
from plait.run.wire.frames import pack
from plait.run.wire.reach import Reach, Secret
from plait.run.wire.store import RunStore
from plait.run.wire.switchboard import Switchboard

TOKEN = b"t" * 32


@pytest.fixture
def heard() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def door(heard: list[dict[str, Any]]) -> Iterator[Door]:
    guests: list[socket.socket] = []

    def receive(hello: dict[str, Any], made: socket.socket) -> dict[str, Any]:
        heard.append(hello)
        guests.append(made)
        return {"welcome": True}

    made = Door("127.0.0.1", [0], TOKEN, receive)
    yield made
    made.close()
    for guest in guests:
        guest.close()


def test_the_right_token_is_let_in(door: Door, heard: list[dict[str, Any]]) -> None:
    answer, made = dial(door.address, TOKEN, {"who": 3}, timeout_s=5)
    made.close()
    assert answer == {"welcome": True} and heard == [{"who": 3}]


def test_a_wrong_token_is_not(door: Door, heard: list[dict[str, Any]]) -> None:
    with pytest.raises(ConnectionError):
        dial(door.address, b"x" * 32, {"who": 3}, timeout_s=5)
    assert heard == [] and door.turned_away == 1


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"plait/1\n" + b"\0" * 64, pack({"who": 1})])
def test_strangers_are_turned_away_unheard(door: Door, heard: list[dict[str, Any]], said: bytes) -> None:
    with socket.create_connection(door.address, timeout=5) as stranger:
        assert len(stranger.recv(100)) == 40
        stranger.sendall(said)
        assert _end_of(stranger) == b""
    assert heard == []


def test_what_was_said_once_proves_nothing_again(door: Door, heard: list[dict[str, Any]]) -> None:
    seen: list[bytes] = []

    class Listening(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:
            seen.append(bytes(data))
            super().sendall(data)

    with pytest.MonkeyPatch.context() as patch:

        def connect(address: Any, **options: Any) -> socket.socket:
            made = Listening()
            made.connect(address)
            return made

        patch.setattr(socket, "create_connection", connect)
        dial(door.address, TOKEN, {"who": 1}, timeout_s=5)[1].close()
    with socket.create_connection(door.address, timeout=5) as stranger:
        stranger.recv(100)
        stranger.sendall(b"".join(seen))
        assert _end_of(stranger) == b""
    assert len(heard) == 1


def test_nobody_stands_between_two_that_know_the_token(door: Door, heard: list[dict[str, Any]]) -> None:
    """A stranger who has the port that is dialled passes on what both sides say: the port is part of the proof."""
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def relay() -> None:
            here, _ = taken.accept()
            with here, socket.create_connection(door.address, timeout=5) as there, suppress(OSError):
                for source, goal in ((there, here), (here, there)) * 3:
                    if not (piece := source.recv(1000)):
                        return
                    goal.sendall(piece)

        relaying = threading.Thread(target=relay, daemon=True)
        relaying.start()
        with pytest.raises(ConnectionError):
            dial(taken.getsockname(), TOKEN, {"who": 3}, timeout_s=5)
        relaying.join(5)
    assert heard == []


def test_strangers_that_hold_on_keep_nobody_waiting(
    door: Door, heard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_MOST_STRANGERS", 8)
    idle = [socket.create_connection(door.address, timeout=5) for _ in range(30)]
    dial(door.address, TOKEN, {"who": 1}, timeout_s=5)[1].close()
    assert heard == [{"who": 1}] and door.turned_away >= 22
    for stranger in idle:
        stranger.close()


def test_who_listens_must_prove_the_token_too() -> None:
    liar = Door("127.0.0.1", [0], b"other" * 8, lambda hello, made: {})
    with pytest.raises(ConnectionError):
        dial(liar.address, TOKEN, {"secret": 1}, timeout_s=5)
    liar.close()
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            made, _ = plain.accept()
            with made, suppress(OSError):
                made.sendall(b"SSH-2.0-OpenSSH_9.2p1 and more than forty bytes of it\r\n")
                made.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StrangerError, match="is no process of a run"):
            dial(plain.getsockname(), TOKEN, {"secret": 1}, timeout_s=5)


def test_ports_that_are_taken_are_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = Door("127.0.0.1", [port, 0], TOKEN, lambda hello, made: {})
        assert made.address[1] != port
        made.close()
        with pytest.raises(RunError, match="cannot listen at 127.0.0.1"):
            Door("127.0.0.1", [port], TOKEN, lambda hello, made: {})


def test_ranks_of_several_hosts_reach_each_other_whoever_asks_first() -> None:
    switchboard = Switchboard([])
    switchboard.start()

    def receive(hello: dict[str, Any], made: socket.socket) -> None:
        made.sendall(pack({}))
        switchboard.add(hello["rank"], made)

    first = Door("127.0.0.1", [0], TOKEN, receive)
    secret = Secret(token=TOKEN, host="127.0.0.1", beside=(0, 0))
    stores = []
    for rank in range(3):
        _, line = dial(first.address, TOKEN, {"rank": rank}, timeout_s=5)
        stores.append(RunStore(line.detach(), rank, timeout_s=5, reach=Reach(rank, secret, 5)))
    peers = [store.peers() for store in stores]
    sent = [peers[a].send(b, 7, memoryview(bytes([a, b]))) for a in range(3) for b in range(3) if a != b]
    for a in range(3):
        for b in range(3):
            if a != b:
                room = bytearray(2)
                peers[b].receive(a, 7, memoryview(room)).result(5)
                assert bytes(room) == bytes([a, b])
    for future in sent:
        future.result(5)
    assert peers[0].take(1, 8) is None
    for one in peers:
        one.close()
    for store in stores:
        store.close()
    switchboard.close()
    first.close()


def _end_of(stranger: socket.socket) -> bytes:
    """What is said before the connection ends; nothing, also where it ends hard."""
    try:
        return stranger.recv(100)
    except ConnectionResetError:
        return b""
