"""A server that goes away and comes back costs no claim and loses no ordinal."""

import re
from functools import partial

import anyio
import pytest

from tests.support.errors import raises
from tests.support.faulty_proxy import Proxy
from tests.support.redis_servers import servers
from tests.support.rollout_parts import LONG, Parts, answer, samples_of, settings
from tests.support.waits import PATIENCE, until
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import RolloutClient, RolloutDispatcher
from trinity_events.server import connect
from trinity_schemas import RunKeys

pytestmark = pytest.mark.server

AWAY = 0.3
"""Seconds of an outage. More than the client's own patience, of which these have none."""


@pytest.fixture
def server(tmp_path):
    with servers(tmp_path, 1) as [server]:
        yield server


@pytest.fixture
async def parts(server, run_id):
    async with connect(server.url, retry=False) as client:
        epoch = await open_run(client, run_id)
        log = RedisEventLog(client, run_id)
        yield Parts(client, AsyncPublisher(log, epoch, new_producer("trainer")), run_id)


async def test_every_claim_gets_one_full_lease_after_an_outage(parts, server):
    lease = 60.0
    dispatcher = await parts.dispatcher(claim_lease=lease)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer()
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    # The explorer could not renew for longer than its lease.
    aged = {"min_idle_time": 0, "idle": int(2 * lease * 1000), "justid": True}
    key = RunKeys.of(parts.run_id).rollouts
    await parts.client.xclaim(key, "explorers-1", "a", message_ids=[claim.entry_id], **aged)
    server.kill()
    async with anyio.create_task_group() as tasks:

        async def come_back():
            await anyio.to_thread.run_sync(server.start)
            assert await explorer.renew([claim]) == [claim]
            assert await explorer.answer(claim, samples_of(claim))

        tasks.start_soon(come_back)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert group.attempt == 1


async def test_every_claim_gets_one_full_lease_after_broken_connections(parts, server, tmp_path):
    lease = 3.0

    async def has_been_up_for_a_lease():
        return (await parts.client.info("server"))["uptime_in_seconds"] > lease

    await until(has_been_up_for_a_lease)
    with Proxy(server.url, tmp_path / "proxy") as proxy:
        async with connect(proxy.url, retry=False) as client:
            cut_off = Parts(client, parts.publisher, parts.run_id)
            dispatcher = await cut_off.dispatcher(claim_lease=lease)
            await dispatcher.dispatch(1, parts.version)
            explorer = parts.explorer()
            [claim] = await explorer.claim(1, seconds=PATIENCE)
            proxy.refuse()
            with raises(DeadlineExceeded, reason=re.compile("does not answer")):
                await dispatcher.take(1, deadline=2.0)
            # No explorer could renew for longer than a lease, and the server runs on.
            aged = {"min_idle_time": 0, "idle": int(2 * lease * 1000), "justid": True}
            key = RunKeys.of(parts.run_id).rollouts
            await parts.client.xclaim(key, "explorers-1", "a", message_ids=[claim.entry_id], **aged)
            proxy.heal()
            with raises(DeadlineExceeded, missing=re.compile("claimed by a")):
                await dispatcher.take(1, deadline=1.0)
            assert await explorer.renew([claim]) == [claim]
            assert await explorer.answer(claim, samples_of(claim))
            [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert group.attempt == 1
    assert len(await parts.publisher.log.read()) == 2, "the run was opened, and one request told"


async def test_what_the_server_held_is_still_handed_out_after_it_was_killed(parts, server):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(3, parts.version)
    assert await answer(parts.explorer(), 2) == [0, 1]
    server.kill()
    server.start()
    groups = await dispatcher.take(2, deadline=PATIENCE)
    await dispatcher.trained(1, groups)
    assert await answer(parts.explorer()) == [2]


async def come_back(server):
    await anyio.sleep(AWAY)
    await anyio.to_thread.run_sync(server.start)


async def test_each_call_of_dispatcher_and_explorer_waits_for_a_server_that_is_away(parts, server):
    dispatcher, explorer = await parts.dispatcher(max_attempts=5), parts.explorer()

    async def through_an_outage(call):
        server.kill()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_back, server)
            return await call()

    assert await through_an_outage(partial(dispatcher.dispatch, 2, parts.version)) == 2
    first, second = await through_an_outage(partial(explorer.claim, 2, seconds=PATIENCE))
    assert await through_an_outage(partial(explorer.renew, [first, second])) == [first, second]
    assert await through_an_outage(partial(explorer.answer, first, samples_of(first)))
    await through_an_outage(partial(explorer.fail, second, "by chance"))
    groups = await through_an_outage(partial(dispatcher.take, 1, deadline=PATIENCE))
    assert [group.ordinal for group in groups] == [0]
    await through_an_outage(partial(dispatcher.trained, 1, groups))
    assert dispatcher.ledger.format_sums() == "1 trained, 0 dropped, 1 open"


async def test_a_server_that_stays_away_is_named_at_the_deadline(parts, server):
    rollout_settings = settings(parts.run_id, parts.publisher.epoch)
    dispatcher = RolloutDispatcher(parts.client, parts.publisher, rollout_settings, deadline=0.2)
    await dispatcher.start()
    await dispatcher.dispatch(2, parts.version)
    explorer = RolloutClient(
        parts.client, parts.run_id, parts.publisher.epoch, "a", lease=LONG, deadline=0.2
    )
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    server.kill()
    away = re.compile(r"does not answer \(Error")
    who = f"run {parts.run_id}, a"
    for call, missing in (
        (explorer.claim(1, seconds=PATIENCE), f"^{who}: "),
        (explorer.renew([claim]), f"^{who}: .* renew "),
        (explorer.answer(claim, samples_of(claim)), f"^{who}: .* answer "),
        (dispatcher.take(2, deadline=0.2), f"^run {parts.run_id}: "),
    ):
        with raises(DeadlineExceeded, missing=re.compile(missing), deadline=0.2, reason=away):
            await call
