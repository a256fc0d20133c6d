"""This rank's side of servers: what a server does, or a worker's way to servers.

In: the program of a run, and messages. Out: a `Service`, or a `Port`; neither where a plan has no servers.
"""

from plait.program.program import Program
from plait.run.hold.state import ModelState
from plait.run.link.wire import Post
from plait.run.serve.center import Center
from plait.run.serve.optimized import Optimized
from plait.run.serve.port import Port
from plait.run.serve.service import Service


class Serving:
    """One rank's side of servers."""

    def __init__(self, rank: int, state: ModelState, post: Post | None) -> None:
        """`post`: messages to and from servers, where there are any."""
        self._rank, self._state, self._post = rank, state, post
        self.service: Service | None = None
        """What a server does."""
        self.port: Port | None = None
        """A worker's way to servers."""
        self.waits = True
        """Whether an answer of a server may be waited for; else others must move meanwhile."""

    def begin(self, program: Program) -> None:
        """Before the first step, with the weights that it begins with."""
        own = program.of(self._rank)
        if own.serve is not None:
            assert self._post is not None
            self.service = service = Service(
                program.plan, self._rank, self._post, self._state, own, own.serve
            )
            service.holder = Center(service)
            if "push" in own.serve.handlers:
                service.holder = optimized = Optimized(service)
                optimized.store.conditional = program.conditional
        elif self._post is not None:
            self.port = Port(program.plan, self._post, self._state, own, waits=self.waits)
