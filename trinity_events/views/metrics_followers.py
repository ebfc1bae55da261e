"""Followers of the runs of a server, which keep their metrics."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Literal, NamedTuple

import anyio
import anyio.abc
import redis.asyncio
from msgspec import Struct

from trinity_schemas import RUN_INDEX

from ..core import MonitorState
from ..log import RedisEventLog, list_runs, position
from ..log.redis.error_replies import reply_text
from ..log.retry import backoff_delays, is_transient
from ..replay import current_state, follow_state
from ..server import server_clock
from .metrics import RunMetrics, ServerMetrics
from .terminal import print_err

SILENT_FOR = 86_400.0
"""Seconds after which a run without an event and without a reducer counts as gone."""
_ANSWER = 5.0
"""Seconds within which the server must answer a look."""
_CHECKS = 4
"""Runs that are checked at once."""
_SHORTEST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
"""Seconds between two attempts at a run that cannot be read; random between both."""


class FollowerLimits(Struct, frozen=True, kw_only=True):
    """Limits and periods of the followers of a server.

    Attributes:
        runs: Maximum runs with metrics: the newest open ones, then closed ones. Others are counted.
        closed_for: Seconds for which a closed run keeps its metrics, so that the last values are
            scraped.
        look_every: Seconds between two looks at the server and its index.
        recheck_every: Seconds after which a run is checked again for being open.
    """

    runs: int = 16
    closed_for: float = 900.0
    look_every: float = 2.0
    recheck_every: float = 60.0


Condition = Literal["open", "closed", "gone"]
"""A run is closed for some time after its end, and gone then."""


class _Checked(NamedTuple):
    """Result of a check of a run."""

    opened: float
    """Time at which the index listed the run last: it is checked again after a later opening."""
    at: float
    condition: Condition


class RunFollowers:
    """Followers of one run, or of every open run of a server; each goes on whatever others meet.

    Only reads from the server, with the rights of the user ``viewer``.

    Args:
        client: Client of the server.
        metrics: Metrics that the followers keep.
        run_id: The one run; None follows every run of the index that is open or was closed lately.
        limits: Limits and periods.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        metrics: ServerMetrics,
        run_id: str | None,
        limits: FollowerLimits = FollowerLimits(),
    ) -> None:
        self._limits = limits
        self._client = client
        self._metrics = metrics
        self._run = run_id
        self._ahead = 0.0
        """Milliseconds by which the server's clock is ahead of this host's."""
        self._listed: dict[str, float] = {} if run_id is None else {run_id: 0.0}
        """Runs of the index, oldest first, with the time of their last opening."""
        self._checked: dict[str, _Checked] = {}
        self._checking: set[str] = set()
        self._checks = anyio.CapacityLimiter(_CHECKS)
        self._states: dict[str, MonitorState] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._problem = ""

    async def run(self) -> None:
        """Follow, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._read_server(tasks)
                await anyio.sleep(self._limits.look_every)

    async def _read_server(self, tasks: anyio.abc.TaskGroup) -> None:
        """Read the clock and the runs of the server, and follow those that it has now."""
        try:
            # A server that hangs must show as down before the next scrapes.
            with anyio.fail_after(_ANSWER):
                clock = await server_clock(self._client, RUN_INDEX)
                if self._run is None:
                    self._listed = await list_runs(self._client)
        except Exception as error:
            self._metrics.show_server(up=False)
            self._print_problem(
                f"the server does not answer ({_format_error(error)}): the metrics are of the past"
            )
            return
        self._ahead = clock - time.time() * 1000
        self._metrics.show_server(up=True)
        self._print_problem("")
        if self._run is None:
            self._begin_checks(tasks)
        self._choose(tasks)

    def _print_problem(self, problem: str) -> None:
        """Print a problem once, and its end."""
        if problem != self._problem:
            print_err(problem or "the server answers again")
            self._problem = problem

    def _begin_checks(self, tasks: anyio.abc.TaskGroup) -> None:
        """Check the runs that were opened since their last check, and others after some time."""
        self._checked = {run: check for run, check in self._checked.items() if run in self._listed}
        for run, opened in reversed(self._listed.items()):
            check = self._checked.get(run)
            # A run that is opened again may be in the place of one that was closed for long.
            old = check is None or check.opened != opened
            if run not in self._checking and (
                old
                or (
                    check is not None
                    and anyio.current_time() - check.at > self._limits.recheck_every
                )
            ):
                self._checking.add(run)
                tasks.start_soon(self._check, run, opened, tasks)

    async def _check(self, run: str, opened: float, tasks: anyio.abc.TaskGroup) -> None:
        """Check a run, beside the others: one may have a long log."""
        try:
            async with self._checks:
                condition = await self._condition(run)
        except Exception:
            return  # a transient error: the next look checks the run again
        finally:
            self._checking.discard(run)
        self._checked[run] = _Checked(opened, anyio.current_time(), condition)
        self._choose(tasks)

    async def _condition(self, run: str) -> Condition:
        """Return the condition of a run; one that cannot be read is open: its follower says so."""
        try:
            log = RedisEventLog(self._client, run)
            last, clock = position(await log.last_id())[0], time.time() * 1000 + self._ahead
            # Both: a run that is led may wait for a day, and one without a reducer may still train.
            if clock - last > SILENT_FOR * 1000 and not await self._client.exists(log.keys.leader):
                return "gone"
            # Its follower has it already: no fold is needed.
            state = self._states.get(run) or await current_state(log)
        except Exception as error:
            if is_transient(error):
                raise
            return "open"
        if state.closed is None:
            return "open"
        closed_at = last if state.closed_at is None else state.closed_at
        return "closed" if clock - closed_at <= self._limits.closed_for * 1000 else "gone"

    def _choose(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin and end followers: of the one run, or of the newest runs, open ones first."""
        runs_by_condition: dict[Condition, list[str]] = {"open": [], "closed": [], "gone": []}
        for run in reversed(self._listed):
            if run == self._run:
                runs_by_condition["open"].append(run)
            elif (check := self._checked.get(run)) is not None:
                runs_by_condition[check.condition].append(run)
        chosen = [*runs_by_condition["open"], *runs_by_condition["closed"]][: self._limits.runs]
        self._metrics.show_left_out(max(0, len(runs_by_condition["open"]) - self._limits.runs))
        for run in set(self._scopes).difference(chosen):
            self._scopes.pop(run).cancel()
            self._states.pop(run, None)
            self._metrics.drop(run)
        for run in chosen:
            if run not in self._scopes:
                scope = self._scopes[run] = anyio.CancelScope()
                tasks.start_soon(self._follow, run, self._metrics.add(run), scope)

    async def _follow(self, run: str, metrics: RunMetrics, scope: anyio.CancelScope) -> None:
        """Update a run's metrics with each entry, until its scope is cancelled."""
        log, pauses = RedisEventLog(self._client, run), backoff_delays(_LONGEST_PAUSE)
        last_text = ""
        with scope:
            while True:
                try:
                    async with aclosing(follow_state(log)) as following:
                        async for state, folded in following:
                            self._states[run] = state
                            metrics.update(state, folded, int(time.time() * 1000 + self._ahead))
                            last_text, pauses = "", backoff_delays(_LONGEST_PAUSE)
                except Exception as error:
                    # One that this run alone meets must not end the followers of the others.
                    if not is_transient(error):
                        metrics.show_unreadable()
                        if last_text != _format_error(error):
                            last_text = _format_error(error)
                            print_err(f"the metrics of run {run} are of the past: {last_text}")
                await anyio.sleep(max(_SHORTEST_PAUSE, next(pauses)))


def _format_error(error: Exception) -> str:
    return reply_text(error) or type(error).__name__
