"""Prove that a schedule is one, without a model.

In: the actions of each rank. Out: nothing, or a `ProgramError` that names the first action at fault.
"""

from collections import deque
from collections.abc import Sequence

from plait.errors import ProgramError
from plait.program.stage.schedules.base import Action, peak_in_flight
from plait.program.stage.schedules.messages import Made, makes, needs


def check_schedule(
    actions: Sequence[Sequence[Action]],
    *,
    stages_a_rank: int,
    micro_batches: int,
    in_flight: int | None = None,
) -> None:
    """Raise where work is missing, double, on the wrong rank, out of order, or where ranks wait for each other.

    `in_flight`: so many micro-batches a rank may have between their forward and their last gradient.
    """
    for rank, own in enumerate(actions):
        _check_complete(rank, own, len(actions), stages_a_rank, micro_batches)
        _check_order(rank, own)
    _check_progress(actions, len(actions) * stages_a_rank)
    for rank, most in enumerate(peak_in_flight(actions)):
        if in_flight is not None and most > in_flight:
            raise ProgramError(
                f"rank {rank} keeps {most} micro-batches in memory; the schedule allows {in_flight}."
            )


def told(action: Action) -> str:
    """`input of stage 1, micro-batch 3`."""
    return f"{action.kind} of stage {action.stage}, micro-batch {action.micro_batch}"


def _check_complete(
    rank: int, own: Sequence[Action], ranks: int, stages_a_rank: int, micro_batches: int
) -> None:
    kinds: dict[tuple[int, int], list[str]] = {
        (stage, number): []
        for stage in range(rank, ranks * stages_a_rank, ranks)
        for number in range(micro_batches)
    }
    for action in own:
        if (action.stage, action.micro_batch) not in kinds:
            raise ProgramError(f"{told(action)} is not for rank {rank}.")
        kinds[action.stage, action.micro_batch].append(action.kind)
    for (stage, number), found in kinds.items():
        if found not in (["forward", "backward"], ["forward", "input", "weight"]):
            raise ProgramError(
                f"rank {rank} does {', '.join(found) or 'nothing'} for stage {stage}, micro-batch {number}; it must "
                "be forward, then backward, or forward, input, weight."
            )


def _check_order(rank: int, own: Sequence[Action]) -> None:
    """Gradients of one stage's parameters are added up in the order of one process."""
    latest: dict[int, Action] = {}
    for action in own:
        if action.kind in ("backward", "weight"):
            before = latest.get(action.stage)
            if before is not None and before.micro_batch > action.micro_batch:
                raise ProgramError(f"rank {rank} does {told(action)} after {told(before)}.")
            latest[action.stage] = action


def _check_progress(actions: Sequence[Sequence[Action]], stages: int) -> None:
    """Execute with receives that block and sends that do not."""
    position = [0] * len(actions)
    done: set[Made | None] = set()
    blocked: dict[Made, int] = {}
    ready = deque(range(len(actions)))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(actions[rank]):
            action = actions[rank][position[rank]]
            needed = needs(action, stages)
            if needed is not None and needed not in done:
                blocked[needed] = rank
                break
            position[rank] += 1
            made = makes(action)
            done.add(made)
            if made is not None and made in blocked:
                ready.append(blocked.pop(made))
    if blocked:
        waiting = [
            f"rank {rank} in {told(actions[rank][position[rank]])} (for the {needed[0]} of stage {needed[1]})"
            for needed, rank in blocked.items()
        ]
        raise ProgramError(f"the schedule deadlocks: {'; '.join(waiting)}.")
