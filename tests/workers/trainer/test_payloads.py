"""Ranks load the tokens of their groups before a step begins; a step without them is given back."""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("torch")

from tests.rollouts.test_malformed_answers import reissued
from tests.support.errors import raises
from tests.support.rollout_parts import Parts, answer
from tests.support.waits import PATIENCE
from trinity_events.rollouts import AnswerLimits
from trinity_events.rollouts.payloads import (
    PayloadsUnusable,
    RedisPayloadReader,
    RedisPayloads,
    load_groups,
)
from trinity_events.server import open_client
from trinity_workers.algorithms.collate import collate
from trinity_workers.trainer.trainer import _LOADING_ATTEMPTS, Trainer
from trinity_workers.trainer.workers.fsdp import TrainWorker
from trinity_workers.worker_group.rows import split_rows
from trinity_workers.worker_group.wire import pack, unpack


@pytest.fixture
def parts(client, publisher, run_id):
    return Parts(client, publisher, run_id)


@pytest.fixture
def store(client, run_id):
    return RedisPayloads(client, run_id)


@pytest.fixture
def reader(redis_url, run_id):
    with open_client(redis_url) as client:
        yield RedisPayloadReader(client, run_id, deadline=PATIENCE)


class LoadingEngine:
    """Engine whose ranks load tokens, and learn nothing."""

    loads_payloads = True
    train_step_num = 0

    def __init__(self, reader) -> None:
        self._reader = reader
        self.trained = []

    async def train_step(self, groups):
        self.trained.append(load_groups(self._reader, groups))
        return {"loss": 0.0}


class StepTaker(Trainer):
    """Trainer of one step, with explorers that answer what it takes."""

    def __init__(self, config, engine, dispatcher, explorer) -> None:
        super().__init__(config, engine)
        self._dispatcher, self._explorer = dispatcher, explorer
        self.before_step = None

    async def _take(self, step):
        async def keep_answering():
            while True:
                await answer(self._explorer, 2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_answering)
            groups = await self._dispatcher.take(2, deadline=PATIENCE)
            tasks.cancel_scope.cancel()
        if self.before_step is not None:
            await self.before_step(groups)
        return groups


async def test_a_step_whose_tokens_are_gone_is_taken_with_new_ones(
    parts, store, reader, make_config
):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    engine = LoadingEngine(reader)
    trainer = StepTaker(make_config(), engine, dispatcher, parts.explorer(payloads=store))

    async def lose_one(groups):
        trainer.before_step = None
        await store.free([groups[0].payload])

    trainer.before_step = lose_one
    groups, metrics = await trainer._take_step()
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (1, 1)]
    assert metrics["reward"] == 0.5
    assert await reissued(parts) == {(0, 2, "payload-lost")}
    [[first, second]] = engine.trained
    assert [sample.turns[0].tokens for sample in (*first, *second)] == [[0], [0], [1], [1]]


async def test_a_medium_that_loses_everything_ends_the_run_with_its_name(
    parts, store, reader, make_config
):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer(payloads=store)
    trainer = StepTaker(make_config(), LoadingEngine(reader), dispatcher, explorer)

    async def lose_all(groups):
        await store.free([group.payload for group in groups])

    trainer.before_step = lose_all
    with raises(PayloadsUnusable) as raised:
        await trainer._take_step()
    assert {fault.kind for fault in raised.value.faults} == {"missing"}
    attempts = {attempt for _, attempt, _ in await reissued(parts)}
    assert max(attempts) == _LOADING_ATTEMPTS


async def test_a_rank_loads_its_own_groups_and_names_the_faults_of_each(
    parts, store, reader, make_config
):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(payloads=store), 2) == [0, 1]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    references = [group.experiences for group in groups]
    # As Ray takes them to two ranks: no token is on the way.
    parts_of_ranks = split_rows(references, 2).parts
    assert all(len(pack(part).payload) < 1200 for part in parts_of_ranks)
    [mine] = [unpack(pack(part)) for part in parts_of_ranks if part[0][0].ordinal == 0]
    worker = TrainWorker.__new__(TrainWorker)
    worker._payloads, worker._config, worker._limits = reader, make_config(), AnswerLimits()
    assert worker.load_payloads(mine) == []
    samples = [worker._with_tokens(group) for group in mine]
    assert collate(samples, 0).input_ids.tolist() == [[0, 7], [0, 7]]
    worker._limits = AnswerLimits(vocabulary_size=7)
    [fault] = worker.load_payloads(mine)
    assert (fault.ordinal, fault.kind) == (0, "malformed")
    assert worker._loaded == {}
    await store.free([groups[0].payload])
    assert [fault.kind for fault in worker.load_payloads(mine)] == ["missing"]
