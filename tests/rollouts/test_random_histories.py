"""Trainers and explorers die at every boundary: no ordinal is lost, none is trained twice.

The server, the scripts, the dispatcher and the explorers' clients are the real ones. Deaths are
errors before or after a call to the server, as a process would have died there. A counter of the
log's raw entries, which shares no code with the dispatcher, keeps the books. In every second
history the tokens of answers are payloads.
"""

from random import Random

import anyio
import pytest

from tests.support.rollout_histories import count_raw
from tests.support.rollout_parts import LONG, reward_error_of, samples_of, settings
from tests.support.waits import PATIENCE
from trinity_events.core.ledger import Ledger
from trinity_events.errors import StaleEpoch
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import RolloutClient, RolloutDispatcher
from trinity_events.rollouts.payloads import RedisPayloads
from trinity_schemas import LedgerRestored, RunKeys, StepRef, payload_key

SEEDS = range(24)
DEATHS = 5
STEPS = 4
"""Steps that the trainer takes after its last death."""
LEASE = 0.03


class Died(Exception):
    """The process ended here."""


class Fuse:
    """Number of calls to the server after which a process dies, before or after the call."""

    def __init__(self, random: Random, calls: int | None) -> None:
        self._remaining_calls = calls
        self._after = random.random() < 0.5

    async def __call__(self, call):
        if self._remaining_calls is None:
            return await call()
        self._remaining_calls -= 1
        if self._remaining_calls < 0 and not self._after:
            raise Died
        reply = await call()
        if self._remaining_calls < 0:
            raise Died
        return reply

    def burn(self) -> None:
        """Let the process live on, as one that only slept."""
        self._remaining_calls = None

    def wire(self, streams) -> None:
        """Count the calls of streams."""
        ask = streams.retry
        streams.retry = lambda wait, question, **more: self(lambda: ask(wait, question, **more))


class MortalLog(RedisEventLog):
    """Log whose writer may die."""

    fuse: Fuse

    async def append(self, *args, **keywords):
        return await self.fuse(lambda: super(MortalLog, self).append(*args, **keywords))


class History:
    """One seeded history of a run."""

    def __init__(self, client, run_id: str, seed: int) -> None:
        self.client, self.run_id = client, run_id
        self.random = Random(seed)
        self.order = self.random.choice(["ordinal", "arrival"])
        self.keep = self.random.choice(["trained", "checkpoint"])
        self.saved: list[tuple[StepRef, object]] = []
        self.epoch = self.step = 0
        self.late = []
        """Dispatchers and explorers of the past, which wake up once more."""
        self.payloads = RedisPayloads(client, run_id) if seed % 2 else None
        self.ledger = Ledger()
        self.stale_calls = 0
        self.ended = False

    async def run(self) -> None:
        for _ in range(DEATHS):
            await self.live(self.random.randrange(2, 60))
        await self.live(None)

    async def live(self, calls: int | None) -> None:
        fuse = Fuse(self.random, calls)
        dispatcher = None
        try:
            publisher, ledger = await self.open(fuse)
            options = settings(
                self.run_id,
                self.epoch,
                order=self.order,
                keep_answers=self.keep,
                claim_lease=LEASE,
                on_reward_error="drop_group",
                window=self.random.choice([2, 5, 9]),
            )
            dispatcher = RolloutDispatcher(
                self.client, publisher, options, ledger, payloads=self.payloads
            )
            fuse.wire(dispatcher._streams)
            await dispatcher.start()
            await self.wake_the_past()
            async with anyio.create_task_group() as tasks:
                for name in "abc":
                    tasks.start_soon(self.explore, name)
                await self.train(dispatcher, endless=calls is not None)
                tasks.cancel_scope.cancel()
            self.ledger = dispatcher.ledger
            self.ended = True
        except* Died:
            fuse.burn()
            if dispatcher is not None:
                self.late.append(dispatcher.start)

    async def open(self, fuse: Fuse):
        at, saved = self.random.choice(self.saved[-2:]) if self.saved else (None, None)
        self.saved = [checkpoint for checkpoint in self.saved if at and checkpoint[0] <= at]
        self.epoch = await open_run(self.client, self.run_id, resume_from=at)
        self.step = at.step if at else 0
        log = MortalLog(self.client, self.run_id)
        log.fuse = fuse
        publisher = AsyncPublisher(log, self.epoch, new_producer("trainer"))
        if saved is None:
            return publisher, Ledger()
        await publisher.publish(LedgerRestored(ledger=saved, digest=saved.digest))
        return publisher, Ledger.restored(saved)

    async def wake_the_past(self) -> None:
        for call in self.late:
            with pytest.raises(StaleEpoch):
                await call()
            self.stale_calls += 1
        self.late = []

    async def train(self, dispatcher, *, endless: bool) -> None:
        last = self.step + STEPS
        while endless or self.step < last:
            version = StepRef(self.epoch, self.step)
            await dispatcher.dispatch(self.random.randrange(5), version)
            groups = await dispatcher.take(2, deadline=PATIENCE, usable=self.judge)
            await self.trained(dispatcher, groups)
        while dispatcher.ledger.open_count:
            await self.trained(dispatcher, await dispatcher.take(1, deadline=PATIENCE))

    async def trained(self, dispatcher, groups) -> None:
        for group in groups:
            # Before its fate is final, the tokens of every group are there.
            assert (group.payload is not None) is (self.payloads is not None)
            if group.payload is not None:
                assert await self.client.exists(payload_key(self.run_id, group.payload))
        await dispatcher.trained(self.step + 1, groups)
        self.step += 1
        if self.random.random() < 0.5:
            self.saved.append((StepRef(self.epoch, self.step), dispatcher.ledger_at(self.step)))
            await dispatcher.checkpointed(self.step)

    def judge(self, _):
        return self.random.choices([True, "stale", "filtered"], [8, 1, 1])[0]

    async def explore(self, name: str) -> None:
        """Explore in one life after the other."""
        while True:
            explorer = RolloutClient(
                self.client, self.run_id, self.epoch, name, lease=LONG, payloads=self.payloads
            )
            fuse = Fuse(self.random, self.random.choice([None, 3, 10, 30]))
            fuse.wire(explorer._streams)
            try:
                while True:
                    for claim in await explorer.claim(self.random.choice([1, 3]), seconds=0.05):
                        await self.serve(explorer, claim)
            except Died:
                continue

    async def serve(self, explorer, claim) -> None:
        match self.random.choices(["answer", "twice", "fail", "forget"], [10, 2, 1, 1])[0]:
            case "answer":
                await explorer.answer(claim, samples_of(claim))
            case "twice":
                await explorer.renew([claim])
                await explorer.answer(claim, samples_of(claim))
                assert not await explorer.answer(claim, samples_of(claim))
            case "fail":
                error = reward_error_of(claim, explorer.name)
                await explorer.fail(claim, "by chance", self.random.choice([error, None]))
        late = RolloutClient(
            self.client,
            self.run_id,
            self.epoch,
            explorer.name,
            lease=LONG,
            payloads=self.payloads,
        )
        if len(self.late) < 3:
            self.late.append(lambda: late.answer(claim, samples_of(claim)))


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_lost_and_nothing_trained_twice(client, run_id, seed):
    """Invariants 1 to 3 of dispatcher.py."""
    history = History(client, run_id, seed)
    with anyio.fail_after(2 * PATIENCE):
        await history.run()
    entries = await client.xrange(RunKeys.of(run_id).events)
    count = count_raw([fields[b"e"] for _, fields in entries])[-1]
    ledger = history.ledger
    assert history.ended
    assert count.wrong == []
    assert (count.open, count.next) == ([], ledger.next), "lost"
    assert (count.trained, dict(count.dropped)) == (ledger.trained, ledger.dropped)
    assert count.trained + count.dropped.total() == count.next
    assert history.stale_calls
    assert await client.xlen(RunKeys.of(run_id).rollouts) == 0
    # What dead explorers left, or an answer that was discarded, has a lease.
    for key in await client.keys(f"trinity-weights:{{{run_id}.*"):
        assert await client.pttl(key) > 0
