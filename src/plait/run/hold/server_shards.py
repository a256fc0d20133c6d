"""What each of several servers holds: its shard of every bucket's parameters, as one flat tensor.

In: buckets, the shapes of all parameters. Out: a `Layout` over servers, so that shards are held, saved and resumed as
they are wherever parameters are cut. Shards of a bucket are of equal bytes, whatever its tensors: large ones are
split, and every server has as much to do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.plan.plan import DATA
from plait.program.layout import Group, Held, Layout
from plait.program.place.placement import AxisShares, R
from plait.program.program import Bucket
from plait.run.link.wire import as_bytes


def group_of(bucket: Bucket, servers: int) -> Group:
    """The parameters of a bucket, cut over servers."""
    return Group(
        parameters=bucket.parameters, shapes=bucket.shapes, dtype=bucket.dtype, chunks=servers, trained=True
    )


def server_layout(buckets: Sequence[Bucket], parameters: Mapping[str, Tensor], servers: int) -> Layout:
    """Where several servers hold the parameters of a model."""
    groups = [group_of(bucket, servers) for bucket in buckets if bucket.parameters]
    trained = {name for group in groups for name in group.parameters}
    for name, parameter in parameters.items():
        if name not in trained:  # frozen, or not used by the loss
            groups.append(
                Group(
                    parameters=(name,),
                    shapes=(tuple(parameter.shape),),
                    dtype=parameter.dtype,
                    chunks=servers,
                    trained=False,
                )
            )
    return Layout(
        mesh=Mesh(axes=((DATA, servers),)),
        axes=(AxisShares(name=DATA, units=(1,) * servers),),
        parameters={n: Held(shape=tuple(p.shape), placements=(R,)) for n, p in parameters.items()},
        groups=tuple(groups),
        zero=3,
    )


class Given:
    """A `ShardFetcher` of a server that gives its shards to the first one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.shards: list[Tensor] = []

    def __call__(self, name: str, shard: Tensor) -> list[Tensor]:
        """Note the shard; what is put together here is not used."""
        self.shards.append(as_bytes(shard).clone())
        return _rooms(self._layout, name, shard)

    def tell(self, value: Any) -> list[Any]:
        """Never asked for: there is no pipeline."""
        raise AssertionError("servers have nothing to tell")


class Taken:
    """A `ShardFetcher` of the first server, who has been given the shards of all others."""

    def __init__(self, layout: Layout, given: Callable[[int], Tensor]) -> None:
        """`given`: the bytes of a server's shards, one after the other, by its number."""
        self._layout = layout
        self._given = {server: given(server) for server in range(1, layout.mesh.size)}

    def __call__(self, name: str, shard: Tensor) -> list[Tensor]:
        """All shards, in the order in which all servers note them."""
        found = _rooms(self._layout, name, shard)
        found[0] = shard
        for server, room in enumerate(found[1:], start=1):
            size = room.numel() * room.element_size()
            room.view(torch.uint8).copy_(self._given[server][:size])
            self._given[server] = self._given[server][size:]
        return found

    def tell(self, value: Any) -> list[Any]:
        """Never asked for: there is no pipeline."""
        raise AssertionError("servers have nothing to tell")


def _rooms(layout: Layout, name: str, shard: Tensor) -> list[Tensor]:
    """A flat tensor for each server's shard of a tensor like a parameter."""
    return [shard.new_empty(layout.held_shape(name, server)) for server in range(layout.mesh.size)]
