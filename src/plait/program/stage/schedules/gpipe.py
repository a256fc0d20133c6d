"""GPipe (Huang et al. 2019, arXiv 1811.06965): all micro-batches forward, then all backward."""

from plait.program.stage.schedules.base import Action


def gpipe(ranks: int, stages_a_rank: int, micro_batches: int) -> list[list[Action]]:
    """Idle (p - 1) / (m + p - 1) of the time; all m micro-batches are in memory at once.

    Backward goes through the micro-batches from the first, not from the last as in the paper: the time is the same,
    and gradients are added up in the order of one process.
    """
    numbers = range(micro_batches)
    actions: list[list[Action]] = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_a_rank, ranks)
        own = [Action("forward", stage, number) for stage in stages for number in numbers]
        own += [Action("backward", stage, number) for stage in reversed(stages) for number in numbers]
        actions.append(own)
    return actions
