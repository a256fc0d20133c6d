"""What `Copy` does on a rank: values leave for the host's memory and come back.

In: instructions of a step. Out: tensors where the next instruction looks for them: on the device, or on the host, where
checkpoints find them too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plait.program import instructions as ins
from plait.program.value import Value
from plait.run.hold.away.slots import Key
from plait.run.hold.gradients import GradientStore
from plait.run.hold.state import ModelState
from plait.run.interpret.step import Step
from plait.run.link.links import Handle


class Copies:
    """The parcels of one rank."""

    def __init__(
        self,
        state: ModelState,
        store: GradientStore,
        values: dict[Value, Any],
        keep: Callable[[Any, Handle], None],
    ) -> None:
        """`values` are the machine's; `keep` remembers what was started until its `Wait`."""
        self._state, self._store, self._values, self._keep = state, store, values, keep
        self.handlers: dict[type, Callable[[Step, Any], None]] = {ins.Copy: self.copy}

    def copy(self, now: Step, instruction: ins.Copy) -> None:
        """Start one, or give up what is at hand."""
        memory = self._state.host_memory
        if instruction.way == "in":
            key = self._key(now, instruction.writes)
            if instruction.writes[0].kind != "node":
                self.settle(now, instruction.writes)
            memory.fetch(key)
            self._keep(instruction, _Fetched(self, now, instruction.writes, key))
            return
        key = self._key(now, instruction.reads)
        if instruction.way == "out":
            found = memory.store(key, self._tensors(now, instruction.reads))
        else:
            found = memory.drop(key)
        self._put(now, instruction.reads, found)

    def settle(self, now: Step, values: tuple[Value, ...], *, counters: bool = False) -> None:
        """Have on the host what belongs there, wherever it was made or loaded, or in whatever parts it was before;
        `counters`: also numbers that an optimizer keeps, which stay on the device otherwise."""
        if counters:
            for state in map(self._state_of, now.known.parts[values[0].number]):
                state.update({k: v.cpu() for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0})
        memory, key, own = self._state.host_memory, self._key(now, values), self._tensors(now, values)
        if not memory.has(key, own):
            self._put(now, values, memory.store(key, own))

    def wait(self, now: Step, values: tuple[Value, ...]) -> None:
        """Until the host has them."""
        self._state.host_memory.wait(self._key(now, values))

    def arrive(self, now: Step, values: tuple[Value, ...], key: Key) -> None:
        """Put what was fetched where it is looked for."""
        found = self._state.host_memory.arrive(key)
        if found is not None:
            self._put(now, values, found)

    def _key(self, now: Step, values: tuple[Value, ...]) -> Key:
        """Of the optimizer's state: whose it is, since other steps may number buckets otherwise."""
        return tuple(now.known.parts[values[0].number]) if values[0].kind == "state" else values

    def _tensors(self, now: Step, values: tuple[Value, ...]) -> dict[Key, Tensor]:
        if values[0].kind == "node":
            return {value: self._values[value] for value in values}
        if values[0].kind == "parameter":
            return {value: self._state.parameters[value.name].data for value in values}
        if values[0].kind in ("bucket", "shard"):
            return {
                name: gradient
                for value in values
                for name, gradient in self._store.summed(now.own.buckets[value.number]).items()
                if not gradient.is_sparse
            }
        if values[0].kind == "chunk":
            assert self._state.holding is not None
            return {value: self._state.holding.chunks[value.number] for value in values}
        return {
            (name, entry): tensor
            for name in now.known.parts[values[0].number]
            for entry, tensor in self._state_of(name).items()
            if isinstance(tensor, Tensor) and tensor.dim() > 0
        }

    def _put(self, now: Step, values: tuple[Value, ...], found: Mapping[Key, Tensor]) -> None:
        if values[0].kind == "node":
            self._values.update(found)  # type: ignore[arg-type]  # keys are values
            return
        if values[0].kind in ("bucket", "shard"):
            for value in values:
                self._store.leave(now.own.buckets[value.number], found)  # type: ignore[arg-type]  # keys are names
            return
        if values[0].kind in ("parameter", "chunk"):
            for value in values:
                self._values[value] = self._state.move(value, found[value])
            return
        for name in now.known.parts[values[0].number]:
            state = self._state_of(name)
            state.update({entry: found[name, entry] for entry in state if (name, entry) in found})
        self._values[values[0]] = None

    def _state_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of a parameter; nothing before its first update."""
        parameter = self._state.parameters.get(name)
        return self._state.optimizer.state.get(parameter, {}) if parameter is not None else {}


class _Fetched:
    """A copy to the device; only streams wait for it."""

    def __init__(self, copies: Copies, now: Step, values: tuple[Value, ...], key: Key) -> None:
        self._copies, self._now, self._values, self._key = copies, now, values, key

    def ready(self) -> bool:
        return True

    def result(self) -> Any:
        self._copies.arrive(self._now, self._values, self._key)
        return None
