"""Naive model parallelism: one stage works at a time; a micro-batch is done before the next begins."""

from plait.program.stage.schedules.base import Action


def naive(ranks: int, stages_a_rank: int, micro_batches: int) -> list[list[Action]]:
    """All forward, then all backward of each micro-batch; idle (p - 1) / p of the time, one micro-batch in memory."""
    actions: list[list[Action]] = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_a_rank, ranks)
        own: list[Action] = []
        for number in range(micro_batches):
            own += [Action("forward", stage, number) for stage in stages]
            own += [Action("backward", stage, number) for stage in reversed(stages)]
        actions.append(own)
    return actions
