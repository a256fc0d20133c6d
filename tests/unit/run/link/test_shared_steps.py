"""What a rank does of collectives through shared memory, row by row."""

from plait.run.link.shm import steps
from plait.run.link.shm.rows import COPY, POST, ROW, WAIT


def test_a_gather_where_it_lies_may_end_when_others_have_read() -> None:
    """What a thread hands back may be changed at once by the computation, which is in no meeting."""
    rows = steps.gather_in_place(2, 0, (8, 16), is_there=True, settles=True)
    assert [rows.words[ROW * at] for at in range(rows.count)] == [COPY, POST, WAIT] and not rows.is_settled
    at_once = steps.gather_in_place(2, 0, (8, 16), is_there=True)
    assert [at_once.words[ROW * at] for at in range(at_once.count)] == [COPY, POST] and at_once.is_settled
