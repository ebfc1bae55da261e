"""A trainer whose link to the servers is cut: one deadline of the configuration holds."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.errors import raises
from tests.support.faulty_proxy import Proxy
from tests.support.local_training import LocalEngine
from tests.support.pipeline import events_of, until
from tests.support.waits import PATIENCE
from trinity_events import Synchronizer
from trinity_events.errors import PublishError
from trinity_events.server import connect
from trinity_schemas import StepCommitted, TrainerStatusChanged
from trinity_workers.trainer import Trainer

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("torch_threads")]


class TrainedEngine(LocalEngine):
    """Engine that has taken all steps."""

    @property
    def train_step_num(self) -> int:
        return self._config.steps


@pytest.fixture
def proxy(redis_url):
    with Proxy(redis_url) as between:
        yield between


@pytest.fixture
async def make_trainer(make_config, proxy):
    """Makes prepared trainers that have taken all steps, behind the proxy."""
    made: list[Trainer] = []

    async def prepared(timeout: float) -> Trainer:
        config = make_config(
            steps=1,
            rollouts={"prompts_per_step": 1, "samples_per_prompt": 2},
            evaluation={"sets": {}},
            sync={"timeout": timeout},
        )
        made.append(Trainer(structs.replace(config, redis_url=proxy.url), TrainedEngine(config)))
        await made[-1].prepare()
        return made[-1]

    yield prepared
    proxy.heal()
    for trainer in made:
        await trainer.shutdown()


async def test_a_trainer_waits_for_a_silent_server_as_long_as_its_configuration_says(
    make_trainer, proxy
):
    trainer = await make_trainer(timeout=1.0)
    proxy.swallow()
    with anyio.fail_after(PATIENCE), raises(PublishError, deadline=1.0):
        await trainer.train()


async def test_a_trainer_outlasts_a_link_that_is_cut_for_less_than_its_timeout(
    make_trainer, proxy, log
):
    trainer = await make_trainer(timeout=PATIENCE)
    proxy.refuse()

    async def stopped() -> bool:
        return "stopped" in [
            envelope.event.status for envelope in await events_of(log, TrainerStatusChanged)
        ]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer.train)
        await anyio.sleep(0.5)  # the outage: a trainer without a deadline would end in it
        assert not await stopped()
        proxy.heal()
        await until(stopped)


async def test_a_chunk_server_that_takes_nothing_holds_the_publication_until_it_does(
    publisher, redis_url, weights_url, run_id, log
):
    trainer = Synchronizer(
        run_id, publisher.epoch, redis_url=redis_url, weights_url=weights_url, deadline=PATIENCE
    )
    model = pytest.importorskip("torch").nn.Linear(64, 64)

    def publish() -> None:
        trainer.open_version(1)
        trainer.publish(model.state_dict(), 1)
        trainer.commit(1)
        trainer.flush()

    async with connect(weights_url) as chunks:

        async def refused() -> int:
            statistics = (await chunks.info("errorstats")).get("errorstat_OOM", {})
            return int(statistics.get("count", 0))

        before, earlier = (await chunks.config_get("maxmemory"))["maxmemory"], await refused()
        await chunks.config_set("maxmemory", 1)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, publish)
                await until(lambda: _exceeds(refused, earlier + 1))
                assert not await events_of(log, StepCommitted)
                await chunks.config_set("maxmemory", before)
        finally:
            await chunks.config_set("maxmemory", before)
    assert [envelope.event.step for envelope in await events_of(log, StepCommitted)] == [1]
    trainer.close()


async def _exceeds(count, least: int) -> bool:
    return await count() > least
