"""An explorer asks for weights once for each version that it serves, when it has used it."""

from trinity_schemas import StepRef, SyncRequested
from trinity_workers.explorer.demand import VersionDemand

FIRST, SECOND = StepRef(2, 3), StepRef(2, 5)


def test_it_asks_after_the_explorer_steps_of_one_interval():
    demand = VersionDemand(interval=2, prompts_per_step=4)
    assert demand.record_answers(FIRST, [8, 9]) is None
    assert demand.record_answers(FIRST, [11]) is None
    assert demand.record_answers(FIRST, [12]) == SyncRequested(oldest_version=StepRef(2, 4))
    assert demand.record_answers(FIRST, [17]) is None, "it has asked"
    assert demand.record_answers(SECOND, [18]) is None
    assert demand.record_answers(SECOND, [20, 21]) == SyncRequested(oldest_version=StepRef(2, 6))


def test_it_asks_when_nothing_is_left_to_answer():
    demand = VersionDemand(interval=5, prompts_per_step=4)
    assert demand.record_answers(FIRST, [0]) is None
    assert demand.idle(FIRST) == SyncRequested(oldest_version=StepRef(2, 4))
    assert demand.idle(FIRST) is None
    assert demand.idle(SECOND) == SyncRequested(oldest_version=StepRef(2, 6))


def test_a_prompt_that_is_issued_again_makes_it_ask_no_sooner():
    demand = VersionDemand(interval=2, prompts_per_step=4)
    assert demand.record_answers(FIRST, [8]) is None
    assert demand.record_answers(FIRST, [0]) is None
    assert demand.record_answers(FIRST, [9]) is None


def test_answers_that_were_all_given_back_are_no_reason_to_ask():
    assert VersionDemand(interval=1, prompts_per_step=4).record_answers(FIRST, []) is None
