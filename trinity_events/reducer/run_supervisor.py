"""Supervisor of all runs of a server; open runs go before closed ones."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import redis.asyncio

from trinity_schemas import EnvelopeReader

from ..core import Monitor, decode_state
from ..errors import KeyConflict
from ..log import RedisEventLog, position, watch_runs
from ..log.redis.error_replies import reply_text
from ..log.retry import backoff_delays
from ..server import connect, warn_of_eviction
from .policy import Policy, ReducerTimeouts
from .process import ABSENCE, BREAK, IN_THE_WAY, reduce_run

logger = logging.getLogger(__name__)

LOOKS = 16
"""Runs that are checked at once for being closed and folded."""
AFTERWARDS = 8
"""Closed runs that are served at once; each takes a second and two connections."""
_NOT_KNOWN: tuple[type[Exception], ...] = (*IN_THE_WAY, msgspec.DecodeError, UnicodeDecodeError)


async def reduce_all(
    url: str,
    *,
    run_id: str | None,
    root: Path | None,
    started: Callable[[], None] = lambda: None,
    policy: Policy = Policy(),
) -> None:
    """Serve one run, or every run of the index as it appears, until cancelled.

    The supervisor waits for a server that goes away later. Raises ServerUnreachable, ServerTooOld
    and InvalidUrl if there is no usable server at the start.
    """
    # A commit is never sent twice: after a lost reply the reducer reloads its state.
    async with connect(url, retry=False) as client:
        started()
        await warn_of_eviction(client, url)
        if run_id is not None:
            await reduce_run(client, run_id, root, policy=policy)
        else:
            await _RunSupervisor(client, root, policy).serve()


class _RunSupervisor:
    """Supervisor that serves open runs at once, and closed runs a few at a time.

    The index keeps every run that ever existed. Unfinished work of a closed run, such as its
    archiving, can wait. All closed runs at once would delay open runs for longer than a lease.
    """

    def __init__(self, client: redis.asyncio.Redis, root: Path | None, policy: Policy) -> None:
        self._client = client
        self._root = root
        self._policy = policy
        self._served: set[str] = set()
        self._over: set[str] = set()
        self._completed_runs: set[str] = set()
        """Runs that were served to their end; after a fault the index lists them again."""
        self._looks = anyio.CapacityLimiter(LOOKS)
        self._afterwards = anyio.CapacityLimiter(AFTERWARDS)

    async def serve(self) -> None:
        """Serve each listed run, until cancelled."""
        async with anyio.create_task_group() as tasks:
            async for run_id in _patiently_watch(self._client, self._policy.timeouts):
                tasks.start_soon(self._listed, run_id)

    async def _listed(self, run_id: str) -> None:
        """Serve a listed run; a run is listed again when it is opened again."""
        # For the look alone: a run keeps no place while it is served, which may be for ever.
        async with self._looks:
            over = run_id not in self._served and await _is_over(
                self._log(run_id), self._policy.fold.late_entries
            )
        if not over:
            self._over.discard(run_id)
            await self._serve(run_id)
        elif run_id not in self._over | self._completed_runs:
            self._over.add(run_id)
            async with self._afterwards:
                # While it waited for a place, the run may have been opened again and be served
                # already.
                if run_id in self._over:
                    self._over.discard(run_id)
                    await self._serve(run_id)

    async def _serve(self, run_id: str) -> None:
        log = self._log(run_id)
        while run_id not in self._served:
            self._served.add(run_id)
            self._completed_runs.discard(run_id)
            await reduce_run(
                self._client, run_id, self._root, until_closed=True, policy=self._policy
            )
            # A run that is opened again is listed and served again. If it was listed during
            # this call, its log has further entries by now.
            self._served.discard(run_id)
            self._completed_runs.add(run_id)
            if not await _has_more(log):
                return

    def _log(self, run_id: str) -> RedisEventLog:
        return RedisEventLog(self._client, run_id)


async def _is_over(log: RedisEventLog, late_entries: int) -> bool:
    """Return True if a run is closed, all its entries are folded, and few came after its end."""
    try:
        snapshot, folded = await log.load()
        if snapshot is None:
            return False
        monitor = Monitor(decode_state(snapshot))
        if monitor.state.closed is None:  # its end makes a snapshot
            return False
        late = await log.read(monitor.state.position, limit=late_entries)
        decode = EnvelopeReader().decode
        for entry in late:
            monitor.fold([entry], decode)
            # A large entry takes milliseconds, and the leads of other runs are renewed by this
            # event loop.
            await anyio.lowlevel.checkpoint()
        # A full page may not be all: such a run is served at once, as an open one is.
        if len(late) == late_entries or monitor.state.closed is None:
            return False
        return position(monitor.state.position) <= position(folded)
    except _NOT_KNOWN:
        return False  # unknown: the reducer that serves the run logs the reason


async def _has_more(log: RedisEventLog) -> bool:
    try:
        if await log.has_reports():
            return True
        folded = (await log.load())[1]
        # A log that lost entries ends before the folded position: there is nothing to serve.
        return position(folded) < position(await log.last_id())
    except IN_THE_WAY:
        return True  # unknown: check again


async def _patiently_watch(
    client: redis.asyncio.Redis, timeouts: ReducerTimeouts
) -> AsyncIterator[str]:
    backoff = backoff_delays(BREAK)
    while True:
        try:
            # After a fault it begins with the first listing again: `_listed` passes over what it
            # served.
            async for run_id in watch_runs(client, renumbering=True):
                backoff = backoff_delays(BREAK)
                yield run_id
        except ABSENCE as error:
            logger.warning("the index of runs waits for the server: %s", reply_text(error))
            await anyio.sleep(next(backoff))
        except KeyConflict as error:
            logger.error("the index of runs cannot be read: %s", error)
            await anyio.sleep(timeouts.fault_retry)
