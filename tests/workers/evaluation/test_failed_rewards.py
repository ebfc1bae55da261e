"""A reward that failed in an evaluation is counted and named, and never averaged in silence."""

import pytest

from trinity_workers.evaluation.failed_rewards import HeldOutRewardsFailed, Score, select_rewards

ANSWERS = [
    [Score(1.0), Score(0.0)],
    [Score(0.5), Score(-1.0, "raised KeyError: 'a'")],
    [Score(-1.0, "raised KeyError: 'b'"), Score(1.0)],
]


def test_by_default_the_evaluation_fails_with_the_count_and_the_first_error():
    with pytest.raises(HeldOutRewardsFailed) as caught:
        select_rewards(ANSWERS, "fail")
    error = caught.value
    assert (error.failed, error.answers, error.reason) == (2, 6, "raised KeyError: 'a'")


def test_questions_with_a_failed_reward_do_not_count_or_count_with_the_score():
    assert select_rewards(ANSWERS, "drop_group") == ([[1.0, 0.0]], 2)
    assert select_rewards(ANSWERS, "score") == ([[1.0, 0.0], [0.5, -1.0], [-1.0, 1.0]], 2)


def test_an_evaluation_of_which_no_question_is_left_fails():
    with pytest.raises(HeldOutRewardsFailed):
        select_rewards(ANSWERS[1:], "drop_group")


@pytest.mark.parametrize("on_error", ["fail", "drop_group", "score"])
def test_without_an_error_all_rewards_count(on_error):
    assert select_rewards(ANSWERS[:1], on_error) == ([[1.0, 0.0]], 0)
