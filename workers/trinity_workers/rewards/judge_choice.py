"""Choice of the judge that the settings of rewards name."""

from __future__ import annotations

from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.server import redacted

from .base import Rewards
from .code import CodeLimits, CodeRewards
from .settings import RewardsConfig

_MIB = 1 << 20


def chosen_rewards(settings: RewardsConfig, waits: WaitReporter) -> Rewards | None:
    """Return the judge that the settings name; None if they name none.

    Args:
        settings: Settings of rewards.
        waits: Reporter of long waits for a reward.

    Raises RewardFailed if a token is not set.
    """
    if settings.code_tests is not None:
        limits = CodeLimits(
            seconds=settings.deadline,
            memory_bytes=settings.code_memory_mb * _MIB,
            file_bytes=settings.code_file_mb * _MIB,
            files=settings.code_files,
        )
        return CodeRewards(settings.code_tests, limits, processes=settings.calls, waits=waits)
    url = settings.service or settings.judge
    if url is None:
        return None
    from .http_calls import HttpCalls  # httpx is for runs that ask a service
    from .judge import JudgeRewards
    from .service import ServiceRewards

    what = "reward service" if settings.service else "judge"
    http = HttpCalls(
        f"the {what} {redacted(url)}",
        deadline=settings.deadline,
        attempts=settings.attempts,
        calls=settings.calls,
        token_variable=settings.token_variable,
        waits=waits,
    )
    if settings.service is not None:
        return ServiceRewards(url, http)
    return JudgeRewards(url, settings, http)
