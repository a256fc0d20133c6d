"""What a worker does that does not meet others within a step: messages to servers and the center, averages of weights.

In: instructions of a step. Out: messages under way, which `Traffic` waits for, and weights that were mixed.
"""

from collections.abc import Callable
from typing import Any

from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.hold.averaging import Averaging
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.serving import Serving
from plait.run.interpret.step import Step
from plait.run.interpret.traffic import Traffic
from plait.run.serve.port import Port


class WorkerSide:
    """One worker's side of servers, a center and averages."""

    def __init__(
        self,
        state: ModelState,
        store: GradientStore,
        averaging: Averaging,
        serving: Serving,
        traffic: Traffic,
        values: dict[Value, Any],
    ) -> None:
        self.averaging = averaging
        self._serving = serving
        self._state = state
        self._store = store
        self._traffic = traffic
        self._values = values
        self.handlers: dict[type, Callable[[Step, Any], None]] = {
            ins.Push: self.push,
            ins.PushBuffers: self.push_buffers,
            ins.Pull: self.pull,
            ins.Flatten: self.average,
            ins.Lookahead: self.average,
            ins.Momentum: self.average,
            ins.Mix: self.average,
            ins.Exchange: self.exchange,
        }
        self.once: dict[type, Callable[[Any], None]] = {
            ins.Anchor: lambda anchor: self.averaging.anchor(center=anchor.center),
            ins.Leave: lambda leave: self._to_servers().leave(),
        }
        """What comes before the first step and after the last."""

    def _to_servers(self) -> Port:
        assert self._serving.port is not None, "a machine begins before its first step"
        return self._serving.port

    def push(self, now: Step, instruction: ins.Push) -> None:
        """Send a bucket to the servers."""
        bucket = now.own.buckets[instruction.bucket]
        self._to_servers().push(instruction.bucket, bucket, self._store.flat(bucket), now.number)

    def push_buffers(self, now: Step, instruction: ins.PushBuffers) -> None:
        """Send buffers to the first server."""
        self._to_servers().push_buffers(
            [self._state.buffers[name] for name in instruction.buffers], now.number
        )

    def pull(self, now: Step, instruction: ins.Pull) -> None:
        """Ask for the parameters of a bucket."""
        self._traffic.keep(instruction, self._to_servers().pull(instruction.bucket, now.number))

    def average(self, now: Step, instruction: ins.Flatten | ins.Lookahead | ins.Momentum | ins.Mix) -> None:
        """Take part in an average of weights."""
        flat = now.own.averages[instruction.flat]
        self.averaging.execute(instruction, flat, now.program.plan, self._values)

    def exchange(self, now: Step, instruction: ins.Exchange) -> None:
        """Send weights to the center, and ask for where it was."""
        plan, flat = now.program.plan, self._values[instruction.reads[0]]
        self._state.schedule.apply(self._state.optimizer, now.number)
        strength = (
            1 / plan.mesh.size if instruction.rule == "share" else self.averaging.rate * plan.elastic.rho
        )
        handle = self._to_servers().exchange(instruction.flat, flat, strength, now.number)
        self._traffic.keep(instruction, handle)
