"""A straggler that is tried out: a rank that takes longer to compute than it needs.

In: when it began to compute something. Out: a sleep after it, in proportion; it computes the same.
"""

import time


class Straggler:
    """How much slower than others a rank is."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._owed_ns = 0

    def delay(self, start_ns: int) -> None:
        """Sleep after what began then; what a sleep takes too long is made up for by the next."""
        if self.factor > 1:
            now_ns = time.perf_counter_ns()
            self._owed_ns += round((self.factor - 1) * (now_ns - start_ns))
            time.sleep(max(0, self._owed_ns) / 1e9)
            self._owed_ns -= time.perf_counter_ns() - now_ns
