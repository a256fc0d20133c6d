"""Where the first task listens: at every address that its name has, until it is known by which the others reach it.

In: addresses, of which one at least is this host's. Out: doors; those that nobody came by are closed.
"""

from collections.abc import Sequence

from plait.errors import RunError
from plait.run.wire.door import Address, Door, Receive


class Doors:
    """One door or several, which hand on to one receiver."""

    def __init__(self, hosts: Sequence[str], ports: Sequence[int], token: bytes, receive: Receive) -> None:
        self._doors: list[Door] = []
        refused: RunError | None = None
        for host in hosts:
            try:
                self._doors.append(Door(host, ports, token, receive))
            except RunError as error:  # an address by which others may call it, but not its own
                refused = error
        if not self._doors:
            assert refused is not None
            raise refused

    @property
    def address(self) -> Address:
        """By which this task is reached; the first one, as long as nobody knows."""
        return self._doors[0].address

    @property
    def hosts(self) -> str:
        """All addresses, in words."""
        return " or ".join(door.address[0] for door in self._doors)

    @property
    def turned_away(self) -> int:
        """Connections that did not prove the token."""
        return sum(door.turned_away for door in self._doors)

    def keep(self, used: Sequence[str]) -> None:
        """Listen no more at addresses that nobody uses; where nobody has come yet, at all of them. `used`: the one that
        most use first."""
        doors = {door.address[0]: door for door in self._doors}
        kept = [doors[address] for address in used if address in doors]
        if kept:
            for door in self._doors:
                if door not in kept:
                    door.close()
            self._doors = kept

    def close(self) -> None:
        """Listen no more."""
        for door in self._doors:
            door.close()
