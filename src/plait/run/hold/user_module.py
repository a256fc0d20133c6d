"""The user's module on a rank that holds shards of its parameters, or all of them.

In: the module, what this rank holds of it. Out: the module as code needs it for a while: with its whole parameters,
with those that a step has gathered, or with their shapes alone. In between it keeps none of what others hold.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.plan.plan import PIPE
from plait.program.value import Value
from plait.run.hold.holding import Holding, ShardFetcher
from plait.run.hold.on_demand import on_demand, same_everywhere


class UserModule:
    """A module and what this rank holds of it."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        parameters: Mapping[str, nn.Parameter],
        shapes: dict[str, torch.Size],
        holding: Holding | None,
    ) -> None:
        """`parameters`: what this rank holds, by name, the module's own where `holding` is None; `shapes`: of
        whole parameters."""
        self._module, self._device, self._parameters = module, device, parameters
        self._shapes, self._holding = shapes, holding
        if holding is not None:
            self._let_go()
            for name, buffer in list(module.named_buffers()):
                path, _, last = name.rpartition(".")
                module.get_submodule(path)._buffers[last] = buffer.to(device)
        self.buffers: dict[str, Tensor] = dict(module.named_buffers())
        """Of all ranks alike, but those that another stage changes."""

    @contextmanager
    def whole(self, fetch: ShardFetcher | None, room_bytes: int | None = None) -> Iterator[None]:
        """With all of its parameters; where ranks hold shards, all of them must call it.

        `room_bytes`: of parameters that may be there at once, beside those in use; all ranks that hold shards must then
        run the module alike.
        """
        if self._holding is not None:
            assert fetch is not None
            with torch.no_grad():
                self.share_buffers(fetch)
        if room_bytes is not None:
            with self._on_demand(fetch, room_bytes):
                yield
        elif self._holding is None:
            with self._at_hand():
                yield
        else:
            assert fetch is not None
            with torch.no_grad():
                for name, parameter in self._module.named_parameters():
                    parameter.data = self._assembled(name, parameter.dtype, fetch)
            try:
                yield
            finally:
                self._let_go()

    @contextmanager
    def _on_demand(self, fetch: ShardFetcher | None, room_bytes: int) -> Iterator[None]:
        named = dict(self._module.named_parameters())
        before = {name: parameter.data for name, parameter in named.items()}

        def bring(name: str) -> Tensor:
            if fetch is None:
                return before[name].to(self._device)
            same_everywhere(fetch.tell(name))
            return self._assembled(name, named[name].dtype, fetch)

        try:
            with torch.no_grad(), on_demand(self._module, self._device, self._shapes, bring, room_bytes):
                yield
            if fetch is not None:
                same_everywhere(fetch.tell(""))
        finally:
            for name, parameter in named.items():
                parameter.data = before[name]

    def _assembled(self, name: str, dtype: torch.dtype, fetch: ShardFetcher) -> Tensor:
        assert self._holding is not None
        return self._holding.assemble(name, self.shard(name, dtype), fetch).to(self._device)

    @contextmanager
    def lent(self, values: Mapping[Value, Any]) -> Iterator[None]:
        """With the parameters that were gathered."""
        if self._holding is None:
            yield
            return
        for name, parameter in self._module.named_parameters():
            parameter.data = values[Value.parameter(name)]
        try:
            yield
        finally:
            self._let_go()

    @contextmanager
    def shaped(self) -> Iterator[None]:
        """With whole parameters of any values, so that names and shapes are checked as always."""
        for name, parameter in self._module.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype)
        try:
            yield
        finally:
            self._let_go()

    def shard(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's shard of a parameter: nothing where another stage has it."""
        if name in self._parameters:
            return self._parameters[name].detach()
        return torch.empty(0, dtype=dtype, device=self._device)

    def share_buffers(self, fetch: ShardFetcher) -> None:
        """Take over the buffers that other stages have changed."""
        assert self._holding is not None
        layout = self._holding.layout
        if not layout.buffer_owners:
            return
        own = layout.mesh.coordinate(self._holding.rank, PIPE)
        changed = {n: self.buffers[n].cpu() for n, owner in layout.buffer_owners.items() if owner == own}
        for rank, told in enumerate(fetch.tell(changed)):
            for name, value in told.items():
                if layout.mesh.coordinate(rank, PIPE) == layout.buffer_owners[name]:
                    self.buffers[name].copy_(value)

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Parameters that lie on the host are on the device, all of them, for a moment."""
        away = [(p, p.data) for p in self._module.parameters() if p.device.type != self._device.type]
        for parameter, tensor in away:
            parameter.data = tensor.to(self._device)
        try:
            yield
        finally:
            for parameter, tensor in away:
                parameter.data = tensor

    def _let_go(self) -> None:
        for parameter in self._module.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
