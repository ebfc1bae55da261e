"""Rules of rewards: one source, which can be reached, and a prompt that can be filled in."""

from __future__ import annotations

import string
from urllib.parse import urlsplit

from ...rewards.settings import RewardsConfig
from .base import Contradictions, FormatField

_PLACES = {"prompt", "reference", "response"}


def check_rewards(
    rewards: RewardsConfig, function: str | None, named: FormatField
) -> Contradictions:
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
