"""What one rank holds of the parameters, where ranks hold different shards.

In: whole parameters as the user's model has them, the program's `Layout`. Out: this rank's shard of each as a parameter
of its own, in memory from which it can be gathered; and the way back, given everybody's shards. The optimizer is built
on whole parameters, so that its groups come out as the user wrote them, and is then pointed to the shards.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.plan.plan import DATA, PIPE
from plait.program.layout import Layout
from plait.program.value import Value
from plait.run.link.links import Links


class ShardFetcher(Protocol):
    """How ranks fetch each other's shards; all of them must ask for the same, in the same order."""

    def __call__(self, name: str, shard: Tensor) -> list[Tensor]:
        """The shards of all ranks of a tensor like the parameter `name`, of which this rank has `shard`."""

    def tell(self, value: Any) -> list[Any]:
        """What every rank has to say."""


class Holding:
    """This rank's shards of the parameters."""

    def __init__(self, layout: Layout, rank: int, links: Links, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self._links = links
        self.device = device
        self._flats: list[Tensor] = []
        self.chunks: list[Tensor] = []
        """By group: what this rank holds."""
        self.parameters: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def adopt(self, whole: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Make this rank's shards from whole parameters, in the order in which they were given."""
        made: dict[str, nn.Parameter] = {}
        nothing = torch.empty(0, device=self.device)
        for group in self.layout.groups:
            if self.layout.owners and self.layout.mesh.coordinate(self.rank, PIPE) not in group.owners:
                self._flats.append(nothing)
                self.chunks.append(nothing)
                continue
            own = self.data_coordinate
            count = group.num_elements if self.layout.zero < 3 else group.chunk_elements
            flat = self._links.buffer(count, group.dtype, self.device, DATA)
            size = group.chunk_elements
            chunk = flat if self.layout.zero == 3 else flat[own * size : (own + 1) * size]
            self._flats.append(flat)
            self.chunks.append(chunk)
            for name, shard in zip(group.parameters, group.chunk_views(chunk, own), strict=True):
                made[name] = nn.Parameter(shard, requires_grad=whole[name].requires_grad)
        held = [name for name in whole if self.layout.is_held(name, self.rank)]
        for name in held:
            parameter = whole[name]
            if not self.layout.groups:
                shard = self.layout.take(name, parameter.detach(), self.rank)
                shard = shard.to(self.device, copy=True).contiguous()
                made[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            else:
                made[name].copy_(self.layout.take(name, parameter.detach(), self.rank))
        self.parameters = {name: made[name] for name in held}
        return self.parameters

    def values(self) -> dict[Value, Tensor]:
        """What instructions call these tensors."""
        if self.layout.groups:
            return {Value.chunk(index): chunk for index, chunk in enumerate(self.chunks)}
        return {Value.parameter(name): shard.detach() for name, shard in self.parameters.items()}

    def move(self, group: int, chunk: Tensor) -> None:
        """Let this rank's chunk of a group be a tensor elsewhere."""
        self.chunks[group] = chunk
        entry = self.layout.groups[group]
        for name, shard in zip(entry.parameters, entry.chunk_views(chunk, self.data_coordinate), strict=True):
            self.parameters[name].data = shard

    def room(self, group: int) -> Tensor:
        """Where the whole of a group is gathered to: its own place where parameters stay, else new memory."""
        if self.layout.zero < 3:
            return self._flats[group]
        entry = self.layout.groups[group]
        return torch.empty(entry.num_elements, dtype=entry.dtype, device=self.device)

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Set the shards from whole tensors."""
        for name, shard in self.parameters.items():
            shard.copy_(self.layout.take(name, whole[name], self.rank))

    def assemble(self, name: str, shard: Tensor, fetch: ShardFetcher) -> Tensor:
        """The whole of a tensor like a parameter, of which this rank has `shard`."""
        return self.layout.assemble(name, fetch(name, shard))

    def is_like(self, name: str, tensor: Tensor) -> bool:
        """Whether a piece of optimizer state is cut like its parameter, and not a counter."""
        return tensor.shape == self.parameters[name].shape and tensor.dim() > 0

    def point(self, optimizer: torch.optim.Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Make an optimizer that was built on whole parameters update this rank's shards instead."""
        names = {id(parameter): name for name, parameter in whole.items()}
        state: dict[Any, Any] = {}
        for group in optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    kept.append(parameter)
                    continue
                if not self.layout.is_updated(name, self.rank):  # by another rank
                    continue
                shard = self.parameters[name]
                if parameter in optimizer.state:
                    state[shard] = {
                        key: self.layout.take(name, value, self.rank).to(self.device, copy=True)
                        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
                        else value
                        for key, value in optimizer.state[parameter].items()
                    }
                kept.append(shard)
            group["params"][:] = kept
        optimizer.state.clear()
        optimizer.state.update(state)

    @property
    def data_coordinate(self) -> int:
        """This rank's place on `data`."""
        return self.layout.mesh.coordinate(self.rank, DATA)
