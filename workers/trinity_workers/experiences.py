"""Experience stream: explorers add groups, and the trainer acknowledges them once used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import anyio
import redis
import redis.asyncio

from trinity_events.errors import StaleEpoch
from trinity_events.server import Deadline
from trinity_schemas import ContractError, ExperienceGroup, RunKeys, decode_experiences, encode

Waiting = Callable[[int, Sequence[ExperienceGroup], float], Awaitable[None]]
GROUP = "trainer"
MEMBER = "trainer"
"""Consumer name of the trainer: a new trainer takes over the entries of its predecessor."""
FIELD = b"e"
BLOCK = 5.0
"""Seconds that one read blocks; shorter than the socket's timeout."""

# Atomically refuses to exceed the bound; entries that wait for training are never trimmed.
_ADD = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
return 1
"""


class ExperienceWriter:
    """Writer of experience groups, which waits while ``bound`` groups are unused."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, *, bound: int) -> None:
        self._key = RunKeys.of(run_id).experiences
        self._run_id = run_id
        self._bound = bound
        self._add = client.register_script(_ADD)

    async def add(self, group: ExperienceGroup, *, deadline: float) -> None:
        """Add one group; retry while the server is unreachable.

        Raises:
            DeadlineExceeded: if the trainer frees no space, or the server stays unreachable, in
                time.
        """
        add = partial(self._add, keys=[self._key], args=[self._bound, encode(group)])
        wait = Deadline(deadline, f"a group of run {self._run_id} was not added", "is it running?")
        pause = 0.01
        # The bound is rarely met: explorers wait for weights before.
        while not await wait.ask(add):
            wait.missing = (
                f"{self._bound} experience groups of run {self._run_id} wait for the trainer, "
                "which freed no space for another"
            )
            await anyio.sleep(min(pause, wait.left()))
            pause = min(2 * pause, 0.5)


class ExperienceReader:
    """Reader of the groups of one training step at a time, through a consumer group.

    One reader of a run works at a time. It begins with the entries that its predecessor read and
    did not acknowledge. It drops and counts entries that are no group, of an older epoch, of an
    earlier step, or duplicates. After an entry of a later epoch this reader is outdated, and takes
    no more entries. It retries while the server is unreachable.
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str, epoch: int) -> None:
        self._redis: Any = client
        self._key = RunKeys.of(run_id).experiences
        self._run_id = run_id
        self._epoch = epoch
        self._step = 0
        self._held: dict[int, dict[str, tuple[bytes, ExperienceGroup]]] = {}
        self._unacknowledged: set[bytes] = set()
        self._done: list[bytes] = []
        """Ids of used entries that are still to be freed; kept while the server is unreachable."""
        self._started = False
        self.dropped = 0

    async def take(
        self, step: int, count: int, *, deadline: float, waiting: Waiting | None = None
    ) -> tuple[list[ExperienceGroup], list[bytes]]:
        """Return the step's groups, and the entry ids with which to acknowledge them.

        Args:
            step: The training step.
            count: Number of groups of the step.
            deadline: Seconds to wait for them.
            waiting: Called after each read with the step, the number of groups that arrived, and
                the seconds since the wait began.

        Raises:
            DeadlineExceeded: if they do not arrive in time; it states how many arrived.
            StaleEpoch: if the run was opened again with a later epoch.
        """
        self._step = step
        for late in [held for held in self._held if held < step]:
            self._drop([entry_id for entry_id, _ in self._held.pop(late).values()])
        held = self._held.setdefault(step, {})
        began = anyio.current_time()
        wait = Deadline(deadline, "", "are its explorers alive?")
        while len(held) < count:
            wait.missing = (
                f"{len(held)} of {count} experience groups for step {step} of run {self._run_id} "
                "arrived"
            )
            await wait.ask(lambda: self._read(min(wait.left(), BLOCK)))
            if self._done:
                await wait.ask(self._free)
            if waiting is not None and len(held) < count:
                groups = [group for _, group in held.values()]
                await waiting(step, groups, anyio.current_time() - began)
        taken = list(self._held.pop(step).values())
        self._drop([entry_id for entry_id, _ in taken[count:]])
        return [group for _, group in taken[:count]], [entry_id for entry_id, _ in taken[:count]]

    async def ack(self, entry_ids: Sequence[bytes], *, deadline: float) -> None:
        """Acknowledge and free groups that were used in training. Raises DeadlineExceeded."""
        self._done += entry_ids
        if self._done:
            missing = f"experience groups of run {self._run_id} were not freed"
            await Deadline(deadline, missing).ask(self._free)

    def _drop(self, entry_ids: Sequence[bytes]) -> None:
        self.dropped += len(entry_ids)
        self._done += entry_ids

    async def _free(self) -> None:
        # In one transaction: an acknowledged entry that is not deleted would count against the
        # bound.
        async with self._redis.pipeline(transaction=True) as both:
            both.xack(self._key, GROUP, *self._done)
            both.xdel(self._key, *self._done)
            await both.execute()
        self._unacknowledged.difference_update(self._done)
        self._done.clear()

    async def _start(self) -> None:
        try:
            await self._redis.xgroup_create(self._key, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        await self._take_over()
        self._started = True

    async def _read(self, seconds: float) -> None:
        """Keep the entries that arrive within ``seconds``; the first read adds earlier ones."""
        if not self._started:
            await self._start()
            return
        reply = await self._redis.xreadgroup(
            GROUP, MEMBER, {self._key: ">"}, count=256, block=max(1, int(seconds * 1000))
        )
        for _, entries in reply or ():
            self._sort(entries)
        if not reply:
            await self._take_over()

    async def _take_over(self) -> None:
        """Claim entries that were delivered but are not held here.

        They were delivered to a dead reader, or in a reply that was lost with its connection.
        """
        pending = await self._redis.xpending(self._key, GROUP)
        if pending["pending"] <= len(self._unacknowledged):
            return
        cursor = b"0-0"
        while True:
            cursor, entries, *_ = await self._redis.xautoclaim(
                self._key, GROUP, MEMBER, min_idle_time=0, start_id=cursor, count=100
            )
            self._sort(entries)
            if cursor == b"0-0":
                return

    def _sort(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Keep the useful entries by step; drop the others."""
        useless: list[bytes] = []
        for entry_id, fields in entries:
            if entry_id in self._unacknowledged:
                continue
            self._unacknowledged.add(entry_id)
            group = self._useful(fields.get(FIELD, b""))
            if group is None:
                useless.append(entry_id)
            else:
                self._held.setdefault(group.step, {})[group.group_id] = (entry_id, group)
        self._drop(useless)

    def _useful(self, payload: bytes) -> ExperienceGroup | None:
        try:
            group = decode_experiences(payload)
        except ContractError:
            return None
        epoch = group.version.epoch
        if group.run_id == self._run_id and epoch > self._epoch:
            raise StaleEpoch(
                f"run {self._run_id} was opened anew as epoch {epoch}: this trainer is of epoch "
                f"{self._epoch}, and ends"
            )
        ours = group.run_id == self._run_id and epoch == self._epoch
        late = group.step < self._step
        twice = group.group_id in self._held.get(group.step, ())
        return group if ours and not late and not twice else None
