"""Real worker processes: what comes back, how failures read, and that nothing is left behind."""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import stopping
from tests.ranks import jobs

import plait
from plait.errors import CaptureError, DataError, HangError, WorkerError
from plait.run.start.launch import Interrupted, Losses, Seat, connect, disconnect, launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("leaves_no_process")]


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process, as the kernel tells it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs(pid: int) -> bool:
    return bool(stat := _stat(pid)) and stat[0] != "Z"


def test_a_child_left_behind_would_be_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in jobs.children()
        assert _runs(child.pid)
        child.kill()
    assert child.pid not in jobs.children()


def _sleep_here(seconds: float) -> None:
    time.sleep(seconds)


def _stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def test_results_come_back_by_rank() -> None:
    factor = 10  # a closure
    assert launch(lambda seat: {"rank": seat.rank * factor, "of": seat.ranks}, ranks=3) == [
        {"rank": 0, "of": 3},
        {"rank": 10, "of": 3},
        {"rank": 20, "of": 3},
    ]


def test_workers_have_their_threads_no_stdin_and_their_own_group() -> None:
    torch.randn(300, 300) @ torch.randn(300, 300)  # OpenMP has been used here before the fork

    def main(seat: Seat) -> list[Any]:
        (torch.randn(600, 600, requires_grad=True) @ torch.randn(600, 600)).exp().sum().backward()
        return [torch.get_num_threads(), os.read(0, 1).decode(), os.getpgid(0) == os.getpid()]

    assert launch(main, ranks=2, threads_per_rank=2) == [[2, "", True]] * 2


def test_what_the_parent_left_to_collect_is_not_collected_by_workers() -> None:
    """Its destructors may need threads that a fork does not have."""

    class Left:
        def __init__(self) -> None:
            self.own = self
            self.pid = os.getpid()

        def __del__(self) -> None:
            collected.append(os.getpid() != self.pid)

    collected: list[bool] = []

    def main(seat: Seat) -> list[bool]:
        gc.collect()
        return list(collected)

    gc.disable()
    try:
        Left()
        assert launch(main, ranks=2) == [[], []]
    finally:
        gc.enable()
        gc.collect()
    assert collected == [False]


def test_events_arrive_in_order_and_do_not_block_the_worker() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def on_event(rank: int, event: dict[str, Any]) -> None:
        if not seen[rank]:
            time.sleep(0.5)  # a slow parent
        seen[rank].append(event["number"])

    def main(seat: Seat) -> float:
        begin = time.monotonic()
        for number in range(3000):
            seat.emit({"number": number, "text": "x" * 1000})  # 3 MB, more than a pipe holds
        return time.monotonic() - begin

    longest = max(launch(main, ranks=2, on_event=on_event))
    assert seen == {0: list(range(3000)), 1: list(range(3000))}
    assert longest < 5


def test_an_exception_shows_the_traceback_of_its_rank_only(tmp_path: Path) -> None:
    def main(seat: Seat) -> None:
        seat.board.enter(7, 3, "forward")
        if seat.rank == 1:
            raise ValueError("the third layer is missing")
        time.sleep(0.1)
        raise ConnectionResetError("lost by peer")

    with pytest.raises(WorkerError) as caught:
        launch(main, ranks=3, run_dir=tmp_path)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("rank 1 of 3 failed (step 8, running 'forward' (instruction 3)):")
    assert text.endswith("ValueError: the third layer is missing")
    assert "ConnectionResetError" not in text
    assert text.count("Traceback") == 1
    assert "run_child" not in text
    assert (tmp_path / "failure.txt").read_text() == text + "\n"


def test_an_earlier_lost_connection_does_not_hide_the_cause() -> None:
    def main(seat: Seat) -> None:
        if seat.rank == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5000")
        time.sleep(0.8)
        raise ValueError("the cause")

    with pytest.raises(WorkerError, match="the cause") as caught:
        launch(main, ranks=2)
    assert caught.value.rank == 1


def test_an_error_of_plait_comes_back_as_it_was() -> None:
    def main(seat: Seat) -> None:
        if seat.rank == 1:
            raise DataError("no file 'x.parquet'", fix="name a file that exists.")
        _sleep_here(60)

    with pytest.raises(DataError) as caught:
        launch(main, ranks=2)
    assert type(caught.value) is DataError
    assert str(caught.value) == "no file 'x.parquet'\nFix: name a file that exists."

    def capture(seat: Seat) -> None:
        raise CaptureError("data-dependent branch", where="job.py:12")

    with pytest.raises(CaptureError) as stopped:
        launch(capture, ranks=1)
    assert stopped.value.where == "job.py:12"


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(WorkerError, match="Tensor is not JSON serializable"):
        launch(lambda seat: torch.zeros(1), ranks=1)


def test_a_rank_that_exits_by_itself_is_reported() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 1 ended with exit status 3 and no result"):
        launch(lambda seat: os._exit(3), ranks=1)


def test_a_crash_in_c_leaves_its_stack() -> None:
    def crash_here(seat: Seat) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(WorkerError, match="killed by SIGSEGV") as caught:
        launch(crash_here, ranks=1)
    assert "crash_here" in str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_complaint_10_a_killed_rank_ends_the_others(victim: int) -> None:
    pids: dict[int, int] = {}
    grandchildren: list[int] = []
    killed_at: list[float] = []

    def on_event(rank: int, event: dict[str, Any]) -> None:
        pids[rank] = event["pid"]
        grandchildren.append(event["grandchild"])
        if len(pids) == 2:
            os.kill(pids[victim], signal.SIGKILL)
            killed_at.append(time.monotonic())

    def main(seat: Seat) -> None:
        connect(seat, timeout_s=60)
        grandchild = subprocess.Popen(["sleep", "1000"])
        seat.board.enter(5, 17, "all_reduce 3", waiting=True)
        seat.emit({"pid": os.getpid(), "grandchild": grandchild.pid})
        while True:
            dist.all_reduce(torch.ones(1000))

    with pytest.raises(WorkerError) as caught:
        launch(main, ranks=2, on_event=on_event)
    family = [*pids.values(), *grandchildren]
    while any(_runs(pid) for pid in family) and time.monotonic() - killed_at[0] < 10:
        time.sleep(0.01)  # a signal that was sent takes effect when its process is next scheduled
    assert not any(_runs(pid) for pid in family)
    assert time.monotonic() - killed_at[0] < 10
    assert caught.value.rank == victim
    text = str(caught.value)
    assert text.startswith(f"rank {victim} of 2 was killed by SIGKILL (step 6, waiting in 'all_reduce 3'")
    assert "memory" in text
    assert "peer" not in text


def test_complaint_09_a_hang_names_operation_ranks_and_stack() -> None:
    def main(seat: Seat) -> None:
        seat.board.enter(5, 2, "forward")
        if seat.rank == 1:
            _sleep_here(60)
        seat.board.enter(5, 17, "all_reduce 3", waiting=True)
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(HangError) as caught:
        launch(main, ranks=3, hang_s=1)
    assert time.monotonic() - begin < 30
    assert (caught.value.waiting, caught.value.missing) == ((0, 2), (1,))
    text = str(caught.value)
    assert "ranks 0, 2 wait in 'all_reduce 3' (step 6, instruction 17); rank 1 is missing." in text
    assert "rank 1: step 6, running 'forward' (instruction 2)" in text
    assert "_sleep_here" in text
    assert "run_child" not in text
    assert text.count("stack of rank") == 1


def test_complaint_09_a_rank_stuck_in_c_still_shows_its_stack() -> None:
    def hold_the_interpreter() -> None:
        ctypes.PyDLL(None).sleep(
            60
        )  # PyDLL keeps the interpreter's lock: no Python code can run in this process

    def main(seat: Seat) -> None:
        if seat.rank == 1:
            hold_the_interpreter()
        seat.board.enter(0, 0, "barrier", waiting=True)
        time.sleep(60)

    with pytest.raises(HangError, match="hold_the_interpreter"):
        launch(main, ranks=2, hang_s=0.5)


def test_a_stopped_rank_is_reported_as_stopped() -> None:
    def main(seat: Seat) -> None:
        seat.board.enter(1, 1, "all_reduce 0", waiting=True)
        if seat.rank == 0:
            _stop_here()
        time.sleep(60)

    with pytest.raises(HangError) as caught:
        launch(main, ranks=2, hang_s=1)
    assert (caught.value.waiting, caught.value.missing) == ((1,), (0,))
    assert "stopped by a signal" in str(caught.value)
    assert "_stop_here" in str(caught.value)  # woken up once more to say where it is


def test_a_stopped_rank_for_which_nobody_waits_is_reported() -> None:
    """Before its first entry, and while all others compute."""

    def main(seat: Seat) -> None:
        if seat.rank == 0:
            _stop_here()
        while True:
            seat.board.enter(0, 0, "forward")
            time.sleep(0.01)

    with pytest.raises(HangError, match="rank 0 does not move: before its first step") as caught:
        launch(main, ranks=2, hang_s=1)
    assert (caught.value.waiting, caught.value.missing) == ((), (0,))


def test_a_run_goes_on_without_a_stopped_rank_that_it_can_spare() -> None:
    lost: list[str] = []

    def on_event(rank: int, event: dict[str, Any]) -> None:
        lost.append(f"{rank}: {event['lost']}")

    def main(seat: Seat) -> int:
        seat.board.enter(0, 0, "forward")
        if seat.rank == 1:
            _stop_here()
        while not seat.board.is_gone(1):
            seat.board.enter(0, 1, "forward")  # one that only sleeps does not move either
            time.sleep(0.01)
        return seat.rank

    assert launch(main, ranks=3, hang_s=1, losses=Losses(dispensable=(0, 1, 2)), on_event=on_event) == [
        0,
        None,
        2,
    ]
    assert len(lost) == 1
    assert lost[0].startswith("1: rank 1 does not move")
    assert "_stop_here" in lost[0]


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
def test_ranks_that_are_stopped_before_they_run_are_named(tmp_path: Path) -> None:
    code = (
        "from plait.errors import HangError\nfrom plait.run.start.launch import launch\n"
        "try:\n    launch(lambda seat: seat.rank, ranks=2, hang_s=1, start='spawn')\n"
        "except HangError as error:\n    print(error.missing, error.what.splitlines()[0])\n"
    )
    done = stopping.run(code, tmp_path, timeout_s=60)
    assert done.stdout.startswith("(0, 1) ranks 0, 1 do not move: before its first step"), (
        done.stdout + done.stderr
    )


def test_a_dead_rank_that_had_not_come_to_a_step_is_not_spared() -> None:
    """The others wait for it to connect."""

    def main(seat: Seat) -> None:
        if seat.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        connect(seat, timeout_s=60)

    with pytest.raises(WorkerError, match=r"rank 1 of 3 was killed by SIGKILL \(before its first step"):
        launch(main, ranks=3, hang_s=60, losses=Losses(dispensable=(0, 1, 2)))


def test_a_rank_that_goes_on_after_a_short_stop_is_no_hang() -> None:
    def main(seat: Seat) -> int:
        connect(seat, timeout_s=60)
        if seat.rank == 0:
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pid}"], start_new_session=True)
            os.kill(pid, signal.SIGSTOP)
        dist.barrier()
        disconnect()
        return seat.rank

    assert launch(main, ranks=2, hang_s=8) == [0, 1]


def test_a_meeting_outside_of_instructions_is_a_hang_when_one_does_not_come() -> None:
    def main(seat: Seat) -> None:
        connect(seat, timeout_s=60)
        seat.board.enter(4, -1, "evaluate")
        if seat.rank == 1:
            _sleep_here(60)
        dist.all_reduce(torch.ones(4))

    with pytest.raises(HangError, match="_sleep_here") as caught:
        launch(main, ranks=3, hang_s=1)
    assert "ranks 0, 2 wait in 'evaluate' (step 5); rank 1 is missing." in str(caught.value)


def test_a_long_computation_is_no_hang() -> None:
    def main(seat: Seat) -> int:
        seat.board.enter(0, 0, "forward")
        time.sleep(1.5)
        return seat.rank

    assert launch(main, ranks=2, hang_s=0.3) == [0, 1]


def test_a_timeout_of_the_backend_is_told_as_the_hang_that_it_is() -> None:
    def main(seat: Seat) -> None:
        connect(seat, timeout_s=1.5)
        if seat.rank == 1:
            _sleep_here(60)
        seat.board.enter(2, 4, "all_reduce 0", waiting=True)
        dist.all_reduce(torch.ones(10))

    with pytest.raises(HangError, match="_sleep_here") as caught:
        launch(main, ranks=2, hang_s=100)
    assert (caught.value.waiting, caught.value.missing) == ((0,), (1,))


def test_a_worker_that_a_thread_keeps_alive_does_not_keep_the_run() -> None:
    def main(seat: Seat) -> int:
        threading.Thread(target=time.sleep, args=(60,)).start()
        return 4

    begin = time.monotonic()
    assert launch(main, ranks=1) == [4]
    assert time.monotonic() - begin < 45


def _all_reduce(seat: Seat) -> float:
    connect(seat, timeout_s=30)
    total = torch.full((1000,), float(seat.rank + 1))
    dist.all_reduce(total)
    disconnect()
    return float(total.mean())


def test_a_sum_through_connect() -> None:
    assert launch(_all_reduce, ranks=3) == [6.0, 6.0, 6.0]


def test_complaint_23_two_runs_at_once_need_no_flags() -> None:
    results: dict[int, Any] = {}

    def start(number: int) -> None:
        results[number] = launch(_all_reduce, ranks=2)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [3.0, 3.0], 1: [3.0, 3.0]}


def test_complaint_20_a_fresh_interpreter_takes_a_lambda() -> None:
    base = 5
    local: Callable[[int], int] = lambda rank: rank + base  # noqa: E731
    assert launch(lambda seat: [local(seat.rank), _all_reduce(seat)], ranks=2, start="spawn") == [
        [5, 3.0],
        [6, 3.0],
    ]


_SCRIPT = """
import json, os, sys, time
from pathlib import Path
from plait.run.start.launch import Interrupted, launch
out = Path(sys.argv[1])
print("main runs", flush=True)

class Model:
    size = 3

def main(seat):
    seat.emit({"pid": os.getpid()})
    step = 0
    while not seat.board.stop_after(step):
        step += 1
        time.sleep(0.01)
        seat.board.enter(step, 0, "step")
    if "stubborn" in sys.argv:
        time.sleep(60)
    (out / f"checkpoint-{seat.rank}").write_text(str(step))
    return Model.size

pids = []
def on_event(rank, event):
    pids.append(event["pid"])
    if len(pids) == 2:
        print(json.dumps(pids), flush=True)

if __name__ == "__main__":
    try:
        print(launch(main, ranks=2, start=sys.argv[2], on_event=on_event))
    except Interrupted as stop:
        print(json.dumps([stop.number, stop.results, stop.returned]), flush=True)
"""


class _Script:
    """The script above in a process of its own, whose workers have started."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(_SCRIPT))
        source = str(Path(plait.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(folder), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
            process_group=0,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "main runs\n"
        self.pids: list[int] = json.loads(self.process.stdout.readline())

    def end(self) -> tuple[int, Any]:
        output, _ = self.process.communicate(timeout=40)
        return self.process.returncode, json.loads(output) if output else None

    def workers(self) -> list[int]:
        return [pid for pid in self.pids if _runs(pid)]


@pytest.mark.parametrize(
    ("start", "number"), [("fork", signal.SIGINT), ("fork", signal.SIGTERM), ("spawn", signal.SIGINT)]
)
def test_ctrl_c_lets_the_workers_save(tmp_path: Path, start: str, number: int) -> None:
    script = _Script(tmp_path, start)
    for worker in script.workers() if number == signal.SIGTERM else ():
        os.kill(worker, number)  # as Slurm and systemd do: to all processes
    os.killpg(script.process.pid, number)  # as the terminal does: to the whole foreground group
    assert script.end() == (0, [number, [3, 3], True])
    assert all(int((tmp_path / f"checkpoint-{rank}").read_text()) > 0 for rank in range(2))
    assert script.workers() == []


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    script = _Script(tmp_path, "fork", "stubborn")
    os.kill(script.process.pid, signal.SIGINT)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(script.process.pid, signal.SIGINT)
    assert script.end() == (0, [signal.SIGINT, [None, None], False])
    assert time.monotonic() - begin < 10
    assert script.workers() == []


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_vanish_with_a_killed_parent(tmp_path: Path, start: str) -> None:
    script = _Script(tmp_path, start)
    assert len(script.workers()) == 2
    script.process.kill()
    script.process.wait()
    assert script.process.stdout is not None
    script.process.stdout.close()
    deadline = time.monotonic() + 5
    while script.workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert script.workers() == []


def test_ctrl_c_here_raises_a_keyboard_interrupt_and_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def main(seat: Seat) -> str:
        seat.emit({})
        while not seat.stop_requested():
            time.sleep(0.01)
        return "saved"

    with pytest.raises(KeyboardInterrupt) as caught:
        launch(main, ranks=1, on_event=lambda rank, event: os.kill(os.getpid(), signal.SIGINT))
    assert isinstance(caught.value, Interrupted)
    assert caught.value.results == ["saved"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_rank_without_which_the_others_cannot_go_on_after_all_is_named() -> None:
    """Not one of those that waited for it."""

    def main(seat: Seat) -> int:
        connect(seat, timeout_s=60)
        seat.board.enter(0, 0, "begun")
        dist.all_reduce(torch.ones(4))
        if seat.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
        disconnect()
        return seat.rank

    with pytest.raises(WorkerError, match="rank 0 of 3 was killed by SIGKILL"):
        launch(main, ranks=3, losses=Losses(dispensable=(0, 1, 2)))
