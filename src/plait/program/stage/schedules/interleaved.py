"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): several thin stages a rank.

Micro-batches travel in groups of as many as there are ranks: a rank takes a group through its first stage, then through
its second, and so on.
"""

from plait.program.stage.schedules.base import Action
from plait.program.stage.schedules.one_f_one_b import one_f_one_b


def interleaved(ranks: int, stages_a_rank: int, micro_batches: int) -> list[list[Action]]:
    """Idle (p - 1) / (v m + p - 1) of the time where p divides m; more messages and more memory than 1F1B.

    With one stage a rank it is 1F1B. Where p does not divide m, the order is that of the next multiple, and whoever
    would work on a micro-batch that does not exist goes on to the next: micro-batches do not depend on each other, so
    what was free of deadlock stays so.
    """
    if stages_a_rank == 1:
        return one_f_one_b(ranks, 1, micro_batches)
    groups = -(-micro_batches // ranks)
    order = [
        (part, group * ranks + number)
        for group in range(groups)
        for part in range(stages_a_rank)
        for number in range(ranks)
    ]
    actions: list[list[Action]] = []
    for rank in range(ranks):
        forward = [Action("forward", part * ranks + rank, number) for part, number in order]
        backward = [
            Action("backward", (stages_a_rank - 1 - part) * ranks + rank, number) for part, number in order
        ]
        ahead = min(len(order), 2 * (ranks - rank - 1) + (stages_a_rank - 1) * ranks)
        own = forward[:ahead]
        for index in range(len(order) - ahead):
            own += [forward[ahead + index], backward[index]]
        own += backward[len(order) - ahead :]
        actions.append([action for action in own if action.micro_batch < micro_batches])
    return actions
