"""The pipeline on a Redis Cluster of three nodes."""

import asyncio
import re
from functools import partial

import anyio
import pytest
import torch

from tests.support.acl_rules import DOCS, rules
from tests.support.errors import raises
from tests.support.event_histories import History, committed, registration, started
from tests.support.pipeline import (
    announced,
    count_announcements,
    folded,
    publish_steps,
    reducer_task,
)
from tests.support.redis_servers import cluster
from tests.support.rollout_parts import Parts, samples_of
from tests.support.waits import PATIENCE
from trinity_events import StepReady, liveness, subscribe
from trinity_events.archive.export import Recording, import_recording
from trinity_events.archive.format import Header
from trinity_events.errors import InvalidUrl, KeyConflict, ServerUnreachable
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    DeadLetter,
    Entry,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    list_runs,
    new_producer,
    open_run,
)
from trinity_events.log.position import LAST_ID, is_from_a_clock
from trinity_events.log.redis.run_index import renumber_index
from trinity_events.reducer import reduce_all
from trinity_events.replay import current_state
from trinity_events.server import connect, connect_sync, open_client
from trinity_events.weights import PartRef, PartWriter, RedisChunkStore
from trinity_schemas import RUN_INDEX, ExplorerStatusChanged, RunKeys, SaveStarted, encode

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as three:
        yield three


@pytest.fixture(params=["any node", "by name"])
def url(request, nodes):
    """A URL that does not say that it is a cluster, and one that does."""
    if request.param == "any node":
        return nodes[0].url
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def runs_on_every_node(nodes):
    """Ids of runs of which each is on another node."""
    with open_client(nodes[0].url) as client:
        names_by_port = {}
        number = 0
        while len(names_by_port) < len(nodes):
            name = f"run-{number}"
            names_by_port.setdefault(client.get_node_from_key(RunKeys.of(name).events).port, name)
            number += 1
    return list(names_by_port.values())


async def test_the_whole_pipeline_runs_on_a_cluster(nodes, url, tmp_path):
    for run_id in runs_on_every_node(nodes):
        async with connect(url) as client, reducer_task(url, run_id, tmp_path):
            epoch = await open_run(client, run_id)
            log = RedisEventLog(client, run_id)
            trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
            await publish_steps(trainer, [1])
            await trainer.publish(committed(1, "state_dict", registration(expected=0)))
            for group in (None, f"eval-{epoch}"):
                async with subscribe(
                    run_id, StepReady, redis_url=url, group=group, deadline=PATIENCE
                ) as events:
                    event = await anext(aiter(events))
                    assert event.step == 1
                    await event.ack()
            explorer = AsyncPublisher(log, epoch, new_producer("explorer", 3))
            await explorer.publish(ExplorerStatusChanged(status="running"))
            await folded(log)
            assert "explorer-3" in (await current_state(log)).explorers
            assert run_id in await list_runs(client)


async def test_ids_that_no_clock_makes_are_mended_on_every_node(nodes, url):
    async with connect(url) as client, connect(url, retry=False) as own:
        for run_id in runs_on_every_node(nodes):
            log = RedisEventLog(client, run_id)
            epoch = await open_run(client, run_id)
            await client.xadd(log.keys.events, {"e": b"no event"}, id=LAST_ID)
            trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
            before = await count_announcements(log)
            async with reducer_task(url, run_id):
                await publish_steps(trainer, [1])
                await announced(log, before + 1)
            assert is_from_a_clock(await log.last_id())
        await client.xadd(RUN_INDEX, {"run": run_id}, id=LAST_ID)
        await renumber_index(own)
        assert await open_run(client, run_id) > epoch


async def test_what_is_told_of_silence_and_of_taken_keys_is_told_of_runs_on_every_node(nodes, url):
    async with connect(url) as client:
        for run_id in runs_on_every_node(nodes):
            await open_run(client, run_id)
            log = RedisEventLog(client, run_id)
            state = await current_state(log)
            assert await liveness.abandoned_since(client, state, silence=0.0) is not None
            await client.set(log.keys.holds, "of something else")
            with raises(KeyConflict, key=log.keys.holds, actual="string"):
                await log.acquire_lease(1, "me", 60)
            await client.delete(log.keys.holds)


async def test_one_reducer_serves_the_runs_of_all_nodes(nodes, run_id, tmp_path):
    names = [f"{name}-{run_id}" for name in runs_on_every_node(nodes)]

    async def make_ready(client, name):
        epoch = await open_run(client, name)
        log = RedisEventLog(client, name)
        await publish_steps(AsyncPublisher(log, epoch, new_producer("trainer")), [1])
        [ready, *_] = await announced(log, 1)
        assert isinstance(ready, StepReady)

    async with connect(nodes[2].url) as client, anyio.create_task_group() as tasks:
        serve = partial(reduce_all, nodes[1].url, run_id=None, root=tmp_path)
        tasks.start_soon(serve)
        async with anyio.create_task_group() as trainers:
            for name in names:
                trainers.start_soon(make_ready, client, name)
        tasks.cancel_scope.cancel()


async def test_a_recorded_run_can_be_put_on_a_cluster(nodes, run_id):
    async with connect(nodes[0].url) as client:
        log = RedisEventLog(client, run_id)
        recorded = History()
        recorded.add(started(1))
        entries = [Entry(entry_id, encode(envelope)) for entry_id, envelope in recorded.entries]
        await import_recording(
            client,
            Recording(
                header=Header(run_id=run_id, position=entries[-1].id),
                events=entries,
                announcements=[],
                dead=[DeadLetter(Entry("1-0", b"no event"), "no event")],
            ),
        )
        assert await log.read() == entries
        assert [letter.reason for letter in await log.dead_letters()] == ["no event"]


async def test_the_users_of_the_page_work_on_a_cluster_with_what_it_says_beside(nodes, run_id):
    [beside] = re.findall(r"Users need `(\S+ \S+ \+command)` beside", DOCS.read_text())
    [trainer] = [line for line in rules() if line.startswith("user trainer ")]
    _, name, *words = trainer.split(" ", 2)[0:2] + re.findall(r"\([^)]*\)|\S+", trainer)[2:]
    for node in nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", name, *words, *beside.split())
    url = f"redis://{name}:TRAINER@127.0.0.1:{nodes[0].port}"
    async with connect(url) as client:
        epoch = await open_run(client, run_id)
        with open_client(url) as sync_client:
            publisher = Publisher(SyncEventLog(sync_client, run_id), epoch, new_producer("actor"))
            publisher.publish(started(1))
            await asyncio.to_thread(publisher.close)
        log = RedisEventLog(client, run_id)
        assert len(await log.read()) == 2
    for node in nodes:
        with node.client() as admin:
            assert admin.acl_log() == []


async def test_workers_publish_to_a_cluster(nodes, url, run_id):
    async with connect(url) as client:
        epoch = await open_run(client, run_id)
        log = RedisEventLog(client, run_id)
        with open_client(url) as sync_client:
            publisher = Publisher(SyncEventLog(sync_client, run_id), epoch, new_producer("actor"))
            for step in range(10):
                publisher.publish(started(step))
            await asyncio.to_thread(publisher.close)
            publisher.log.renew_heartbeat("me", 5)
            assert set(await log.heartbeat_ttls(["me", "you"])) == {"me"}
            assert not await asyncio.to_thread(publisher.log.granted, "save", 0.01)
        assert len(await log.read()) == 11


async def test_one_client_waits_for_runs_of_all_nodes_at_once(nodes, run_id):
    heard = []

    async def wait(log):
        with anyio.fail_after(PATIENCE):
            while not (entries := await log.read_blocking({Stream.EVENTS: ORIGIN}, seconds=5)):
                pass
        heard.append(entries[0][1].payload.decode())

    names = [f"{run_id}-{number}" for number in range(30)]
    async with (
        connect(nodes[0].url) as client,
        connect(nodes[1].url) as other,
        anyio.create_task_group() as tasks,
    ):
        for name in names:
            tasks.start_soon(wait, RedisEventLog(client, name))
        for name in names:
            await RedisEventLog(other, name).append(name.encode())
    assert sorted(heard) == sorted(names)


async def test_a_subscription_outlives_a_restart_of_its_node(nodes, run_id):
    [name, *_] = [f"{name}-{run_id}" for name in runs_on_every_node(nodes)]
    options = {"redis_url": nodes[0].url, "start": "beginning", "deadline": PATIENCE}
    options["wait_for_run"] = True
    async with (
        connect(nodes[1].url) as client,
        subscribe(name, SaveStarted, **options) as follower,
        subscribe(name, SaveStarted, group="eval", **options) as member,
    ):
        log = RedisEventLog(client, name)
        publisher = AsyncPublisher(log, 1, new_producer("trainer"))
        for step in (1, 2):
            await publisher.publish(started(step))
            for events in (follower, member):
                event = await anext(aiter(events))
                assert event.event.slot.step == step
                await event.ack()
            if step == 1:
                port = client.get_node_from_key(log.keys.events).port
                [node] = [candidate for candidate in nodes if candidate.port == port]
                node.kill()
                await anyio.to_thread.run_sync(node.start)


async def test_rollouts_are_dispatched_and_answered_on_a_cluster(url, run_id):
    async with connect(url) as client:
        epoch = await open_run(client, run_id)
        publisher = AsyncPublisher(RedisEventLog(client, run_id), epoch, new_producer("trainer"))
        parts = Parts(client, publisher, run_id)
        dispatcher, explorer = await parts.dispatcher(), parts.explorer()
        await dispatcher.dispatch(3, parts.version)
        claims = await explorer.claim(3, seconds=PATIENCE)
        assert await explorer.renew(claims) == claims
        for claim in claims[1:]:
            assert await explorer.answer(claim, samples_of(claim))
        await explorer.fail(claims[0], "by chance")

        async def answer_again():
            [again] = await explorer.claim(1, seconds=PATIENCE)
            assert await explorer.answer(again, samples_of(again))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer_again)
            groups = await dispatcher.take(3, deadline=PATIENCE)
        assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (1, 1), (2, 1)]
        await dispatcher.trained(1, groups)
        assert await client.xlen(RunKeys.of(run_id).experiences) == 0


def test_weights_live_on_a_cluster(nodes, url, run_id):
    with open_client(url) as sync_client:
        store = RedisChunkStore(sync_client)
        parts = [PartRef(run_id, 1, 1, rank) for rank in range(8)]
        for part in parts:
            writer = PartWriter(store, part, chunk_bytes=4)
            writer.add("a", torch.arange(6, dtype=torch.uint8))
            writer.seal()
        at = {
            sync_client.get_node_from_key(f"trinity-weights:{{{run_id}.1.1.{rank}}}").port
            for rank in range(8)
        }
        assert len(at) > 1
        for part in parts:
            source = store.open(part)
            assert source.read([4, 2], lambda *_: None) == [bytes(range(6))]
            store.delete(part)
            assert store.open(part) is None


async def test_checked_clients_of_both_kinds_know_a_cluster(nodes, url):
    with connect_sync(url) as sync_client:
        assert sync_client.get_nodes()
    async with connect(url, retry=False) as client:
        assert client.get_nodes()


async def test_what_a_cluster_has_not_is_said(nodes):
    with raises(InvalidUrl, fault="cluster database", option="3"):
        open_client(f"redis+cluster://127.0.0.1:{nodes[0].port}/3")
    with raises(InvalidUrl, fault="form"):
        open_client("unix+cluster:///socket")


async def test_a_cluster_that_does_not_answer_is_one_sentence():
    url = "redis+cluster://me:secret@127.0.0.1:1,127.0.0.1:2"
    with raises(ServerUnreachable, where=url.replace("secret", "***")):
        open_client(url, patience=0.1)
    with raises(ServerUnreachable, where=url.replace("secret", "***")):
        async with connect(url, patience=0.1):
            pass
