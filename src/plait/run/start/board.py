"""The board: what every rank is doing right now, in memory that the parent can read.

In: each rank's worker writes its own slot (`BoardSlot.enter`, about a microsecond). Out: the parent reads any slot
(`Board.read`) at any time, also after the rank was killed. It also carries what concerns all ranks: the request to
stop, and a counter from which workers take tickets. Writing what a rank does never blocks or allocates; nothing here
has a history: that is the trace's work.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from plait.run.start.memory_file import anonymous_file
from plait.run.start.tickets import Tickets

LABEL_BYTES = 120
"""Longer labels are cut, at a whole character."""

_SLOT = struct.Struct(f"<qqqB7x{LABEL_BYTES}s")
"""step, index, since (ns, monotonic clock), state, label; the sequence counter lies in the 8 bytes before it."""
_COUNTER = struct.Struct("<Q")
_STOP_STEP = struct.Struct("<q")
_HEADER_BYTES = 64
"""Of the board, before the slots of the ranks: a cache line."""
_STOP_AT = 0
"""Byte of the header: whether the run is asked to end."""
_HEARD_AT = 1
"""Byte of the header: whether every host knows the last step."""
_STOP_STEP_AT = 8
"""Byte of the header: the step after which all ranks end."""
_GIVER = struct.Struct("<q")
_GIVER_AT = 32
"""Byte of the header: the rank that is to hand over what it holds, plus one (0: none)."""
_SLOT_BYTES = 192
"""Whole cache lines, so that two ranks never write to the same one."""
_STATE_AT = 8 + 3 * 8
"""Byte of a slot: after the counter and three words."""
_NO_STEP = -1
"""Where there is no step yet."""
_READ_TRIES = 200
"""Reads until two agree; a slot is written in one go, so that the second nearly always does."""
_HEARD_S = 0.001
"""Between two looks whether other hosts know the last step."""


class State(IntEnum):
    """What a rank says it does."""

    STARTING = 0
    RUNNING = 1
    WAITING = 2
    DONE = 3
    GONE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One rank's slot at one moment."""

    rank: int
    """Whose slot it is."""
    state: State
    """Starting until the worker's first `enter`, done after its last."""
    step: int
    """Optimizer step, -1 before the first."""
    index: int
    """Position in the rank's instruction list."""
    label: str
    """The operation; ranks that meet in one collective write the same label."""
    since_ns: int
    """When it entered, on the monotonic clock that all processes of a host share."""
    beats: int
    """How often the rank has written: equal in two readings means that it did not move."""

    @property
    def has_begun(self) -> bool:
        """Whether the rank has come to a step: before that all ranks wait for each other."""
        return self.step != _NO_STEP or self.state is State.DONE

    def place(self) -> str:
        """Say where the rank is, for a sentence: `step 5, waiting in 'all_reduce 3' (instruction 17)`."""
        if self.state is State.STARTING:
            return "before its first step"
        verb = {
            State.RUNNING: "running",
            State.WAITING: "waiting in",
            State.DONE: "done after",
            State.GONE: "gone in",
        }[self.state]
        which = f" (instruction {self.index})" if self.index >= 0 else ""
        where = f"{verb} '{self.label}'{which}" if self.label else verb.split()[0]
        if self.has_begun:
            return where if self.step == _NO_STEP else f"step {self.step + 1}, {where}"
        return f"before its first step, {where}"


class BoardSlot:
    """One rank's writer. Use it from one thread: the slot has one sequence counter."""

    __slots__ = ("_at", "_beats", "_memory", "_now", "_rank", "_ranks", "tickets")

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, tickets: Tickets) -> None:
        self.tickets = tickets
        self._memory = memory
        self._rank = rank
        self._ranks = ranks
        self._at = _HEADER_BYTES + rank * _SLOT_BYTES
        self._beats = 0
        self._now = (_NO_STEP, -1, State.STARTING, "")

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """Say, for as long as it lasts, that what the rank does cannot go on without others.

        It keeps its name, `what` is for a rank that has none yet; an instruction that waits has said so itself.
        """
        step, index, state, label = self._now
        if state is State.WAITING:
            yield
            return
        self._write(step, index, State.WAITING, label or what)
        try:
            yield
        finally:
            self._write(step, index, State.RUNNING, label or what)

    def enter(self, step: int, index: int, label: str, waiting: bool = False) -> None:
        """Say that the rank now does `label`; `waiting` means that it cannot go on without another rank."""
        self._write(step, index, State.WAITING if waiting else State.RUNNING, label)

    def done(self, step: int = _NO_STEP, index: int = -1, label: str = "") -> None:
        """Say that the rank has nothing left to do."""
        self._write(step, index, State.DONE, label)

    def _write(self, step: int, index: int, state: State, label: str) -> None:
        # A sequence lock: odd while the slot is being written. The reader takes only what it saw twice under
        # one even count.
        memory, at, beats = self._memory, self._at, self._beats
        _COUNTER.pack_into(memory, at, beats + 1)
        _SLOT.pack_into(memory, at + 8, step, index, time.monotonic_ns(), state, label.encode())
        self._beats = beats + 2
        self._now = (step, index, state, label)
        _COUNTER.pack_into(memory, at, beats + 2)

    def stop_requested(self) -> bool:
        """Tell whether the parent wants this run to end; ranks may see it some steps apart."""
        return self._memory[_STOP_AT] != 0

    def gives(self) -> bool:
        """Tell whether this rank is to hand over what it holds, others being lost."""
        return bool(_GIVER.unpack_from(self._memory, _GIVER_AT)[0] == self._rank + 1)

    def is_gone(self, rank: int) -> bool:
        """Tell whether the parent goes on without a rank, which has died."""
        return bool(self._memory[_HEADER_BYTES + rank * _SLOT_BYTES + _STATE_AT] == State.GONE)

    def stop_after(self, step: int, ahead: int = 1) -> bool:
        """Tell whether `step`, which just ended, is the last: the same answer on every rank.

        Call it on every rank at the end of every step. Rank 0 announces the next step as the last one;
        whoever finishes that step has heard from rank 0 during it, hence after the announcement. So it holds
        where every rank depends on rank 0 within each step (any synchronous plan), and not for plans whose
        ranks run free: those use `stop_requested`. Where others may be `ahead` - 1 steps further than the next,
        that one's last step is as much later.
        """
        memory = self._memory
        if memory[_STOP_AT] == 0:
            return False
        last: int = _STOP_STEP.unpack_from(memory, _STOP_STEP_AT)[0]
        if last == _NO_STEP and self._rank == 0:
            last = step if self._ranks == 1 else step + ahead
            _STOP_STEP.pack_into(memory, _STOP_STEP_AT, last)
            while not memory[
                _HEARD_AT
            ]:  # nobody ends that step without this rank: the others hear of it in time
                time.sleep(_HEARD_S)
        return last != _NO_STEP and step >= last


class Board:
    """The shared memory of one run; made by the parent, inherited or opened by its file descriptor in the workers."""

    def __init__(self, file: int, ranks: int) -> None:
        self.file = file
        self.ranks = ranks
        self.is_alone = True
        """Whether all ranks read this board; else those of other hosts must be told what it says."""
        self._memory = mmap.mmap(file, _HEADER_BYTES + ranks * _SLOT_BYTES)

    @classmethod
    def create(cls, ranks: int) -> Self:
        """Make an empty board for `ranks` ranks; it has no name in the file system and vanishes with its processes."""
        file = anonymous_file("plait-board")
        os.ftruncate(file, _HEADER_BYTES + ranks * _SLOT_BYTES)
        board = cls(file, ranks)
        _STOP_STEP.pack_into(board._memory, _STOP_STEP_AT, _NO_STEP)
        for rank in range(ranks):
            _SLOT.pack_into(
                board._memory, _HEADER_BYTES + rank * _SLOT_BYTES + 8, _NO_STEP, -1, 0, State.STARTING, b""
            )
        return board

    def slot_of(self, rank: int) -> BoardSlot:
        """Give the writer of one rank."""
        return BoardSlot(self._memory, rank, self.ranks, Tickets(self._memory, self.file))

    def request_stop(self) -> None:
        """Ask every rank to finish its step, save and return."""
        self._memory[_HEARD_AT] |= self.is_alone
        self._memory[_STOP_AT] = 1

    @property
    def giver(self) -> int | None:
        """The rank that is to hand over what it holds."""
        found: int = _GIVER.unpack_from(self._memory, _GIVER_AT)[0]
        return None if not found else found - 1

    @giver.setter
    def giver(self, rank: int) -> None:
        _GIVER.pack_into(self._memory, _GIVER_AT, rank + 1)

    @property
    def last_step(self) -> int | None:
        """The step after which all ranks end, once rank 0 has said so."""
        last: int = _STOP_STEP.unpack_from(self._memory, _STOP_STEP_AT)[0]
        return None if last == _NO_STEP else last

    @property
    def is_stopping(self) -> bool:
        """Whether ranks are asked to end."""
        return self._memory[_STOP_AT] != 0

    def hear_last(self, step: int) -> None:
        """Rank 0, on another host, has said after which step all end."""
        _STOP_STEP.pack_into(self._memory, _STOP_STEP_AT, step)

    def let_go(self) -> None:
        """Every host knows the last step: rank 0 may go on."""
        self._memory[_HEARD_AT] = 1

    def slot(self, rank: int) -> bytes:
        """What a rank has written, as it is."""
        at = _HEADER_BYTES + rank * _SLOT_BYTES
        return self._memory[at : at + 8 + _SLOT.size]

    def put_slot(self, rank: int, slot: bytes, clock_ns: int) -> None:
        """What a rank of another host has written there, whose clock lacks `clock_ns`."""
        at = _HEADER_BYTES + rank * _SLOT_BYTES
        if len(slot) != 8 + _SLOT.size or self._memory[at + _STATE_AT] == State.GONE:
            return
        step, index, since_ns, state, label = _SLOT.unpack_from(slot, 8)
        self._memory[at : at + len(slot)] = slot[:8] + _SLOT.pack(
            step, index, since_ns + clock_ns, state, label
        )

    def mark_gone(self, rank: int) -> None:
        """Tell every rank that this one has died; to be called once it has."""
        self._memory[_HEADER_BYTES + rank * _SLOT_BYTES + _STATE_AT] = State.GONE

    def gone(self) -> set[int]:
        """Ranks without which the run goes on."""
        first = _HEADER_BYTES + _STATE_AT
        return {rank for rank in range(self.ranks) if self._memory[first + rank * _SLOT_BYTES] == State.GONE}

    def read(self, rank: int, *, writer_is_dead: bool = False) -> Entry | None:
        """Read one slot; None where its writer is in the middle of a write, or faster than the reader.

        Of a dead one, who may have been killed in the middle, the slot is what it was before that write or after it.
        """
        at = _HEADER_BYTES + rank * _SLOT_BYTES
        previous = b""
        for _ in range(_READ_TRIES):
            # Two equal copies, not the counter alone: a processor with weak ordering may show the counter
            # before the rest.
            current = self._memory[at : at + 8 + _SLOT.size]
            beats: int = _COUNTER.unpack_from(current)[0]
            if (beats % 2 == 0 or writer_is_dead) and current == previous:
                step, index, since_ns, state, label = _SLOT.unpack_from(current, 8)
                text = label.rstrip(b"\0").decode(errors="ignore")
                return Entry(
                    rank=rank,
                    state=State(state),
                    step=step,
                    index=index,
                    label=text,
                    since_ns=since_ns,
                    beats=beats,
                )
            previous = current
        return None

    def read_all(self) -> Sequence[Entry | None]:
        """Read every slot; the ranks are read one after the other, not at one moment."""
        return [self.read(rank) for rank in range(self.ranks)]

    def close(self) -> None:
        """Give the memory back; workers that still run keep theirs."""
        self._memory.close()
        os.close(self.file)
