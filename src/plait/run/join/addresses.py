"""Which address of a host is used.

In: the name of the first host, the environment. Out: addresses to listen at or to call. The first host listens where
its name leads, for other hosts and for tasks beside it: at each of its addresses, where the name has several or leads
to the loopback interface here, until all have come, by whichever they reach. The others listen where their connection
to it leaves this host, which is how they are reached; `PLAIT_ADDRESS` overrides it on any host.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from plait.errors import UsageError
from plait.processes import run_program
from plait.run.join.place import Place

_ASK_S = 5.0
"""For Slurm to say where a node is."""
_TABLE = Path("/proc/net/fib_trie")
"""Where Linux lists, among others, the addresses of this host."""


def own_address(environment: Mapping[str, str]) -> str | None:
    """The address of this host that the user has chosen."""
    address = _one(environment.get("PLAIT_ADDRESS") or None, "PLAIT_ADDRESS")
    if address is not None and not _can_be_bound(address):
        has = ", ".join(sorted({a for a in _own() if not ipaddress.ip_address(a).is_loopback}))
        raise UsageError(
            f"PLAIT_ADDRESS={address} is no address of this host{f', which has {has}' if has else ''}.",
            fix="set it on each host to one of its own, or leave it out; PLAIT_FIRST_ADDRESS is the same on all.",
        )
    return address


def _can_be_bound(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def addresses_of_first(place: Place) -> tuple[str, ...]:
    """Where task 0 listens and may be reached: all addresses that its name has here."""
    if place.local_tasks == place.tasks:
        return ("127.0.0.1",)
    if not place.first:
        raise UsageError(
            f"{place.engine} started {place.tasks} tasks and does not say where task 0 is.",
            fix="name its host: PLAIT_FIRST_ADDRESS=node0 in the environment of all tasks.",
        )
    names = place.first.split(",")
    found = tuple(dict.fromkeys(address for name in names for address in _resolved(name)))
    if not found and place.engine == "srun":
        found = _resolved(_node_address(place.first))
    if not found:
        raise UsageError(
            f"the host of task 0, {place.first!r}, has no address here.",
            fix="name one by which it is reached: PLAIT_FIRST_ADDRESS=10.0.0.1 in the environment of all tasks.",
        )
    for address in found:
        _one(address, f"the host of task 0: {place.first}")
    is_own_name = place.first.split(".")[0] == socket.gethostname().split(".")[0]
    if is_own_name and all(ipaddress.ip_address(address).is_loopback for address in found):
        return _outer() or found  # /etc/hosts often says that a host's own name is 127.0.1.1
    return found


def is_here(address: str) -> bool:
    """Whether an address, by which somebody has come, is this host's."""
    return ipaddress.ip_address(address).is_loopback or address in _own()


def _outer() -> tuple[str, ...]:
    """By which others may reach this host, whose name does not say it here; that on the way to other networks first."""
    outward = _outward()
    outer = (address for address in _own() if not ipaddress.ip_address(address).is_loopback)
    return tuple(dict.fromkeys((*([] if outward is None else [outward]), *outer)))


def _own() -> tuple[str, ...]:
    """The addresses (IPv4) of this host's interfaces; none where the system does not list them."""
    try:
        return tuple(re.findall(r"-- ([0-9.]+)\n\s+/32 host LOCAL", _TABLE.read_text()))
    except OSError:
        return ()


def _one(address: str | None, what: str) -> str | None:
    """The address; an error where it means all that a host has: whoever listens there is reached from anywhere."""
    if address is not None and address in ("0.0.0.0", "::"):
        raise UsageError(
            f"{what}={address} would open the run on all interfaces of this host, and leads the others nowhere.",
            fix="name one address by which this host is reached: PLAIT_ADDRESS=10.0.0.1.",
        )
    return address


def _resolved(name: str) -> tuple[str, ...]:
    """All addresses of a name, those that the system would try first in front; none where it leads nowhere. A name that
    leads to this host and elsewhere (127.0.1.1 beside the address that others see) means the latter."""
    if not name:
        return ()
    try:
        told = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    found = tuple(dict.fromkeys(str(entry[4][0]) for entry in told))
    outer = tuple(address for address in found if not ipaddress.ip_address(address).is_loopback)
    return outer or found


def _node_address(node: str) -> str:
    """Where Slurm says that a node is, whose name alone leads nowhere."""
    try:
        told = run_program(["scontrol", "show", "node", node], patience_s=_ASK_S).out
    except OSError:
        return ""
    words = dict(word.split("=", 1) for word in told.split() if "=" in word)
    return words.get("NodeAddr", "")


def _outward() -> str | None:
    """This host's address on the way to other networks; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
