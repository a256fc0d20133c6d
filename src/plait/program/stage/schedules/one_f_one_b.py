"""1F1B (PipeDream-flush; Narayanan et al. 2021, arXiv 2104.04473): one forward, one backward, as soon as it can."""

from plait.program.stage.schedules.base import Action, one_stage_a_rank


def one_f_one_b(ranks: int, stages_a_rank: int, micro_batches: int) -> list[list[Action]]:
    """As fast as GPipe; rank r never has more than min(m, p - r) micro-batches in memory."""
    one_stage_a_rank("1f1b", stages_a_rank)
    actions: list[list[Action]] = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - rank - 1)
        own = [Action("forward", rank, number) for number in range(ahead)]
        for number in range(micro_batches - ahead):
            own += [Action("forward", rank, ahead + number), Action("backward", rank, number)]
        own += [Action("backward", rank, number) for number in range(micro_batches - ahead, micro_batches)]
        actions.append(own)
    return actions
