"""The board, and the rule that tells a hang from a long computation."""

import multiprocessing
import os
import select
import signal
import time

import pytest

from plait.run.start.board import LABEL_BYTES, Board, Entry, State
from plait.run.start.child import run_child
from plait.run.start.watch.hang import Patience, find_hang, trim_stack


def test_a_slot_is_read_as_it_was_written() -> None:
    board = Board.create(3)
    before = time.monotonic_ns()
    board.slot_of(1).enter(5, 17, "all_reduce 3", waiting=True)
    entry = board.read(1)
    assert entry is not None
    assert (entry.rank, entry.state, entry.step, entry.index) == (1, State.WAITING, 5, 17)
    assert entry.label == "all_reduce 3"
    assert before <= entry.since_ns <= time.monotonic_ns()
    assert entry.place() == "step 6, waiting in 'all_reduce 3' (instruction 17)"
    assert [slot.state for slot in board.read_all() if slot is not None] == [
        State.STARTING,
        State.WAITING,
        State.STARTING,
    ]
    board.close()


def test_a_long_label_is_cut_at_a_whole_character() -> None:
    board = Board.create(1)
    board.slot_of(0).enter(0, 0, "x" + "é" * LABEL_BYTES)
    entry = board.read(0)
    assert entry is not None
    assert entry.label == "x" + "é" * ((LABEL_BYTES - 1) // 2)
    board.slot_of(0).enter(0, 1, "short")
    entry = board.read(0)
    assert entry is not None
    assert entry.label == "short"
    board.close()


def _write_forever(board: Board) -> None:
    post = board.slot_of(0)
    number = 0
    while True:
        number += 1
        post.enter(number, number, chr(ord("a") + number % 26) * (number % LABEL_BYTES))


@pytest.mark.timeout(30)
def test_a_reader_never_sees_half_of_a_write() -> None:
    board = Board.create(1)
    writer = multiprocessing.get_context("fork").Process(target=_write_forever, args=(board,), daemon=True)
    writer.start()
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 25
        while len(seen) < 300 and time.monotonic() < deadline:
            entry = board.read(0)
            if entry is not None and entry.state is State.RUNNING:
                assert entry.step == entry.index
                assert entry.label == chr(ord("a") + entry.step % 26) * (entry.step % LABEL_BYTES)
                seen.add(entry.step)
        assert len(seen) == 300
    finally:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        board.close()


def test_a_slot_whose_writer_died_in_the_middle_is_not_believed() -> None:
    board = Board.create(1)
    board.slot_of(0).enter(1, 1, "a")
    board._memory[64] |= 1  # the counter is odd while a write is going on
    assert board.read(0) is None
    assert board.read(0, writer_is_dead=True) is not None  # killed there, it is told where it was
    board.close()


def test_all_ranks_stop_after_the_same_step() -> None:
    board = Board.create(2)
    first, second = board.slot_of(0), board.slot_of(1)
    assert not first.stop_after(3)
    board.request_stop()
    assert first.stop_requested()
    assert second.stop_requested()
    assert not second.stop_after(3)  # rank 0 has not announced a last step yet
    assert not first.stop_after(4)  # it does now: step 5
    assert not second.stop_after(4)
    assert first.stop_after(5)
    assert second.stop_after(5)
    board.close()


def test_one_rank_stops_at_once() -> None:
    board = Board.create(1)
    board.request_stop()
    assert board.slot_of(0).stop_after(7)
    board.close()


def _entry(rank: int, state: State, label: str, age_s: float, step: int = 4) -> Entry:
    since_ns = int((1000 - age_s) * 1e9)
    return Entry(rank=rank, state=state, step=step, index=9, label=label, since_ns=since_ns, beats=2)


def _find(
    *entries: Entry | None,
    stopped: tuple[int, ...] = (),
    idle: tuple[int, ...] = (),
    hang_s: float = 10,
    free: tuple[int, ...] = (),
    silent: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    still = [[500.0 if rank in which else 0.0 for rank in range(len(entries))] for which in (stopped, idle)]
    hang = find_hang(entries, int(1000e9), Patience(hang_s=hang_s), still[0], still[1], free, silent)
    return None if hang is None else (hang.waiting, hang.missing)


def test_a_long_computation_for_which_nobody_waits_is_no_hang() -> None:
    assert _find(_entry(0, State.RUNNING, "forward", 500), _entry(1, State.RUNNING, "forward", 500)) is None


def test_a_rank_that_does_nothing_at_all_is_given_up_sooner_than_a_busy_one() -> None:
    waits, computes = _entry(0, State.WAITING, "sum", 31), _entry(1, State.RUNNING, "forward", 32)
    assert _find(waits, computes, hang_s=300) is None
    assert _find(waits, computes, hang_s=300, idle=(1,)) == ((0,), (1,))
    assert _find(_entry(0, State.WAITING, "sum", 29), computes, hang_s=300, idle=(1,)) is None
    both = (waits, _entry(1, State.WAITING, "sum", 31))
    assert _find(*both, hang_s=300, idle=(0, 1)) is None  # all are there: it may be slow


def test_a_stopped_rank_is_found_whether_or_not_anybody_waits() -> None:
    works = _entry(0, State.RUNNING, "forward", 0.1)
    for state in (State.STARTING, State.RUNNING, State.WAITING):
        assert _find(works, _entry(1, state, "forward", 60), hang_s=300, stopped=(1,)) == ((), (1,))
    ended = _entry(0, State.DONE, "", 60)
    assert _find(ended, _entry(1, State.WAITING, "compare weights", 60), stopped=(1,)) == ((), (1,))
    evaluates = _entry(1, State.WAITING, "evaluate", 60)
    assert _find(_entry(0, State.WAITING, "evaluate", 59), evaluates, hang_s=300, stopped=(1,)) == (
        (0,),
        (1,),
    )


def test_what_a_silent_host_last_said_of_its_ranks_is_not_believed() -> None:
    waits, stale = _entry(0, State.WAITING, "gather", 60, step=6), _entry(1, State.WAITING, "gather", 61)
    assert _find(waits, stale, idle=(1,)) == (
        (1,),
        (0,),
    )  # it would be the first that came, and not the missing one
    assert _find(waits, stale, idle=(1,), silent=(1,)) == ((0,), (1,))
    assert _find(waits, stale, hang_s=300, silent=(1,)) is None  # it may only be busy


def test_a_free_rank_that_does_nothing_is_found_in_the_end() -> None:
    works, sleeps = _entry(0, State.RUNNING, "forward", 0.1), _entry(1, State.RUNNING, "forward", 60)
    assert _find(works, sleeps, idle=(1,)) is None
    assert _find(works, sleeps, idle=(1,), free=(0, 1)) == ((), (1,))


def test_a_meeting_shows_as_waiting_under_the_name_of_what_is_done() -> None:
    board = Board.create(1)
    post = board.slot_of(0)

    def seen() -> tuple[State, str]:
        entry = board.read(0)
        assert entry is not None
        return entry.state, entry.label

    with post.meeting("all_gather"):
        assert seen() == (State.WAITING, "all_gather")
    post.enter(3, -1, "evaluate")
    with post.meeting("all_reduce"):
        assert seen() == (State.WAITING, "evaluate")
    assert seen() == (State.RUNNING, "evaluate")
    post.enter(3, 4, "wait 2", True)
    with post.meeting("all_reduce"):
        pass
    assert seen() == (State.WAITING, "wait 2")
    board.close()


def test_a_short_wait_is_no_hang() -> None:
    assert _find(_entry(0, State.WAITING, "sum", 9), _entry(1, State.RUNNING, "forward", 500)) is None


def test_waiting_for_a_rank_that_computes_is_a_hang() -> None:
    assert _find(_entry(0, State.WAITING, "sum", 11), _entry(1, State.RUNNING, "forward", 500)) == (
        (0,),
        (1,),
    )


def test_of_ranks_that_wait_for_different_things_the_one_that_computes_is_missing() -> None:
    """In a pipeline, a stage that does not come back keeps all others waiting, each for a message of its own."""
    waits = (_entry(0, State.WAITING, "backward 1>0", 11), _entry(2, State.WAITING, "forward 1>2", 10.5))
    assert _find(waits[0], _entry(1, State.RUNNING, "stage 1", 12), waits[1]) == ((0,), (1,))
    assert _find(waits[0], _entry(1, State.WAITING, "forward 0>1", 10.7), waits[1]) == ((0,), (1, 2))


def test_waiting_for_a_rank_that_has_returned_or_cannot_be_read_is_a_hang() -> None:
    waits = _entry(0, State.WAITING, "sum", 11)
    assert _find(waits, _entry(1, State.DONE, "", 3), None) == ((0,), (1, 2))


def test_waiting_in_different_operations_is_a_hang() -> None:
    waits = _entry(0, State.WAITING, "sum 1", 12), _entry(1, State.WAITING, "sum 2", 11)
    assert _find(*waits) == ((0,), (1,))
    waits = _entry(0, State.WAITING, "sum", 12, step=4), _entry(1, State.WAITING, "sum", 11, step=5)
    assert _find(*waits) == ((0,), (1,))


def test_a_slow_operation_with_everybody_there_gets_twice_the_time() -> None:
    assert _find(_entry(0, State.WAITING, "sum", 19), _entry(1, State.WAITING, "sum", 18)) is None
    assert _find(_entry(0, State.WAITING, "sum", 21), _entry(1, State.WAITING, "sum", 1)) == ((0, 1), ())


def test_a_stopped_rank_is_missing_even_where_it_stands() -> None:
    waits = _entry(0, State.WAITING, "sum", 12), _entry(1, State.WAITING, "sum", 11)
    assert _find(*waits, stopped=(1,)) == ((0,), (1,))


def test_a_stack_is_cut_where_the_worker_was_started() -> None:
    dump = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "job.py", line 3 in load\n'
        f'  File "{run_child.__code__.co_filename}", line 140 in run_child\n'
        '  File "x/launch.py", line 9 in launch\n'
    )
    assert trim_stack(dump).splitlines()[1:] == ['  File "job.py", line 3 in load']


def _take(board: Board, rank: int, pipe: int, count: int) -> None:
    post = board.slot_of(rank)
    for _ in range(count):
        os.write(pipe, post.tickets.take().to_bytes(4, "little"))


def _taken(read_end: int) -> list[int]:
    found = b""
    while piece := os.read(read_end, 1 << 16):
        found += piece
    return [int.from_bytes(found[at : at + 4], "little") for at in range(0, len(found), 4)]


@pytest.mark.timeout(30)
def test_every_ticket_is_taken_once_and_a_killed_rank_keeps_nobody_waiting() -> None:
    """The one that is killed never stops by itself: it dies at any line, also while it has the lock."""
    board, (read_end, write_end) = Board.create(4), os.pipe()
    processes = [
        multiprocessing.get_context("fork").Process(
            target=_take, args=(board, rank, write_end, 2_000 if rank else 1 << 40), daemon=True
        )
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    os.close(write_end)
    found: list[int] = []
    while len(found) < 500:
        found += [int.from_bytes(os.read(read_end, 4), "little") for _ in range(100)]
    processes[0].kill()
    found += _taken(read_end)
    for process in processes:
        process.join()
    assert len(set(found)) == len(found) >= 4_000
    taken = board.slot_of(3).tickets.take()
    assert set(range(taken)) - set(found) <= {
        max(set(range(taken)) - set(found), default=0)
    }  # the dead one's
    board.close()


def _hold(board: Board, pipe: int) -> None:
    with board.slot_of(1).tickets._locked():
        os.write(pipe, b"!")
        time.sleep(60)


@pytest.mark.timeout(30)
def test_a_ticket_is_waited_for_while_another_rank_takes_one_and_not_when_that_one_is_killed() -> None:
    board, (read_end, write_end) = Board.create(2), os.pipe()
    context, waited = multiprocessing.get_context("fork"), []
    holder = context.Process(target=_hold, args=(board, write_end), daemon=True)
    holder.start()
    assert os.read(read_end, 1) == b"!"
    taker = context.Process(target=_take, args=(board, 0, write_end, 1), daemon=True)
    taker.start()
    for _ in range(20):
        waited += select.select([read_end], [], [], 0.01)[0]
    assert waited == [], "it did not wait"
    holder.kill()
    assert os.read(read_end, 4) == (0).to_bytes(4, "little")
    holder.join()
    taker.join()
    board.close()


def test_tickets_end_above_all_that_were_taken_and_the_first_who_asks_says_where() -> None:
    board = Board.create(2)
    first, second = board.slot_of(0).tickets, board.slot_of(1).tickets
    assert [first.take(), second.take(), first.take(), second.take(), first.take()] == [0, 1, 2, 3, 4]
    assert second.end(4) == 8
    assert first.take() == 5
    assert [first.end(4), second.end(3)] == [8, 8]
    assert second.take() == 6
    board.close()


def test_tickets_end_at_none_where_none_was_taken() -> None:
    board = Board.create(1)
    assert [board.slot_of(0).tickets.end(4), board.slot_of(0).tickets.end(4)] == [0, 0]
    board.close()
