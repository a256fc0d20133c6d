"""What goes over the sockets of a run: bounded, typed, and nothing that a peer sends is evaluated."""

import re
import struct
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import plait
from plait.errors import RunError
from plait.run.wire.frames import MOST_BODY_BYTES, Incoming, pack
from plait.run.wire.inbox import Done
from plait.run.wire.peers import Peers
from plait.run.wire.store import RunStore
from plait.run.wire.tell import decode, encode

pytestmark = pytest.mark.timeout(30)


def test_nothing_on_any_wire_is_pickled() -> None:
    """What is written for fresh interpreters of our own lies in a file without a name, and is not a wire.

    Functions and rows under Spark and Ray travel as these themselves send them, over their own connections.
    """
    root = Path(plait.__file__).parent / "run"
    unsafe = re.compile(
        r"(import|from) \w*pickle|pickle\.(loads?|dumps?)|_object(_list)?\(|TCPStore\(|torch\.load\(|marshal"
    )
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if unsafe.search(path.read_text())}
    engines = {"engines/spark.py", "engines/host.py", "engines/ray_calls.py"}
    assert found == {"start/packing.py", "start/processes.py"} | engines


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_messages_are_put_together_from_pieces(size: int) -> None:
    body = bytes(range(256)) * 40
    stream = pack({"op": "set", "key": "é"}, body) + pack({"op": "check"})
    incoming = Incoming()
    found = [m for at in range(0, len(stream), size) for m in incoming.feed(stream[at : at + size])]
    assert found == [({"op": "set", "key": "é"}, body), ({"op": "check"}, b"")]


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<IQ", 1 << 30, 0),
        struct.pack("<IQ", 2, MOST_BODY_BYTES + 1),
        struct.pack("<IQ", 4, 0) + b"\x80\x04N.",
        struct.pack("<IQ", 2, 0) + b"[]",
        struct.pack("<IQ", 200_000, 0) + b"[" * 200_000,
    ],
    ids=["long head", "long body", "a pickle", "no object", "deep"],
)
def test_nonsense_is_refused(sent: bytes) -> None:
    with pytest.raises(RunError):
        Incoming().feed(sent)


def test_the_store_does_what_torch_needs(stores: list[RunStore]) -> None:
    first, second, _ = stores
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert second.check(["a", "n"]) and not second.check(["a", "b"])
    assert first.compare_set("c", "", "x") == b"x"
    assert second.compare_set("c", "y", "z") == b"x"
    assert first.delete_key("a") and not first.delete_key("a")
    assert first.num_keys() == 2
    threading.Timer(0.3, lambda: second.set("late", "here")).start()
    assert first.get("late") == b"here"
    with pytest.raises(ConnectionError, match=r"never did not come within 0\.1 s"):
        first.wait(["never"], timedelta(seconds=0.1))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 40,
        b"GET / HTTP/1.0\r\n\r\n" * 9,
        pack({"op": "pair", "key": "x", "peer": 9}),
        pack({"op": "?"}),
    ],
)
def test_one_rank_that_talks_nonsense_is_cut_off_alone(stores: list[RunStore], sent: bytes) -> None:
    stores[2]._socket.sendall(sent)
    with pytest.raises(ConnectionError, match="gone"):
        stores[2].get("a")
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"


def test_a_rank_that_does_not_read_keeps_nobody_waiting(stores: list[RunStore]) -> None:
    stores[0].set("large", b"x" * 5_000_000)
    for _ in range(3):
        stores[2]._socket.sendall(pack({"op": "get", "key": "large"}))
    assert len(stores[1].get("large")) == 5_000_000


def _peers(stores: list[RunStore]) -> list[Peers]:
    return [store.peers() for store in stores]


def test_messages_find_their_room_in_any_order(stores: list[RunStore]) -> None:
    first, second, third = _peers(stores)
    large = bytes(range(256)) * 20_000
    sent = [first.send(1, tag, memoryview(data)) for tag, data in ((7, b"early"), (8, large), (9, b""))]
    rooms = {tag: bytearray(size) for tag, size in ((9, 0), (8, len(large)), (7, 5))}
    for tag, room in rooms.items():
        second.receive(0, tag, memoryview(room)).result(10)
    assert (bytes(rooms[7]), bytes(rooms[8])) == (b"early", large)
    for done in sent:
        done.result(10)
    room = bytearray(2)
    waiting = third.receive(0, 1, memoryview(room))
    first.send(2, 1, memoryview(b"ok"))
    waiting.result(10)
    assert room == b"ok"
    for peers in (first, second, third):
        peers.close()


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_of_another_size_is_an_error_and_no_write(
    stores: list[RunStore], asked_first: bool
) -> None:
    first, second, third = _peers(stores)
    room = bytearray(b"....")
    done: Done | None = second.receive(0, 1, memoryview(room)) if asked_first else None
    first.send(1, 1, memoryview(b"12345678")).result(10)
    done = done or second.receive(0, 1, memoryview(room))
    with pytest.raises(RunError, match="rank 0 sent 8 bytes where 4 bytes were expected"):
        done.result(10)
    assert room == b"...."
    for peers in (first, second, third):
        peers.close()


def test_a_peer_that_was_gone_before_it_is_called_is_lost_at_once(stores: list[RunStore]) -> None:
    stores[1].close()
    caller = stores[0].peers()
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        caller.receive(1, 0, memoryview(bytearray(4))).result(20)
    caller.close()


def test_a_peer_that_is_gone_is_named(stores: list[RunStore]) -> None:
    first, second, third = _peers(stores)
    done = first.receive(1, 1, memoryview(bytearray(4)))
    second.send(0, 2, memoryview(b"x")).result(10)
    second.close()
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        done.result(10)
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        first.receive(1, 3, memoryview(bytearray(4))).result(10)
    first.close()
    third.close()


def test_what_is_told_comes_back() -> None:
    tensors = [
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.zeros(0, 2),
        torch.tensor([True]),
    ]
    value = {"a": [1, 2.5, None, True, "é"], "b": {"list": torch.float64, "tensors": tensors}}
    found = decode(torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8))
    assert found["a"] == value["a"]
    assert found["b"]["list"] is torch.float64
    for ours, theirs in zip(tensors, found["b"]["tensors"], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "text",
    [b"[1]", b'["tensor", "float32", [4], 0]', b'["tensor", "float32", [-1], 0]', b'["tensor", "load", [], 0]',
     b'["tensor", "uint8", [1], -1]', b'["dtype", "Tensor"]', b'{"a": 1}', b"\x80\x04N.", b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_value_is_refused(text: bytes) -> None:
    sent = struct.pack("<Q", len(text)) + text + b"\x00" * 8
    with pytest.raises((ValueError, KeyError, TypeError, RecursionError)):
        decode(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    with pytest.raises(ValueError, match="bytes of JSON"):
        decode(torch.frombuffer(bytearray(struct.pack("<Q", 1 << 60) + text), dtype=torch.uint8))
