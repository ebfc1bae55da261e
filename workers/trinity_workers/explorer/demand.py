"""Demand of an explorer for newer weights, under the sync style ``explorer_driven``."""

from __future__ import annotations

from collections.abc import Iterable

from trinity_schemas import StepRef, SyncRequested


class VersionDemand:
    """Demand for one version after each that is served.

    It comes once requests of ``interval`` explorer steps were answered with the served version, or
    once there is nothing to answer.

    Args:
        interval: Explorer steps that one version serves.
        prompts_per_step: Consecutive ordinals of an explorer step.
    """

    def __init__(self, interval: int, prompts_per_step: int) -> None:
        self._interval = interval
        self._prompts_per_step = prompts_per_step
        self._serves: StepRef | None = None
        self._first: int | None = None
        """Explorer step from which on the served version answers."""
        self._is_requested = False

    def record_answers(self, serves: StepRef, ordinals: Iterable[int]) -> SyncRequested | None:
        """Return the request to send after answers with a version, if it is time."""
        self._set_served(serves)
        steps = [ordinal // self._prompts_per_step for ordinal in ordinals]
        if not steps:
            return None
        if self._first is None:
            self._first = min(steps)
        # Ordinals of one claim may lie in two explorer steps: the last one counts.
        if max(steps) - self._first + 1 < self._interval:
            return None
        return self._create_request()

    def idle(self, serves: StepRef) -> SyncRequested | None:
        """Return the request to send while there is nothing to answer, unless it was sent."""
        self._set_served(serves)
        return self._create_request()

    def _set_served(self, serves: StepRef) -> None:
        if serves != self._serves:
            self._serves, self._first, self._is_requested = serves, None, False

    def _create_request(self) -> SyncRequested | None:
        if self._is_requested or self._serves is None:
            return None
        # Once for each version: the claim loop calls idle() about once a second.
        self._is_requested = True
        return SyncRequested(oldest_version=StepRef(self._serves.epoch, self._serves.step + 1))
