"""`naive`, `gpipe`, `1f1b`, `interleaved`, `zero-bubble`, `zero-bubble-2`, `pipedream`: the model cut into stages.

They differ in the order in which stages take micro-batches (`accumulate` of the job), so in idle time and in memory.
"""

from plait.plan.decisions import Pipe
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, PIPE, Plan


def naive(ranks: int) -> Plan:
    """One stage works at a time."""
    return _pipeline("naive", ranks)


def gpipe(ranks: int) -> Plan:
    """All forwards, then all backwards."""
    return _pipeline("gpipe", ranks)


def one_forward_one_backward(ranks: int) -> Plan:
    """Backwards as early as possible: at most as many micro-batches in flight as there are ranks."""
    return _pipeline("1f1b", ranks)


def interleaved(ranks: int) -> Plan:
    """Two stages a rank: a smaller bubble for more messages."""
    return _pipeline("interleaved", ranks, per_rank=2)


def zero_bubble(ranks: int) -> Plan:
    """Gradients of weights fill the time in which a rank would wait."""
    return _pipeline("zero-bubble", ranks)


def zero_bubble_2(ranks: int) -> Plan:
    """The same with almost twice the micro-batches in memory, and no idle time where costs are equal."""
    return _pipeline("zero-bubble-2", ranks)


def pipedream(ranks: int) -> Plan:
    """1F1B in which every micro-batch is an update of its own, on weights that are up to ranks - 1 updates old.

    There is no flush inside of a step, and one at its end: the more micro-batches (`accumulate`), the less idle time.
    Schedules of learning rates count steps, not updates.
    """
    return _pipeline("pipedream", ranks)


def _pipeline(schedule: str, ranks: int, per_rank: int = 1) -> Plan:
    return Plan(
        name=schedule,
        mesh=Mesh(axes=((PIPE, ranks), (DATA, 1))),
        pipe=Pipe(schedule=schedule, per_rank=per_rank),
    )
