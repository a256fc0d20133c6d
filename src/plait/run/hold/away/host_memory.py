"""Tensors that lie in the host's memory, and the two ways between there and a device.

In: tensors, by a key. Out: the same tensors elsewhere. On a GPU both ways are streams of their own beside the
computation, and host memory is pinned; nobody waits but the streams for each other. On a processor, host and device are
the same memory in two places: what is copied is copied at once.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import RunError
from plait.run.hold.away.slots import Key, Slots, bytes_of, slots_of

_UNDER_WAY = 2
"""Copies of tensors that own their memory which may be under way before the host waits for the oldest: their memory is
given up only then, so the host must not run far ahead of the device."""


@dataclass(slots=True)
class Parcel:
    """Tensors that travel together."""

    slots: Slots
    host: Tensor
    """Bytes."""
    room: Tensor | None = None
    """Memory on the device where it is at hand, or on its way there."""
    arrived: torch.cuda.Event | None = None
    left: torch.cuda.Event | None = None

    def there(self) -> dict[Key, Tensor]:
        """The tensors on the host."""
        return {key: slot.view(self.host) for key, slot in self.slots.of.items()}

    def is_in(self, flat: Tensor | None, tensors: Mapping[Key, Tensor]) -> bool:
        """Whether these are the tensors of the parcel in some memory, maybe changed."""
        if flat is None or tensors.keys() != self.slots.of.keys():
            return False
        start, of = flat.data_ptr(), self.slots.of
        return all(
            tensor.data_ptr() == start + of[key].offset and tensor.shape == of[key].shape
            for key, tensor in tensors.items()
        )

    def take(self, tensors: Mapping[Key, Tensor]) -> None:
        """Copy tensors to the host, from wherever they are."""
        for key in self.slots.copied:
            start = self.slots.of[key].offset
            source = bytes_of(tensors[key])
            self.host[start : start + source.numel()].copy_(source, non_blocking=True)

    def here(self) -> dict[Key, Tensor]:
        """The tensors on the device."""
        assert self.room is not None
        return {key: slot.view(self.room) for key, slot in self.slots.of.items()}


@dataclass(slots=True)
class MemoryLedger:
    """Counts what copies keep on either side, and holds them to what there may be."""

    device_limit: int | None = None
    """Bytes that may be at hand at once; None: as many as there are."""
    host_limit: int | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    device_peak: int = 0
    _one: threading.Lock = field(default_factory=threading.Lock)

    def take(self, *, device: int = 0, host: int = 0) -> None:
        """Some memory is taken, or (less than 0) given back; by any thread."""
        with self._one:
            self.device_bytes += device
            self.host_bytes += host
            self.device_peak = max(self.device_peak, self.device_bytes)
        for where, used, limit in (
            ("device", self.device_bytes, self.device_limit),
            ("host", self.host_bytes, self.host_limit),
        ):
            if limit is not None and used > limit:
                raise RunError(
                    f"memory.offload: {used} bytes are on the {where} at once, and {limit} may be.",
                    fix="leave more on the other side: another share in memory.offload.",
                )


@dataclass(slots=True)
class HostMemory:
    """One rank's parcels."""

    device: torch.device
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    parcels: dict[Key, Parcel] = field(default_factory=dict)
    _spare: list[tuple[Tensor, torch.cuda.Event | None]] = field(default_factory=list)
    """Memory on the device that is free, once an event has passed."""
    _leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = field(default_factory=deque)
    _streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
    """In, and out."""

    def has(self, key: Key, tensors: Mapping[Key, Tensor]) -> bool:
        """Whether tensors are those of a parcel, on the host."""
        parcel = self.parcels.get(key)
        return parcel is not None and parcel.is_in(parcel.host, tensors)

    def fetch(self, key: Key) -> None:
        """Begin to bring a parcel to the device; nothing where the host has none."""
        parcel = self.parcels.get(key)
        if parcel is None or parcel.room is not None:
            return
        room, free = self._take(parcel.host.numel())
        parcel.room = room
        if self.device.type == "cuda":
            incoming, _ = self._ways()
            for event in (free, parcel.left):
                if event is not None:
                    incoming.wait_event(event)
            with torch.cuda.stream(incoming):
                room.copy_(parcel.host, non_blocking=True)
            parcel.arrived = incoming.record_event()

    def arrive(self, key: Key) -> dict[Key, Tensor] | None:
        """The tensors of a parcel that was fetched, on the device; None: there is none."""
        parcel = self.parcels.get(key)
        if parcel is None:
            return None
        assert parcel.room is not None
        if parcel.arrived is not None:
            torch.cuda.current_stream().wait_event(parcel.arrived)
            parcel.arrived = None
        elif self.device.type != "cuda":
            parcel.room.copy_(parcel.host)
        return parcel.here()

    def store(self, key: Key, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Begin to bring tensors to the host, and give up their memory; the tensors there."""
        if not tensors:
            return {}
        parcel = self.parcels.get(key)
        in_room = parcel is not None and parcel.is_in(parcel.room, tensors)
        if not in_room:
            slots = slots_of(tensors)
            if parcel is None or parcel.slots != slots:
                parcel = self.parcels[key] = self._parcel(slots, parcel)
        assert parcel is not None
        there = parcel.there()
        if not any(tensor.is_cuda for tensor in tensors.values()):
            parcel.take(tensors)
            self._give(parcel, None)
            return there
        _, outgoing = self._ways()
        outgoing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(outgoing):
            if in_room:
                assert parcel.room is not None
                parcel.host.copy_(parcel.room, non_blocking=True)
            else:
                parcel.take(tensors)
        parcel.left = outgoing.record_event()
        if not in_room:
            self._leaving.append((parcel.left, list(tensors.values())))
            while len(self._leaving) > _UNDER_WAY:
                self._leaving.popleft()[0].synchronize()
        self._give(parcel, parcel.left)
        return there

    def wait(self, key: Key) -> None:
        """Until the host has what was stored."""
        parcel = self.parcels.get(key)
        if parcel is not None and parcel.left is not None:
            parcel.left.synchronize()

    def drop(self, key: Key) -> dict[Key, Tensor]:
        """Give up what is at hand of a parcel; the tensors on the host."""
        parcel = self.parcels[key]
        event = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        self._give(parcel, event)
        return parcel.there()

    def forget(self) -> None:
        """All tensors are made anew elsewhere."""
        self.settle()
        for parcel in self.parcels.values():
            self._give(parcel, None)
            self.ledger.take(host=-parcel.host.numel())
        self.parcels.clear()

    def settle(self) -> None:
        """Wait until the host has everything that was sent there."""
        if self._streams is not None:
            self._streams[1].synchronize()
        self._leaving.clear()

    def _ways(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            self._streams = (_stream(self.device), _stream(self.device))
        return self._streams

    def _take(self, num_bytes: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Memory on the device, and what must have passed before it is written."""
        self.ledger.take(device=num_bytes)
        fits = [entry for entry in self._spare if entry[0].numel() >= num_bytes]
        if fits:
            room, free = min(fits, key=lambda entry: entry[0].numel())
            self._spare = [entry for entry in self._spare if entry[0] is not room]
            return room[:num_bytes] if room.numel() > num_bytes else room, free
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            return room, None
        return room, torch.cuda.current_stream().record_event()

    def _give(self, parcel: Parcel, free: torch.cuda.Event | None) -> None:
        if parcel.room is None:
            return
        self.ledger.take(device=-parcel.host.numel())
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(parcel.room.untyped_storage())
        self._spare.append((whole, free))
        parcel.room = parcel.arrived = None

    def _parcel(self, slots: Slots, before: Parcel | None) -> Parcel:
        if before is not None:
            self.settle()
            self._give(before, None)
            self.ledger.take(host=-before.host.numel())
        self.ledger.take(host=slots.size)
        return Parcel(slots=slots, host=_host_bytes(slots.size, pinned=self.device.type == "cuda"))


def _host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Memory of exactly this size: torch's own pinned memory comes in powers of two."""
    made = torch.empty(size, dtype=torch.uint8)
    if pinned:
        made.zero_()  # by all threads; pinning would take page by page from the system, by one
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(made.data_ptr(), size, 0))
        if error:
            raise RunError(
                f"memory.offload: {size} bytes of the host's memory cannot be pinned (CUDA error {error}).",
                fix="keep less there, or allow more: `ulimit -l`.",
            )
        weakref.finalize(made, runtime.cudaHostUnregister, made.data_ptr())
    return made


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
