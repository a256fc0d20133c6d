"""Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241): gradients of activations first, those of weights later.

Nobody waits for the gradients of weights, so they fill what would be idle time. Both schedules are one order with two
numbers a rank: how many forwards it starts with, and how many micro-batches the weights lag behind.
"""

from math import ceil

from plait.program.stage.schedules.base import Action, Costs, one_stage_a_rank


def zero_bubble_h1(ranks: int, stages_a_rank: int, micro_batches: int) -> list[list[Action]]:
    """ZB-H1: a third of 1F1B's idle time where costs are equal, (p - 1)(T_F + T_B - T_W); p micro-batches in memory.

    Rank r starts with p - r forwards, as 1F1B does, and its weights lag r micro-batches behind.
    """
    one_stage_a_rank("zero-bubble", stages_a_rank)
    return [_rank(rank, micro_batches, ranks - rank, rank) for rank in range(ranks)]


def zero_bubble_h2(
    ranks: int, stages_a_rank: int, micro_batches: int, *, costs: Costs | None = None
) -> list[list[Action]]:
    """ZB-H2: no idle time where all costs are equal, (p - 1)(T_F + T_B - 2 T_W), for 2p - 1 micro-batches in memory.

    Rank r starts with 2 (p - r) - 1 forwards. It begins r T_F late and has its last gradient of activations r T_B
    early, so its weights may lag r (T_F + T_B) / T_W micro-batches behind: 2r where costs are equal. `costs` that are
    not equal take idle time out (the paper's ZB-2p) and keep the inputs of more weight gradients in memory.
    """
    one_stage_a_rank("zero-bubble-2", stages_a_rank)
    costs = costs or Costs()
    lag = (costs.forward + costs.input) / costs.weight
    return [_rank(rank, micro_batches, 2 * (ranks - rank) - 1, ceil(rank * lag)) for rank in range(ranks)]


def _rank(stage: int, micro_batches: int, ahead: int, lag: int) -> list[Action]:
    own = [Action("forward", stage, number) for number in range(min(ahead, micro_batches))]
    for number in range(micro_batches):
        own.append(Action("input", stage, number))
        if number >= lag:
            own.append(Action("weight", stage, number - lag))
        if number + ahead < micro_batches:
            own.append(Action("forward", stage, number + ahead))
    own += [Action("weight", stage, number) for number in range(max(0, micro_batches - lag), micro_batches)]
    return own
