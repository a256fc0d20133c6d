"""When servers apply updates and give weights, without processes or tensors."""

from plait.program.serve.rule import AsTheyCome, Clocked, Due, InTurn


def test_a_step_is_applied_once_all_have_pushed_it_in_the_order_of_workers() -> None:
    rule = Clocked(3, bound=0, start=5)
    rule.push(2, 5)
    rule.push(0, 5)
    assert rule.due() is None
    rule.push(1, 5)
    assert rule.due() == Due(step=5, workers=(0, 1, 2))
    rule.done()
    assert rule.due() is None
    assert (rule.applied, rule.steps) == (1, 6)


def test_weights_wait_for_the_slowest_worker_within_the_bound() -> None:
    rule = Clocked(2, bound=2, start=0)
    for step in range(3):
        assert rule.may_pull(0, step)
        rule.pulled(0, step)
        rule.push(0, step)
    assert not rule.may_pull(0, 3)  # the other has pushed nothing
    rule.push(1, 0)
    assert rule.due() is not None
    rule.done()
    assert rule.may_pull(0, 3)
    assert not rule.may_pull(0, 4)
    rule.pulled(0, 3)
    assert rule.staleness == {0: 1, 1: 1, 2: 2}


def test_nobody_waits_for_a_worker_that_left_and_what_it_pushed_counts() -> None:
    rule = Clocked(2, bound=0, start=0)
    rule.push(0, 0)
    rule.push(1, 0)
    rule.push(1, 1)
    rule.leave(1)
    assert rule.due() == Due(step=0, workers=(0, 1))
    rule.done()
    assert rule.due() is None
    rule.push(0, 1)
    assert rule.due() == Due(step=1, workers=(0, 1))
    rule.done()
    rule.push(0, 2)
    assert rule.due() == Due(step=2, workers=(0,))
    rule.done()
    rule.leave(0)
    assert rule.due() is None


def test_every_push_is_an_update_as_old_as_what_came_between() -> None:
    rule = AsTheyCome(2, start=3)
    rule.pulled(0, 3)
    rule.pulled(1, 3)
    rule.push(1, 3)
    assert rule.due() == Due(step=3, workers=(1,))
    rule.done()
    rule.pulled(1, 4)
    rule.push(1, 4)
    rule.push(0, 3)
    assert rule.may_pull(0, 4) is False  # until its own gradients are in
    rule.done()
    rule.done()
    assert rule.may_pull(0, 4)
    assert rule.staleness == {0: 2, 2: 1}
    assert (rule.applied, rule.steps) == (3, 4)


def test_an_update_that_a_server_cannot_have_is_passed_over() -> None:
    rule = AsTheyCome(2, start=0)
    rule.push(0, 0)
    rule.push(1, 0)
    rule.drop()
    assert rule.due() == Due(step=0, workers=(1,))
    assert rule.applied == 0


def test_a_step_is_updated_without_those_who_have_left_and_with_what_they_had_sent() -> None:
    rule = Clocked(3, 1, 5)
    rule.push(0, 5)
    rule.push(1, 5)
    rule.push(1, 6)  # a step ahead: not for the update that is next
    assert rule.due() is None
    rule.leave(2)
    assert rule.due() == Due(step=5, workers=(0, 1))
    rule.done()
    assert rule.due() is None  # worker 0 is still to come
    rule.leave(1)
    rule.leave(1)
    assert rule.due() is None
    rule.push(0, 6)
    assert rule.due() == Due(step=6, workers=(0, 1))
    rule.done()
    rule.leave(0)
    assert rule.due() is None  # nothing is left


def test_contributions_are_taken_in_turn_and_who_has_left_has_none_but_for_what_it_had_sent() -> None:
    rule = InTurn(3, start=0)
    rule.push(1, 0)
    assert rule.due() is None  # worker 0 is first
    rule.push(0, 0)
    rule.push(2, 0)
    rule.leave(2)
    for worker in (0, 1, 2):
        assert rule.due() == Due(step=0, workers=(worker,))
        rule.done()
    rule.push(1, 1)
    assert rule.due() is None
    rule.push(0, 1)
    for worker in (0, 1):
        assert rule.due() == Due(step=1, workers=(worker,))
        rule.done()
    rule.push(0, 2)
    assert rule.due() == Due(step=2, workers=(0,))  # worker 2 is not waited for
    rule.done()
    rule.leave(1)
    rule.push(0, 3)
    assert rule.due() == Due(step=3, workers=(0,))
    rule.done()
    assert (rule.applied, rule.steps) == (7, 2)
