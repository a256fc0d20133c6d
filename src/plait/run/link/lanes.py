"""Collectives that run beside the computation, several of them at once: threads that each have links of their own.

In: links for what the rank does itself, and for every axis the links of as many lanes as the plan has groups. Out:
`Links`. The n-th collective along an axis goes to lane n modulo their number, on every rank alike, as in round-robin
process groups; a lane does one after the other, so that while one waits for the network another one moves.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.hops.price import Network
from plait.program.instructions import Collective, Recv, Send
from plait.run.link.background import Background, HopSpan
from plait.run.link.links import Handle, Links, meeting_axes


class Lanes:
    """Links of one rank."""

    takes_turns = False

    def __init__(
        self, links: Links, mesh: Mesh, lanes: Mapping[str, Sequence[Links]], network: Network
    ) -> None:
        """`lanes`: by the axes along which ranks meet, as `axes_that_meet` names them."""
        self._links, self._mesh = links, mesh
        self.network = network
        """By which collectives are priced."""
        self._lanes = {
            axis: [(entry, Background(f"lane {at} of {axis}")) for at, entry in enumerate(own)]
            for axis, own in lanes.items()
        }
        self._counts = dict.fromkeys(lanes, 0)

    def start(self, collective: Collective, tensor: Tensor, out: Tensor | None = None) -> Handle:
        """Begin a collective on the lane whose turn it is."""
        axis = meeting_axes(self._mesh, collective.axis)
        if not axis or collective.op.startswith("halo"):
            return self._links.start(collective, tensor, out)
        lanes = self._lanes[axis]
        links, background = lanes[self._counts[axis] % len(lanes)]
        self._counts[axis] += 1
        hops: list[HopSpan] = []

        def run() -> Tensor:
            handle = links.start(collective, tensor, out)
            result = handle.result()
            hops.extend(getattr(handle, "hops", ()))
            return result

        return background.start(run, hops)

    def send(self, send: Send, flat: Tensor) -> Handle:
        """As the rank's own links have it."""
        return self._links.send(send, flat)

    def receive(self, recv: Recv, flat: Tensor) -> Handle:
        """As the rank's own links have it."""
        return self._links.receive(recv, flat)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, axis: str) -> Tensor:
        """As the rank's own links have it."""
        return self._links.buffer(count, dtype, device, axis)
