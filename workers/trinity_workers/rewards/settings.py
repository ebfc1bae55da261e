"""Settings of rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from trinity_schemas.rollouts import MAX_REWARD

from ..section import Section

Positive = Annotated[int, Meta(ge=1)]
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
OnRewardError = Literal["fail", "drop_group", "score"]
"""Effect of a reward that failed; see ``RewardsConfig.on_error``."""

JUDGE_PROMPT = (
    "Grade the response to the prompt from 0 (wrong) to 10 (perfect). The reference, if any, is "
    "right.\n\nPrompt:\n{prompt}\n\nReference:\n{reference}\n\nResponse:\n{response}\n\n"
    "End with the grade, as a number on a line of its own."
)


class RewardsConfig(Section, frozen=True, kw_only=True):
    """Rewards of answers: by a function, a service, a judge or code, and by a reward model."""

    function: str | None = None
    """Reward function, `module:attribute` or `./file.py:attribute`. Null takes the task's own."""
    deadline: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that the reward of one answer may take; its process is ended after them."""
    on_error: OnRewardError = "fail"
    """Effect of a reward that raises, hangs, dies, or is no finite number: `fail` ends the run,
    `drop_group` drops all answers to the prompt, and `score` gives the answer `error_score`."""
    error_score: Reward = 0.0
    """With `score`, reward of an answer whose reward failed."""
    service: str | None = None
    """URL of a reward service, which gets a question and its answers as JSON by POST."""
    judge: str | None = None
    """Base URL of an OpenAI-compatible endpoint whose model grades each answer, such as
    `http://judge:8000/v1`."""
    judge_model: str | None = None
    """Model that the judge's endpoint is asked for."""
    judge_prompt: str = JUDGE_PROMPT
    """Prompt of the judge, with the places `{prompt}`, `{reference}` and `{response}`. Its reply
    ends with the grade, or names it."""
    best_grade: Annotated[float, Meta(gt=0)] = 10.0
    """Best grade of the judge: grades from 0 to it are rewards from 0 to 1. A grade with a scale of
    its own, such as 3/5 or 80%, is read by that."""
    token_variable: str | None = None
    """Environment variable of the explorers with the token that a service or judge asks for."""
    code_tests: str | None = None
    """Field of a question's record with Python code that tests an answer's code, or the path to it:
    the reward is 1 if both run to their end, else 0."""
    code_memory_mb: Positive = 512
    """Address space of the process of an answer's code, in MiB."""
    code_file_mb: Positive = 16
    """Size of a file that an answer's code may write, in MiB."""
    code_files: Annotated[int, Meta(ge=8)] = 32
    """Files that an answer's code may have open."""
    attempts: Positive = 3
    """Attempts at one call of a service or a judge, all within `rewards.deadline`."""
    calls: Positive = 8
    """Calls, or processes of code, that one explorer has in flight."""
    reward_model: str | None = None
    """Hugging Face folder of a model for sequence or token classification with one output. The
    trainer adds its scores to the rewards. It may have another tokenizer than the policy."""
    reward_model_weight: Reward = 1.0
    """Factor of its scores."""
