"""The experience stream: explorers add groups, the trainer takes them, acknowledged once used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import redis
import redis.asyncio

from trinity_events.errors import DeadlineExceeded
from trinity_schemas import ContractError, ExperienceGroup, RunKeys, decode_experiences, encode

GROUP = "trainer"
FIELD = b"e"
BLOCK = 5.0

# Refuses to grow past the bound, atomically; nothing that waits to be trained on is ever trimmed.
_ADD = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
return 1
"""


class ExperienceWriter:
    """Adds experience groups, and waits while ``bound`` of them are not used yet."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, *, bound: int) -> None:
        self._key = RunKeys.of(run_id).experiences
        self._run_id = run_id
        self._bound = bound
        self._add = client.register_script(_ADD)

    async def add(self, group: ExperienceGroup, *, deadline: float) -> None:
        """Add one group. Raises DeadlineExceeded when the trainer makes no room in time."""
        payload = encode(group)
        give_up = anyio.current_time() + deadline
        pause = 0.01
        # Only when the bound is met: explorers are held back by their wait for weights before.
        while not await self._add(keys=[self._key], args=[self._bound, payload]):
            if anyio.current_time() > give_up:
                raise DeadlineExceeded(
                    f"the trainer of run {self._run_id} used none of {self._bound} experience "
                    f"groups within {deadline:g} s: is it running?"
                )
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.5)


class ExperienceReader:
    """Takes the groups of one training step at a time, through a consumer group.

    Groups of other epochs, and bytes that are no group, are dropped and counted.
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str, epoch: int) -> None:
        self._redis: Any = client
        self._key = RunKeys.of(run_id).experiences
        self._run_id = run_id
        self._epoch = epoch
        self._held: dict[int, list[tuple[bytes, ExperienceGroup]]] = {}
        self._made = False
        self.dropped = 0

    async def take(
        self, step: int, count: int, *, deadline: float
    ) -> tuple[list[ExperienceGroup], list[bytes]]:
        """The step's groups, and the entry ids to acknowledge them by.

        Raises:
            DeadlineExceeded: when they are not there in time, saying how many are.
        """
        await self._make_group()
        give_up = anyio.current_time() + deadline
        while len(self._held.get(step, ())) < count:
            left = give_up - anyio.current_time()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{len(self._held.get(step, ()))} of {count} experience groups for step {step} "
                    f"of run {self._run_id} arrived within {deadline:g} s: are its explorers alive?"
                )
            await self._read(min(left, BLOCK))
        taken = self._held.pop(step)
        # An explorer that numbers its groups lower than the trainer is late for good.
        for late in [held for held in self._held if held < step]:
            await self._drop([entry_id for entry_id, _ in self._held.pop(late)])
        surplus = [entry_id for entry_id, _ in taken[count:]]
        if surplus:
            await self._drop(surplus)
        return [group for _, group in taken[:count]], [entry_id for entry_id, _ in taken[:count]]

    async def ack(self, entry_ids: Sequence[bytes]) -> None:
        """The groups are trained on: free them."""
        if entry_ids:
            await self._redis.xack(self._key, GROUP, *entry_ids)
            await self._redis.xdel(self._key, *entry_ids)

    async def _drop(self, entry_ids: Sequence[bytes]) -> None:
        self.dropped += len(entry_ids)
        await self.ack(entry_ids)

    async def _read(self, seconds: float) -> None:
        reply = await self._redis.xreadgroup(
            GROUP, "trainer", {self._key: ">"}, count=256, block=max(1, int(seconds * 1000))
        )
        for _, found in reply or ():
            for entry_id, fields in found:
                try:
                    group = decode_experiences(fields.get(FIELD, b""))
                except ContractError:
                    group = None
                if group is None or group.version.epoch != self._epoch:
                    await self._drop([entry_id])
                else:
                    self._held.setdefault(group.step, []).append((entry_id, group))

    async def _make_group(self) -> None:
        if self._made:
            return
        try:
            await self._redis.xgroup_create(self._key, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._made = True
