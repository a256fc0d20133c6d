"""Whose exchange with easgd's center is taken next: pure logic."""


class Turns:
    """Everybody as they come, or all workers in turn; who has left has no turn."""

    def __init__(self, workers: int, *, in_turn: bool) -> None:
        self._workers = workers
        self._in_turn = in_turn
        self._next = 0
        self._gone: set[int] = set()

    def may(self, worker: int) -> bool:
        """Whether a worker's exchange may be taken."""
        return not self._in_turn or worker == self._next

    def done(self, worker: int) -> None:
        """A worker has exchanged all of its weights."""
        if self._in_turn and worker == self._next:
            self._pass_on()

    def leave(self, worker: int) -> None:
        """Nothing more comes from a worker."""
        self._gone.add(worker)
        if worker == self._next:
            self._pass_on()

    @property
    def all_gone(self) -> bool:
        """Whether nobody is left."""
        return len(self._gone) == self._workers

    def _pass_on(self) -> None:
        for _ in range(self._workers):
            self._next = (self._next + 1) % self._workers
            if self._next not in self._gone:
                return
