"""Prove that the ranks of a program meet: what one sends another receives, and nobody waits for ever.

In: a `Program` whose ranks are each sound. Out: nothing, or a `ProgramError` that names two instructions and their
ranks. Checked: the ranks of a group start the same collectives in the same order; each `Send` has one `Recv` that
expects the same values; what one rank sends another is received in the order in which it is sent, so that links need no
names for messages; all ranks reach their end when a `Wait` blocks and a `Send` does not.
"""

from collections.abc import Iterator

from plait.errors import ProgramError
from plait.program.check.walk import Key, Peers, Walk
from plait.program.instructions import Collective, Instruction, Recv, Send
from plait.program.program import Program, RankProgram


def told(instruction: Instruction) -> str:
    """`instruction 7 (wait for x) of stage 1, micro-batch 3`."""
    text = f"instruction {instruction.id} ({instruction.name})"
    if instruction.stage is None:
        return text
    number = "" if instruction.micro_batch is None else f", micro-batch {instruction.micro_batch}"
    return f"{text} of stage {instruction.stage}{number}"


def check_meetings(program: Program) -> None:
    """Raise where ranks that meet do not start the same collectives in the same order."""
    peers = Peers(program.plan.mesh)
    orders = [_collectives_by_axis(entry) for entry in program.classes]
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank, own in enumerate(program.members):
        for axis in orders[own]:
            group = peers.group(rank, axis)
            classes = tuple(program.members[member] for member in group)
            if (axis, classes) in seen:
                continue
            seen.add((axis, classes))
            for member, other in zip(group, classes, strict=True):
                if other != own:
                    _compare(program, axis, (rank, member), (orders[own], orders[other]))


def _collectives_by_axis(entry: RankProgram) -> dict[str, list[Collective]]:
    found: dict[str, list[Collective]] = {}
    for instruction in entry.instructions:
        if isinstance(instruction, Collective):
            found.setdefault(instruction.axis, []).append(instruction)
    return found


def _compare(
    program: Program,
    axis: str,
    ranks: tuple[int, int],
    orders: tuple[dict[str, list[Collective]], dict[str, list[Collective]]],
) -> None:
    first, second = (program.of(rank) for rank in ranks)
    one, other = (order.get(axis, []) for order in orders)
    for index in range(max(len(one), len(other))):
        a = one[index] if index < len(one) else None
        b = other[index] if index < len(other) else None
        if a is None or b is None or _what(first, a) != _what(second, b):
            classes = [program.members[rank] for rank in ranks]
            raise ProgramError(
                f"ranks {ranks[0]} and {ranks[1]} of class {classes[0]} and class {classes[1]} do not start the same "
                f"collectives over {axis}: number {index} is {_sized(a)} on one and {_sized(b)} on the other."
            )


def _what(entry: RankProgram, collective: Collective) -> tuple[object, ...]:
    """What ranks that meet must agree on; a bucket is known by its gradients, as its number may differ."""
    name: object = collective.name
    source = collective.source
    if source is not None and source.kind == "bucket":
        bucket = entry.buckets[source.number]
        name = (bucket.parameters, bucket.shapes, bucket.scalars)
    num_bytes = collective.num_bytes if collective.op == "all_reduce" else 0
    return collective.op, collective.axis, collective.extents, num_bytes, name


def _sized(collective: Collective | None) -> str:
    return "nothing" if collective is None else f"{told(collective)} with {collective.num_bytes} bytes"


def check_messages(program: Program) -> None:
    """Raise where a message is sent or received alone, twice, as something else, or in another order."""
    peers = Peers(program.plan.mesh)
    found: dict[Key, tuple[dict[int, Send], dict[int, Recv]]] = {}
    for rank, instruction in _messages(program):
        is_send = isinstance(instruction, Send)
        peer = instruction.to if isinstance(instruction, Send) else instruction.source
        size = program.plan.mesh.size_of(instruction.axis)
        if not 0 <= peer < size or peers.group(rank, instruction.axis)[peer] == rank:
            raise ProgramError(
                f"rank {rank}, {told(instruction)}: coordinate {peer} on {instruction.axis} is no other rank."
            )
        sent, received = found.setdefault(peers.message(rank, instruction), ({}, {}))
        before = sent.get(rank) if is_send else received.get(rank)
        if before is not None:
            raise ProgramError(
                f"rank {rank} {'sends' if is_send else 'receives'} {instruction.message!r} twice: {told(before)} and "
                f"{told(instruction)}."
            )
        if isinstance(instruction, Send):
            sent[rank] = instruction
        else:
            received[rank] = instruction
    for (sender, receiver, *_), (sent, received) in found.items():
        assert isinstance(sender, int) and isinstance(receiver, int)
        if sent and received:
            _check_pair(program, sender, sent[sender], receiver, received[receiver])
        elif sent:
            raise ProgramError(
                f"rank {sender} sends {sent[sender].message!r} to rank {receiver} in {told(sent[sender])}; it is never "
                f"received.{_user(program, receiver, sent[sender])}"
            )
        else:
            own = received[receiver]
            raise ProgramError(
                f"rank {receiver} receives {own.message!r} from rank {sender} in {told(own)}; it is never sent."
                f"{_maker(program, sender, own)}"
            )
    _check_order(program, peers)


def _check_order(program: Program, peers: Peers) -> None:
    """What one rank sends another is received in the order in which it is sent; each message has both."""
    sent: dict[tuple[object, object], list[tuple[Key, Instruction]]] = {}
    received: dict[tuple[object, object], list[tuple[Key, Instruction]]] = {}
    for rank, instruction in _messages(program):
        key = peers.message(rank, instruction)
        side = sent if isinstance(instruction, Send) else received
        side.setdefault((key[0], key[1]), []).append((key, instruction))
    for (sender, receiver), order in sent.items():
        for (key, send), (other, recv) in zip(order, received[sender, receiver], strict=True):
            if key != other:
                raise ProgramError(
                    f"rank {sender} sends {key[-1]!r} to rank {receiver} in {told(send)}, where that expects "
                    f"{other[-1]!r} next, in {told(recv)}: messages between two ranks are received in the order in "
                    "which they are sent."
                )


def _messages(program: Program) -> Iterator[tuple[int, Send | Recv]]:
    by_class = [
        [instruction for instruction in entry.instructions if isinstance(instruction, Send | Recv)]
        for entry in program.classes
    ]
    for rank, own in enumerate(program.members):
        for instruction in by_class[own]:
            yield rank, instruction


def _user(program: Program, rank: int, send: Send) -> str:
    """Who misses a message that is not received."""
    for instruction in program.of(rank).instructions:
        if set(instruction.reads) & set(send.reads):
            return f" Rank {rank} needs it in {told(instruction)}."
    return ""


def _maker(program: Program, rank: int, recv: Recv) -> str:
    """Who makes what is not sent."""
    for instruction in program.of(rank).instructions:
        if set(instruction.writes) & set(recv.writes):
            return f" Rank {rank} makes it in {told(instruction)}."
    return ""


def _check_pair(program: Program, sender: int, send: Send, receiver: int, recv: Recv) -> None:
    left = [program.of(sender).values.get(name) for name in send.reads]
    right = [program.of(receiver).values.get(name) for name in recv.writes]
    shapes = [
        tuple(None if value is None else (value.shape, value.dtype) for value in side)
        for side in (left, right)
    ]
    differ = len(left) != len(right) or any(
        a is not None and b is not None and a != b for a, b in zip(*shapes, strict=True)
    )
    if differ or send.num_bytes != recv.num_bytes:
        raise ProgramError(
            f"rank {sender} sends {len(left)} values of {send.num_bytes} bytes in {told(send)}; rank {receiver} "
            f"expects {len(right)} of {recv.num_bytes} bytes in {told(recv)}: "
            f"{', '.join(map(str, send.reads))} against {', '.join(map(str, recv.writes))}."
        )


def check_progress(program: Program) -> None:
    """Raise where ranks wait for each other; every pair of messages and every meeting has been checked."""
    if _is_uniform(program):
        return
    walk = Walk(program)
    for _ in walk:
        pass
    if not walk.blocked:
        return
    cycle = _cycle(walk)
    steps = []
    for index, rank in enumerate(cycle):
        wait, key = walk.blocked[rank]
        other = cycle[(index + 1) % len(cycle)]
        steps.append(f"rank {rank} in {told(wait)} for {told(_missing(program, key, other))} of rank {other}")
    raise ProgramError(f"ranks wait for each other: {'; '.join(steps)}.")


def _is_uniform(program: Program) -> bool:
    """Whether nobody sends and all ranks meet along the same axes in the same order.

    Then no walk is needed: the first of all meetings that are not over can always be held.
    """
    orders = set()
    for entry in program.classes:
        if entry.serve is not None:
            continue
        if any(isinstance(instruction, Send | Recv) for instruction in entry.instructions):
            return False
        orders.add(tuple(i.axis for i in entry.instructions if isinstance(i, Collective)))
    return len(orders) == 1


def _cycle(walk: Walk) -> list[int]:
    """Ranks each of which waits for the next, and the last for the first."""
    path = [min(walk.blocked)]
    while True:
        _, key = walk.blocked[path[-1]]
        group = key[0]
        if isinstance(group, tuple):
            late = next(
                member
                for member in group
                if member in walk.blocked
                and key not in walk.under_way[member].values()
                and member != path[-1]
            )
        else:
            assert isinstance(group, int)
            late = group
        if late in path:
            return path[path.index(late) :]
        path.append(late)


def _missing(program: Program, key: Key, rank: int) -> Instruction:
    """The instruction of a rank that others wait for."""
    peers = Peers(program.plan.mesh)
    number = 0
    for instruction in program.of(rank).instructions:
        if isinstance(instruction, Send) and peers.message(rank, instruction) == key:
            return instruction
        if isinstance(instruction, Collective) and peers.group(rank, instruction.axis) == key[0]:
            if number == key[1]:
                return instruction
            number += 1
    raise AssertionError(f"nobody starts {key}")
