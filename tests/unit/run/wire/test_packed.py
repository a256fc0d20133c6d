"""Numbers come out of fewer bytes as they went in, bit by bit; what is broken is told."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plait.errors import RunError
from plait.run import native
from plait.run.wire.packed import pack, unpack

compiled = native.compiled()
pytestmark = pytest.mark.skipif(
    compiled is None or not hasattr(compiled, "plait_pack"),
    reason="no compiled core: install gcc, then plait",
)
_SEED = torch.Generator().manual_seed(7)


def _normal(count: int) -> Tensor:
    return torch.randn(count, generator=_SEED)


KINDS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: _normal(4096),
    "a block and a bit": lambda: _normal(256 + 3),
    "less than a block": lambda: _normal(255),
    "of one size": lambda: torch.full((1024,), 0.3),
    "small and large by turns": lambda: torch.where(torch.arange(4096) % 40 == 0, 1e-3, 1.0) * _normal(4096),
    "one large among small": lambda: torch.cat([torch.tensor([1e3]), 1e-3 * _normal(1023)]),
    "of any size": lambda: torch.exp(30 * _normal(4096)),
    "zeros": lambda: torch.zeros(2048),
    "negative zeros": lambda: -torch.zeros(2048),
    "zeros among numbers": lambda: torch.relu(_normal(4096)),
    "rows of zeros": lambda: (_normal(4096).view(8, 512) * (torch.arange(8) % 2)[:, None]).view(-1),
    "subnormal": lambda: 1e-40 * _normal(1024),
    "infinite and none": lambda: torch.where(torch.arange(1024) % 9 == 0, float("inf"), float("nan")),
    "any bits": lambda: torch.randint(-(2**31), 2**31, (4096,), generator=_SEED).int().view(torch.float32),
}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@pytest.fixture(params=["compiled", "python"])
def at_the_other_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From here on, the core that the other host has."""

    def change() -> None:
        if request.param == "python":
            monkeypatch.setattr(native, "compiled", lambda: None)

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_is_lost(kind: str, at_the_other_end: Callable[[], None]) -> None:
    numbers = KINDS[kind]()
    packed = pack(_bytes(numbers))
    if packed is None:
        assert kind in ("less than a block", "of any size", "any bits")
        return
    assert len(packed) < numbers.nbytes
    room = torch.full_like(numbers, 7.0)
    at_the_other_end()
    unpack(bytearray(packed), _bytes(room))
    assert torch.equal(room.view(torch.int32), numbers.view(torch.int32))


def test_numbers_of_one_distribution_take_27_bits_and_zeros_next_to_nothing() -> None:
    normal, zeros = pack(_bytes(_normal(1 << 16))), pack(_bytes(torch.zeros(1 << 16)))
    assert normal is not None and len(normal) < 0.86 * (1 << 18)
    assert zeros is not None and len(zeros) < 0.003 * (1 << 18)


def test_broken_bytes_are_told_and_nothing_is_written_beyond_the_room(
    at_the_other_end: Callable[[], None],
) -> None:
    numbers = torch.cat([_normal(1024), torch.zeros(512), _normal(100)])
    packed = pack(_bytes(numbers))
    assert packed is not None
    at_the_other_end()
    memory = torch.zeros(numbers.numel() + 256)
    room = _bytes(memory[: numbers.numel()])
    for broken in (packed[:-1], packed[:1000], packed[:1], bytes(packed) + b"\0", b""):
        with pytest.raises(RunError, match="not 1,636 packed numbers"):
            unpack(bytearray(broken), room)
    places = torch.randint(len(packed), (300,), generator=_SEED).tolist()
    for place in places:  # what is still of the right size gives other numbers, the rest an error
        changed = bytearray(packed)
        changed[place] ^= 0xFF
        try:
            unpack(changed, room)
        except RunError:
            continue
    assert not memory[numbers.numel() :].any()
