"""Servers in the process of the serial interpreter, beside its workers.

In: the machines of all workers. Out: servers that take turns with them, through mailboxes, and whole tensors from what
they hold. It is the same server and the same port that processes have.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plait.program.serve.rule import rule_of
from plait.run.interpret.machine import Machine
from plait.run.interpret.state import ModelState
from plait.run.prepare.programs import Programs
from plait.run.relaxed.center import Center, CenterPort
from plait.run.relaxed.port import Port
from plait.run.relaxed.serve import first_program, server_state
from plait.run.relaxed.server import Server


class Letters:
    """All messages of a run that were sent and not yet taken."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int, str], deque[Tensor]] = {}


class SerialPost:
    """One rank's messages."""

    def __init__(self, letters: Letters, rank: int) -> None:
        self._letters = letters.waiting
        self._rank = rank

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a copy."""
        self._letters.setdefault((self._rank, to, message), deque()).append(torch.cat(parts))

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Have a message used, where it is there."""
        found = self._letters.get((source, self._rank, message))
        if not found:
            return False
        use(found.popleft())
        return True

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Have a message used that is there."""
        assert self.take(message, source, use), f"{message} from rank {source} is not there"


class SerialServers:
    """The servers of a plan, and what they hold."""

    def __init__(self, programs: Programs, machines: Sequence[Machine]) -> None:
        plan, letters, program = programs.plan, Letters(), first_program(programs)
        self.ports = [
            Port(plan, SerialPost(letters, m.rank), m.state, program.buckets, waits=False) for m in machines
        ]
        for machine, port in zip(machines, self.ports, strict=True):
            machine.port = port
        self.servers = [
            Server(
                plan,
                place,
                SerialPost(letters, plan.mesh.size + place),
                server_state(programs, place, torch.device("cpu")),
                program,
                rule_of(plan, 0),
                clip_norm=programs.job.clip_norm,
            )
            for place in range(plan.sync.servers)
        ]
        self._turns: list[Iterator[None]] = [server.execute() for server in self.servers]
        self._gradients: list[dict[str, Tensor]] = [{} for _ in self.servers]
        for server, found in zip(self.servers, self._gradients, strict=True):
            server.store.on_ready = lambda g, found=found: found.update({n: t.clone() for n, t in g.items()})

    def turn(self) -> bool:
        """Let every server do what it can; whether any did something."""
        before = [(server.streams.taken, server.rule.applied) for server in self.servers]
        with torch.no_grad():
            for turns in self._turns:
                next(turns, None)
        return before != [(server.streams.taken, server.rule.applied) for server in self.servers]

    @property
    def norm(self) -> Tensor | None:
        """Of the last update's gradients."""
        return self.servers[0].norm

    def gradients(self) -> dict[str, Tensor]:
        """Of the last update, whole."""
        return self._whole(self._gradients)

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole."""
        return self._whole([{n: p.detach() for n, p in s.state.parameters.items()} for s in self.servers])

    def buffers(self) -> dict[str, Tensor]:
        """As the first server would save them."""
        return self.servers[0].state.buffers

    def _whole(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        holding = self.servers[0].state.holding
        if holding is None:
            return dict(parts[0])
        return {name: holding.layout.assemble(name, [part[name] for part in parts]) for name in parts[0]}


class SerialCenter:
    """The center of a plan's workers."""

    def __init__(self, programs: Programs, machines: Sequence[Machine]) -> None:
        plan, letters, program = programs.plan, Letters(), first_program(programs)
        state = ModelState(programs.job, torch.device("cpu"), programs.captures.dtype)
        self.center = Center(plan, SerialPost(letters, plan.mesh.size), state, program, 0)
        self._turns = self.center.execute()
        for machine in machines:
            flats = program.of(machine.rank).averages
            machine.center = CenterPort(
                plan, SerialPost(letters, machine.rank), machine.state, flats, waits=False
            )

    def turn(self) -> bool:
        """Let it take what is there; whether there was anything."""
        before = self.center.streams.taken
        with torch.no_grad():
            next(self._turns, None)
        return before != self.center.streams.taken

    def weights(self) -> dict[str, Tensor]:
        """All parameters."""
        return {name: p.detach() for name, p in self.center.state.parameters.items()}
