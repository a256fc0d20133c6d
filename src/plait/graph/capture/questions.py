"""Code that asks whether it is traced, and does something else then.

In: code of a model, or of its library, that asks whether a tensor is a fake one. Out: which lines asked; the answer is
yes, or, where that led to another result than eager has, no, as in eager.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from plait.torch_private.fake import hidden_fakes


class Questions:
    """Those of one job."""

    def __init__(self) -> None:
        self.asked: dict[str, None] = {}
        """Lines that asked."""
        self.hidden = False
        """Whether the answer is no."""

    @contextmanager
    def answered(self) -> Iterator[None]:
        """While active, questions are noted and answered."""
        with hidden_fakes(lambda line: self.asked.setdefault(line), hide=self.hidden):
            yield

    def hide(self) -> bool:
        """Answer as eager does from here on; False: nobody asks, or it is done already."""
        if self.hidden or not self.asked:
            return False
        self.hidden = True
        return True

    def line(self) -> str:
        """What to tell of it."""
        where = next(iter(self.asked))
        return f"{where} asks whether it is traced, and computes something else then: it is told what eager tells it."
