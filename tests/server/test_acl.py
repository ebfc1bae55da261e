"""The users of docs/security.md, taken from its text, on a server that has no other rules."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from functools import partial

import anyio
import pytest
import redis
import torch

from tests.support.acl_rules import DOCS, rules
from tests.support.dashboards import Stream, dashboard, server_runs
from tests.support.errors import raises
from tests.support.event_histories import History, committed, registration, started
from tests.support.pipeline import announced, publish_steps, reducer_task
from tests.support.redis_servers import servers
from tests.support.rollout_parts import LONG, samples_of, settings
from tests.support.waits import PATIENCE, child
from trinity_events import StepReady, subscribe
from trinity_events.archive.export import Recording, import_recording
from trinity_events.archive.format import Header
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.errors import PermissionDenied
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    Entry,
    Publisher,
    RedisEventLog,
    SyncEventLog,
    list_runs,
    new_producer,
    open_run,
)
from trinity_events.log.position import LAST_ID
from trinity_events.log.redis.run_index import renumber_index
from trinity_events.log.redis.scripts import Scripts
from trinity_events.replay import current_state
from trinity_events.rollouts import AnswerGroup, RolloutClient, RolloutDispatcher
from trinity_events.server import connect, connect_sync, open_client
from trinity_events.server.access_rules import access_rules
from trinity_events.weights import PartRef, PartWriter, RedisChunkStore, WeightSyncInfo
from trinity_events.weights.transports.collective.rendezvous import Rendezvous
from trinity_schemas import (
    RUN_INDEX,
    ExplorerStatusChanged,
    RunKeys,
    SaveStarted,
    StepRef,
    chunk_key,
    encode,
    explorer_key,
    payload_key,
)

pytestmark = pytest.mark.server

RUN = "acl-run"
KEYS = RunKeys.of(RUN)


USERS = [line.split()[1] for line in rules() if not line.startswith("user default")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acl")
    users = folder / "users.acl"
    users.write_text("\n".join([*rules(), "user admin on >ADMIN ~* &* +@all", ""]))
    with servers(folder, 1, "--aclfile", str(users)) as [started]:
        yield started


def url_of(server, user):
    return server.url_of(user, user.upper())


def admin(server):
    return connect_sync(url_of(server, "admin"))


@pytest.fixture
def clean(server):
    """The server with nothing on it, and nobody refused anything by the end."""
    with admin(server) as client:
        client.flushall()
        client.execute_command("ACL LOG RESET")
        yield server
        assert client.acl_log() == []


def test_the_page_has_a_user_for_every_role_and_its_table_too():
    assert USERS == ["reducer", "trainer", "explorer", "consumer", "viewer"]
    for user in USERS:
        assert f"\n| `{user}` |" in DOCS.read_text()


async def test_the_whole_pipeline_runs_with_these_users(clean, tmp_path, cli):
    def subscribing(user, **options):
        url = url_of(clean, user)
        return subscribe(
            RUN, StepReady, redis_url=url, start="beginning", deadline=PATIENCE, **options
        )

    async with (
        connect(url_of(clean, "trainer")) as trainers,
        reducer_task(url_of(clean, "reducer"), RUN, tmp_path),
    ):
        epoch = await open_run(trainers, RUN)
        trainer = AsyncPublisher(RedisEventLog(trainers, RUN), epoch, new_producer("trainer"))
        await publish_steps(trainer, [1])
        await trainer.publish(committed(1, "state_dict", registration(expected=0)))
        for user, options in (("viewer", {}), ("consumer", {"group": "eval"})):
            async with subscribing(user, **options) as events:
                for kind in ("weights", "state_dict"):
                    event = await anext(aiter(events))
                    assert (event.step, event.kind) == (1, kind)
                    await event.ack()
        async with connect(url_of(clean, "viewer")) as viewers:
            assert list(await list_runs(viewers)) == [RUN]
            assert (await current_state(RedisEventLog(viewers, RUN))).trainer_step == 1
        env = {"TRINITY_REDIS_URL": url_of(clean, "viewer")}
        exported = ("export", RUN, "--output", str(tmp_path / "run.jsonl"))
        viewing = (
            *(("runs",), ("status", RUN), ("explain", RUN, "1"), ("tail", RUN), ("replay", RUN)),
            *(("verify", RUN, "--checkpoint-root", str(tmp_path)), exported, ("audit", RUN)),
        )
        for command in viewing:
            shown = await anyio.to_thread.run_sync(partial(cli, *command, env=env))
            assert shown.returncode == 0, (command, shown.stdout, shown.stderr)
        metrics = await anyio.to_thread.run_sync(scraped, env)
        assert f'trinity_trainer_step{{run="{RUN}"}} 1.0' in metrics


def scraped(env):
    """What ``trinity-events metrics`` serves with a user's rights, once it has read the log."""
    command = [sys.executable, "-m", "trinity_events", "metrics", RUN, "--port", "0"]
    with child(command, env=os.environ | env, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                metrics = answer.read().decode()
            if "trinity_trainer_step{" in metrics:
                return metrics
            time.sleep(0.05)
        return metrics


async def test_the_dashboard_shows_all_of_a_run_to_the_viewer_and_asks_for_nothing_more(clean):
    plan = Plan(run_id=RUN, ranks=2, explorers=2, steps=3, faults=False)
    async with connect(url_of(clean, "trainer")) as trainers:
        await open_run(trainers, RUN)
    with admin(clean) as client:
        client.delete(KEYS.events)  # the simulated run has its own opening
        for entry in simulated_run(plan):
            client.xadd(KEYS.events, {"e": entry.payload}, id=entry.id)
        client.xgroup_create(KEYS.events, "eval", "0-0")
        client.xreadgroup("eval", "one", {KEYS.events: ">"}, count=2)
    async with (
        connect(url_of(clean, "viewer")) as viewers,
        dashboard(server_runs(viewers)) as at,
        Stream.of(at, RUN) as stream,
    ):
        shown = await stream.until(lambda state: state["progress"] == 1 and state["groups"])
        assert shown["step"] == 3
        assert shown["causes"][0]["reason"] == "no-reducer"
        path = f"/api/runs/{RUN}"
        for name in ("lanes", "overview", "versions", "figures", "dead", "timeline", "events"):
            await at.json(f"{path}/{name}")
        assert (await at.json(f"{path}/explain", step=3))["proof"]
        assert (await at.json(f"{path}/at", number=5, changed=""))["number"] == 5
        assert [run["run"] for run in (await at.json("/api/runs"))["runs"]] == [RUN]


async def test_an_explorer_may_claim_its_rank_and_give_it_up(clean):
    async with (
        connect(url_of(clean, "trainer")) as client,
        connect(url_of(clean, "explorer")) as explorers,
    ):
        epoch = await open_run(client, RUN)
        rank = explorer_key(RUN, epoch, 0)
        assert await explorers.set(rank, "me", nx=True, px=60_000)
        for lease in (60_000, 0):
            assert await Scripts(explorers)("renew", keys=[rank], args=["me", lease])


async def test_rollouts_are_dispatched_and_answered_with_these_rules(clean):
    async with (
        connect(url_of(clean, "trainer")) as client,
        connect(url_of(clean, "explorer")) as explorers,
    ):
        epoch = await open_run(client, RUN)
        trainer = AsyncPublisher(RedisEventLog(client, RUN), epoch, new_producer("trainer"))
        with admin(clean) as foreign:  # An id above every epoch, so that the stream is made anew.
            foreign.xadd(KEYS.rollouts, {"e": b"foreign"}, id="99999999-1")
        for _ in range(2):
            dispatcher = RolloutDispatcher(client, trainer, settings(RUN, epoch, max_attempts=2))
            await dispatcher.start()
        await dispatcher.dispatch(3, StepRef(epoch, 0))
        explorer = RolloutClient(explorers, RUN, epoch, "a", lease=LONG)
        claims = await explorer.claim(3, seconds=PATIENCE)
        assert await explorer.renew(claims) == claims
        for claim in claims[1:]:
            assert await explorer.answer(claim, samples_of(claim))
        await explorer.fail(claims[0], "by chance")
        groups: list[AnswerGroup] = []

        async def answer_again():
            [again] = await explorer.claim(1, seconds=PATIENCE)
            assert again.request.attempt == 2, "a failed request is issued anew"
            assert await explorer.answer(again, samples_of(again))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer_again)
            groups += await dispatcher.take(3, deadline=PATIENCE)
        await dispatcher.trained(1, groups)
        assert dispatcher.ledger.format_sums() == "3 trained, 0 dropped, 0 open"
        assert await client.xlen(KEYS.experiences) == 0, "answers of a trained step are freed"


@pytest.mark.parametrize("user", ["explorer", "consumer", "viewer"])
def test_only_the_trainer_asks_for_rollouts(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.xadd(KEYS.rollouts, {"e": b"forged"})


@pytest.mark.parametrize("user", ["trainer", "consumer", "viewer"])
def test_only_an_explorer_answers_a_request(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.xadd(KEYS.experiences, {"e": b"forged"})


@pytest.mark.parametrize("user", ["explorer", "consumer", "viewer"])
def test_only_the_trainer_frees_answers(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.xdel(KEYS.experiences, "1-0")


def publish(client, role, event):
    publisher = Publisher(SyncEventLog(client, RUN), 1, new_producer(role))
    publisher.publish(event)
    publisher.flush(10)
    publisher.close()


def test_what_ranks_and_explorers_do_is_allowed_to_them(clean):
    with (
        open_client(url_of(clean, "trainer")) as rank,
        open_client(url_of(clean, "explorer")) as explorer,
    ):
        publish(rank, "actor", started(1))
        publish(explorer, "explorer", ExplorerStatusChanged(status="running"))
        log = SyncEventLog(rank, RUN)
        log.renew_heartbeat("incarnation", 5)
        log.clear_heartbeat("incarnation")
        assert not log.granted("save", 0.01)
        part = PartRef(RUN, 1, 1, 0)
        store = RedisChunkStore(rank)
        writer = PartWriter(store, part)
        writer.add("a", torch.ones(3))
        writer.seal()
        source = RedisChunkStore(explorer).open(part)
        store.delete(part)
        [data] = source.read([12], lambda *_: None)
        assert len(data) == 12
        source.close()
        store.begin(part)
        assert rank.get(chunk_key(*part, 0)) is None, "it is freed"
        writer.discard()


async def test_the_reducer_may_put_a_recorded_run_on_the_server(clean):
    history = History()
    history.add(started(1))
    events = [Entry(entry_id, encode(envelope)) for entry_id, envelope in history.entries]
    recording = Recording(
        header=Header(run_id=RUN, position=events[-1].id), events=events, announcements=[], dead=[]
    )
    async with connect(url_of(clean, "reducer")) as client:
        await import_recording(client, recording)
        assert await RedisEventLog(client, RUN).read() == events


@pytest.mark.parametrize("user", ["trainer", "explorer", "consumer"])
async def test_a_reader_of_a_checkpoint_may_hold_it(clean, user):
    async with connect(url_of(clean, user)) as client:
        log = RedisEventLog(client, RUN)
        assert await log.acquire_lease(1, "me", 60)
        await log.release_lease(1, "me")


@pytest.mark.parametrize("user", ["trainer", "explorer", "consumer"])
def test_a_reader_of_a_checkpoint_may_not_write_the_marks_of_deletion(server, user):
    # A sorted set in the place of the reducer's set would end each of its deletions.
    with connect_sync(url_of(server, user)) as client, refused():
        client.zadd(KEYS.doomed, {"1": 1})


async def test_a_group_outlives_its_members_with_these_rules(clean):
    options = {"group": "eval", "start": "beginning", "claim_after": 0.02, "max_deliveries": 2}
    async with connect(url_of(clean, "trainer")) as trainers:
        epoch = await open_run(trainers, RUN)
        trainer = AsyncPublisher(RedisEventLog(trainers, RUN), epoch, new_producer("trainer"))
        await trainer.publish(started(13))
        for step in (13, 13, 14):
            url = url_of(clean, "consumer")
            async with subscribe(
                RUN, SaveStarted, redis_url=url, deadline=PATIENCE, **options
            ) as events:
                assert (await anext(aiter(events))).event.slot.step == step
            await trainer.publish(started(14))
            await anyio.sleep(0.05)
        [letter] = await RedisEventLog(trainers, RUN).dead_letters()
    assert letter.reason == "group eval: delivered 2 times and never acknowledged"


@pytest.mark.parametrize(("user", "stream"), [("trainer", "events"), ("explorer", "reports")])
async def test_the_reducer_may_mend_a_log_to_which_a_writer_gave_the_largest_id(
    clean, user, stream
):
    with admin(clean) as client:
        client.xgroup_create(KEYS.events, "group", mkstream=True)
    async with (
        connect(url_of(clean, "trainer")) as trainers,
        connect(url_of(clean, user)) as writers,
    ):
        epoch = await open_run(trainers, RUN)
        payload = encode(History().entries[0][1])
        await writers.xadd(getattr(KEYS, stream), {"e": payload}, id=LAST_ID)
        trainer = AsyncPublisher(RedisEventLog(trainers, RUN), epoch, new_producer("trainer"))
        async with reducer_task(url_of(clean, "reducer"), RUN):
            await publish_steps(trainer, [1])
            await announced(RedisEventLog(trainers, RUN), 1)
        await trainers.xadd(RUN_INDEX, {"run": RUN}, id=LAST_ID)
    async with connect(url_of(clean, "reducer")) as reducers:
        await renumber_index(reducers)
        assert list(await list_runs(reducers)) == [RUN]


def test_no_rule_lets_a_user_append_by_a_script_alone(server):
    # Else ids could not be chosen: docs/security.md says why they can.
    with admin(server) as client:
        client.execute_command(
            *("ACL", "SETUSER", "scripted", "on", ">SCRIPTED", "resetkeys", f"~{KEYS.events}"),
            *("-@all", "+evalsha"),
        )
        digest = client.script_load("return redis.call('XADD', KEYS[1], '*', 'e', ARGV[1])")
        with pytest.raises(
            redis.ResponseError, match=r"ACL|NOPERM|permissions|can't run this command"
        ):
            redis.Redis(port=server.port, username="scripted", password="SCRIPTED").evalsha(
                digest, 1, KEYS.events, b"x"
            )
        client.execute_command("ACL", "DELUSER", "scripted")


# --- what is refused -------------------------------------------------------------------------

OTHERS = [user for user in USERS if user != "reducer"]
ANNOUNCE = "return redis.call('XADD', KEYS[1], '*', 'e', 'forged')"
TAMPERING = {
    "announcing": ("XADD", KEYS.announcements, "*", "e", "forged"),
    "announcing by a script": ("EVAL", ANNOUNCE, "1", KEYS.announcements),
    "trimming the announcements": ("XTRIM", KEYS.announcements, "MAXLEN", "0"),
    "deleting the announcements": ("DEL", KEYS.announcements),
    "moving the intake of reports": ("SET", KEYS.reported, "0-0"),
    "trimming the reports": ("XTRIM", KEYS.reports, "MAXLEN", "0"),
    "trimming the events": ("XTRIM", KEYS.events, "MAXLEN", "0"),
    "deleting an event": ("XDEL", KEYS.events, "1-0"),
    "moving the reducer": ("SET", KEYS.position, "0-0"),
    "forging its state": ("SET", KEYS.snapshot, "forged"),
    "forging what stands": ("HSET", KEYS.current, "step-ready/weights", "1-0 forged"),
    "taking the lead": ("INCR", KEYS.fence),
    "renaming": ("RENAME", KEYS.events, KEYS.announcements),
    "flushing": ("FLUSHALL",),
    "ending connections": ("CLIENT", "KILL", "TYPE", "normal"),
    "hearing of all keys": ("CLIENT", "TRACKING", "ON", "BCAST"),
    "listing all keys": ("SCAN", "0"),
    "making users": ("ACL", "SETUSER", "me", "on"),
    "configuring": ("CONFIG", "SET", "maxmemory", "1"),
}


@pytest.mark.parametrize("user", OTHERS)
@pytest.mark.parametrize("deed", TAMPERING)
def test_only_the_reducer_decides_what_a_run_is(server, user, deed):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*TAMPERING[deed])


@pytest.mark.parametrize("user", OTHERS)
def test_nobody_else_announces_by_the_digest_of_a_script_either(server, user):
    with admin(server) as client:
        digest = client.script_load(ANNOUNCE)
        before = client.xlen(KEYS.announcements)
        with open_client(url_of(server, user)) as other, pytest.raises(redis.ResponseError):
            other.evalsha(digest, 1, KEYS.announcements)
        assert client.xlen(KEYS.announcements) == before


def test_the_reducer_announces(clean):
    with open_client(url_of(clean, "reducer")) as client:
        assert client.execute_command(*TAMPERING["announcing"])


@pytest.mark.parametrize("user", ["explorer", "consumer", "viewer"])
def test_only_trainer_and_reducer_append_events(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        SyncEventLog(client, RUN).append(b"forged")


@pytest.mark.parametrize("user", ["trainer", "consumer", "viewer"])
def test_only_an_explorer_reports(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        SyncEventLog(client, RUN).append_reports([b"forged"])


@pytest.mark.parametrize("key", ["events", "snapshot", "dead", "reports", "folder", "identity"])
def test_an_explorer_reads_what_was_announced_alone(server, key):
    with (
        open_client(url_of(server, "explorer")) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.exists(getattr(KEYS, key))


def test_the_page_has_the_lines_that_the_command_prints(cli):
    assert cli("acl").stdout.splitlines() == rules() == access_rules()
    printed = cli("acl", "grpo-7b").stdout
    assert "~trinity:{grpo-7b}:reports" in printed and "{*}" not in printed
    assert cli("acl", "grpo-7b:x").returncode == 1


def test_rules_of_two_servers_name_the_keys_of_each(cli):
    of_log, of_weights = (cli("acl", "--server", name).stdout for name in ("log", "weights"))
    assert "trinity-weights" not in of_log
    assert "trinity:" not in of_weights.replace("trinity-weights:", "")
    assert "user explorer on >EXPLORER -@all +@read" in of_weights


@pytest.mark.parametrize("user", ["explorer", "consumer", "viewer"])
def test_only_the_trainer_writes_weights(server, user):
    with (
        open_client(url_of(server, user)) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        RedisChunkStore(client).begin(PartRef(RUN, 1, 1, 0)).seal(b"forged")


# --- how it is said --------------------------------------------------------------------------


async def test_what_is_refused_is_said_with_its_command_and_the_way_out(server):
    refusal = {"fault": "command", "reason": re.compile("'xadd'")}
    with raises(PermissionDenied, where=re.compile(r"viewer:\*\*\*@"), **refusal):
        async with connect(url_of(server, "viewer")) as client:
            await client.xadd(KEYS.events, {"e": "forged"})
    with (
        raises(PermissionDenied, **refusal),
        connect_sync(url_of(server, "viewer")) as sync_client,
    ):
        sync_client.xadd(KEYS.events, {"e": "forged"})


async def test_a_script_that_is_refused_is_said_too(server):
    with admin(server) as client:
        client.script_load(ANNOUNCE)
    with raises(PermissionDenied, fault="command"):
        async with connect(url_of(server, "consumer")) as client:
            await client.register_script(ANNOUNCE)(keys=[KEYS.announcements])


async def test_a_viewer_that_joins_a_group_is_told_at_once(server):
    url = url_of(server, "viewer")
    options = {"redis_url": url, "group": "eval", "deadline": PATIENCE, "wait_for_run": True}
    async with subscribe(RUN, StepReady, **options) as events:
        with raises(PermissionDenied, fault="command"):
            await anext(aiter(events))


@pytest.mark.parametrize("who", ["", "viewer:WRONG@", "nobody:VIEWER@"])
async def test_a_user_that_is_not_known_is_told_at_once_and_without_the_password(server, who):
    url = f"redis://{who}127.0.0.1:{server.port}"
    with raises(PermissionDenied, fault="user") as caught:
        async with connect(url):
            pass
    assert "WRONG" not in str(caught.value)
    with raises(PermissionDenied, fault="user"):
        open_client(url)


def refused():
    return pytest.raises(redis.exceptions.NoPermissionError)


def test_the_trainer_says_where_a_collective_group_meets_and_explorers_find_it(server):
    info = WeightSyncInfo(run_id=RUN, epoch=1, address="10.0.0.1", port=5, token="secret")
    with connect_sync(url_of(server, "trainer")) as client:
        Rendezvous(client, RUN).announce(info)
    with connect_sync(url_of(server, "explorer")) as client:
        place = Rendezvous(client, RUN)
        assert place.find(ORIGIN, 1)[1] == info
        with refused():
            place.announce(info)
    with connect_sync(url_of(server, "viewer")) as client, refused():
        Rendezvous(client, RUN).find(ORIGIN, 1)
    with connect_sync(url_of(server, "trainer")) as client:
        Rendezvous(client, RUN).withdraw(info)


def test_an_explorer_writes_payloads_and_the_trainer_alone_deletes_them(server):
    key, chunk = payload_key(RUN, "0" * 32), chunk_key(RUN, 1, 1, 0, 0)
    with (
        open_client(url_of(server, "explorer")) as explorer,
        open_client(url_of(server, "trainer")) as trainer,
    ):
        assert explorer.set(key, b"tokens", px=60_000)
        for refused in (
            lambda: explorer.unlink(key),
            lambda: explorer.pexpire(key, 1),
            lambda: explorer.set(chunk, b"forged"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                refused()
        assert trainer.getrange(key, 0, 5) == b"tokens"
        assert trainer.pexpire(key, 1000)
        assert trainer.unlink(key) == 1
