"""What is written down of instructions where a device is behind its host."""

from typing import Any, cast

from plait.program.instructions import Collective, Compute, Wait
from plait.program.value import WEIGHT
from plait.run.interpret.observer import CudaClock, WorkerObserver
from plait.trace.recorder import Recorder


class Device(CudaClock):
    """Comes by every mark 1,000 ns after the one before, a second after the host."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return f"mark {self.marks}"

    def host_ns(self, moment: Any) -> int:
        return moment if isinstance(moment, int) else 10**9 + 1000 * int(moment.split()[1])


class Spans:
    """Instead of a recorder."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int]] = {}

    def describe(self, *_: Any, **__: Any) -> None: ...

    def record(self, step: int, number: int, start_ns: int, end_ns: int) -> None:
        self.found[number] = (start_ns, end_ns)


def test_a_collective_lasts_on_the_device_from_its_start_to_its_wait() -> None:
    spans = Spans()
    observer = WorkerObserver(None, cast(Recorder, spans), Device())
    total = Collective(id=1, name="c", op="all_reduce", axis="data", reads=(WEIGHT,), writes=(WEIGHT,))
    compute = Compute(id=2, name="backward", kind="backward", segment="backward")
    wait = Wait(id=3, name="wait", of=1)
    for instruction in (total, compute, wait):
        observer.entering(0, instruction, False)
        observer.done(0, instruction, 5, 6)  # the host's times, long before the device
    observer.settle(0)
    began, ended = spans.found[1]
    assert (began, ended) == (10**9 + 1000, 10**9 + 6000)
    assert began < spans.found[2][0] < spans.found[2][1] <= spans.found[3][0] < ended == spans.found[3][1]
    assert all(start_ns >= 10**9 for start_ns, _ in spans.found.values())
