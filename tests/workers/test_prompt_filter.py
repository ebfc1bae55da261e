"""Prompts are compared with `rollouts.max_prompt_tokens` by the tokens that explorers count."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.errors import raises
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.learning.policy import encode_prompt, load_tokenizer
from trinity_workers.rollouts.prompt_filter import (
    MOST_OVERLONG,
    PromptFilter,
    PromptsOverlong,
    load_filter,
)
from trinity_workers.tasks import Question
from trinity_workers.tasks.question_set import QuestionSet

SHORT, LONG = Question(prompt="1+1="), Question(prompt="11111111+1=")


class HeldOut:
    """Set of held-out questions, as far as the filter reads it."""

    name = "held"

    def __init__(self, *questions):
        self.questions = questions


class Endless:
    """Task of a user's own, which has no length."""

    name = "endless"

    def __init__(self, first_short):
        self._first_short = first_short

    def question(self, ordinal):
        return SHORT if ordinal >= self._first_short else LONG


@pytest.fixture
def counts(policy_folder):
    """Tokens of the short and of the long prompt."""
    tokenizer = load_tokenizer(policy_folder)
    return [len(encode_prompt(tokenizer, question.prompt)) for question in (SHORT, LONG)]


@pytest.fixture
def load(policy_folder):
    def load(limit, task, *sets) -> PromptFilter:
        config = msgspec.convert({"rollouts": {"max_prompt_tokens": limit}}, TrainConfig)
        return load_filter(config, policy_folder, task, sets)

    return load


def questions(*chosen):
    return QuestionSet("mine", chosen, shuffle=False, evaluation=[])


def test_ordinals_of_prompts_above_the_limit_are_found_and_the_first_one_is_logged(
    load, counts, caplog
):
    short, long = counts
    prompts = load(long - 1, questions(SHORT, LONG, LONG))
    assert prompts.find_overlong(range(6)) == [1, 2, 4, 5]
    assert prompts.find_overlong([6, 7]) == [7]
    [warning] = caplog.messages
    assert f"ordinal 1 has {long} tokens" in warning
    assert load(long, questions(LONG)).find_overlong(range(6)) == []
    assert short < long


@pytest.mark.parametrize("first_short", [MOST_OVERLONG - 1, MOST_OVERLONG])
def test_a_task_without_a_prompt_that_fits_is_refused(load, counts, first_short):
    short, long = counts
    with raises(PromptsOverlong, fault="none-fits", name="mine", overlong=2, shortest=long):
        load(short, questions(LONG, LONG))
    if first_short < MOST_OVERLONG:
        assert load(short, Endless(first_short)).find_overlong([first_short]) == []
        return
    with raises(PromptsOverlong, fault="none-fits", overlong=MOST_OVERLONG, limit=short):
        load(short, Endless(first_short))


def test_held_out_questions_that_are_too_long_are_refused(load, counts):
    short, long = counts
    with raises(
        PromptsOverlong, fault="held-out", name="held", overlong=2, shortest=long, limit=short
    ):
        load(short, questions(SHORT), HeldOut(SHORT, LONG, LONG))


def test_a_prompt_that_the_template_refuses_is_left_to_its_explorer(load, counts):
    """The built-in policy has no chat template."""
    chat = Question(prompt=[{"role": "user", "content": "1+1="}])
    assert load(counts[0], questions(chat)).find_overlong([0]) == []
