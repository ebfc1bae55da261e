"""Settings of rewards that are more than a function, and the contradictions in them."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from trinity_schemas.rollouts import MAX_REWARD

from ..section import Section

Positive = Annotated[int, Meta(ge=1)]
OnRewardError = Literal["fail", "drop_group", "score"]
"""Effect of a reward that failed; see ``RewardsConfig.on_error``."""

JUDGE_PROMPT = (
    "Grade the response to the prompt from 0 (wrong) to 10 (perfect). The reference, if any, is "
    "right.\n\nPrompt:\n{prompt}\n\nReference:\n{reference}\n\nResponse:\n{response}\n\n"
    "End with the grade, as a number on a line of its own."
)
_PLACES = {"prompt", "reference", "response"}


class RewardsConfig(Section, frozen=True, kw_only=True):
    """Rewards that fail, and rewards beyond a function: of a service, a judge, or code."""

    on_error: OnRewardError = "fail"
    """Effect of a reward that raises, hangs, dies, or is no finite number: `fail` ends the run,
    `drop_group` drops all answers to the prompt, and `score` gives the answer `error_score`."""
    error_score: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] = 0.0
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
    """Attempts at one call of a service or a judge, all within `task.reward_deadline`."""
    calls: Positive = 8
    """Calls, or processes of code, that one explorer has in flight."""


def contradictions(
    rewards: RewardsConfig, function: str | None, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what contradicts itself, as the configuration does: the fields' paths, and a sentence.

    Args:
        rewards: The settings.
        function: Configured reward function, if there is one.
        named: Names a field, given by its path, in the sentences.
    """
    chosen = {
        "task.reward": function,
        "rewards.service": rewards.service,
        "rewards.judge": rewards.judge,
        "rewards.code_tests": rewards.code_tests,
    }
    if rewards.error_score and rewards.on_error != "score":
        yield (
            ("rewards.error_score", "rewards.on_error"),
            f"{named('rewards.error_score')} is read if {named('rewards.on_error')} is score, and "
            f"it is {rewards.on_error}: set it score, or leave the score out",
        )
    paths = tuple(path for path, value in chosen.items() if value is not None)
    if len(paths) > 1:
        yield (
            paths,
            f"{' and '.join(map(named, paths))} each judge the answers: keep one of them",
        )
    for path in ("rewards.service", "rewards.judge"):
        if (url := chosen[path]) is not None and not _is_http(url):
            yield (
                (path,),
                f"{named(path)} is {url!r}, which is no URL of HTTP: write http://HOST:PORT/PATH",
            )
    if rewards.judge is not None and rewards.judge_model is None:
        yield (
            ("rewards.judge", "rewards.judge_model"),
            f"{named('rewards.judge')} needs {named('rewards.judge_model')}: name its model",
        )
    if (wrong := _wrong_place(rewards.judge_prompt)) is not None:
        yield (
            ("rewards.judge_prompt",),
            f"{named('rewards.judge_prompt')} {wrong}: its places are {{prompt}}, {{reference}} "
            "and {response}, and a brace of its own is written twice",
        )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _wrong_place(prompt: str) -> str | None:
    """Return what is wrong with the judge's prompt, in words; None if it can be filled in."""
    try:
        places = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        return f"cannot be read ({error})"
    if unknown := sorted(places - _PLACES):
        return f"has the unknown place {{{unknown[0]}}}"
    if "response" not in places:
        return "has no place for the response"
    try:
        prompt.format(prompt="", reference="", response="")
    except (ValueError, LookupError) as error:  # "{prompt:d}": the places are text
        return f"cannot be filled in ({error})"
    return None
