"""The user's own code as an instruction: run eagerly on this rank's share, in company where batches are shared.

In: an `Opaque` instruction of a step. Out: what it writes, and which parameters it used.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.errors import PlaitError
from plait.job.origin import RAISED
from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.eager.company import AbandonedError, Company, Meet, Turns, at_once
from plait.run.eager.origins import Origin, Origins
from plait.run.eager.step import run_eagerly
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.blame import blame_code, find_nan_in_code
from plait.run.interpret.step import Step
from plait.run.link.links import Links


class UserCode:
    """Runs what is not captured, for one rank."""

    def __init__(
        self, rank: int, links: Links, state: ModelState, store: GradientStore, values: dict[Value, Any]
    ) -> None:
        self._rank, self._links, self._state, self._store, self._values = rank, links, state, store, values
        self.turns: Turns | None = None
        """Where it met others of this process last."""
        self.used: frozenset[str] = frozenset()
        """Parameters that it has used in this step, on any rank."""

    def execute(self, now: Step, instruction: ins.Opaque, detect_nan: bool) -> Iterator[None]:
        """Run it; yields while another rank of this process has to move first."""
        number = instruction.micro_batch
        assert number is not None
        ranks = 1 if now.program.plan.agreement.alone else now.program.plan.data_ranks

        def work(meet: Meet) -> tuple[list[Tensor], frozenset[str]]:
            company = Company(ranks, meet, self._state.device) if ranks > 1 else None
            with torch.no_grad(), self._state.lent(self._values):
                return self._blamed(now, instruction, company)

        if ranks == 1 or not self._links.takes_turns:
            results, used = work(at_once(self._links))
        else:
            self.turns = Turns(self._links)
            yield from self.turns.run(work)
            results, used = self.turns.result
        if detect_nan:
            find_nan_in_code(now, self._rank, instruction, results, partial(self._again, now, instruction))
        self.used |= used  # torch's optimizers leave parameters without a gradient alone
        self._store.frozen = self._state.frozen(now.number) | (frozenset(instruction.parameters) - self.used)
        self._values.update(zip(instruction.writes, results, strict=True))

    def _blamed(
        self, now: Step, instruction: ins.Opaque, company: Company | None
    ) -> tuple[list[Tensor], frozenset[str]]:
        number = instruction.micro_batch
        assert number is not None
        try:
            return run_eagerly(self._state, now.shares[number], instruction, now.number, number, company)
        except (PlaitError, AbandonedError, ConnectionError):  # a lost peer is nobody's line
            raise
        except RAISED as error:
            raise blame_code(error, now, self._rank, instruction, self._state.model) from error

    def _again(self, now: Step, instruction: ins.Opaque) -> Origin | None:
        """Where NaN comes from, on this rank's share alone."""
        origins = Origins(self._state.model)
        with (
            torch.no_grad(),
            self._state.lent(self._values),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
            origins,
        ):
            return origins.of(self._blamed(now, instruction, None)[0])
