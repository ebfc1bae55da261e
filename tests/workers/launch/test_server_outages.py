"""The processes of a run while their server is away, and a reducer that ends."""

import re
import sys
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from tests.support.errors import assert_attributes, raises
from trinity_events.system.error_text import first_error
from trinity_workers.launch.processes import RestartLimits

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.event_histories import committed
from tests.support.pipeline import accept_reports, events_of, reducer_task, reports_accepted, until
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events import Synchronizer
from trinity_events.cli.tail import _tail, _TailOptions
from trinity_events.errors import DeadlineExceeded, RunNotFound
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.reducer.report_intake import ReportIntake
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.system.shared_memory import available
from trinity_schemas import (
    ExplorerExcluded,
    ExplorerStatusChanged,
    StepCommitted,
    decode_envelope,
    explorer_key,
)
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import RunConfig, TrainConfig
from trinity_workers.explorer.run_follower import followed_run
from trinity_workers.launch import launcher, lifecycle, ranks
from trinity_workers.launch.epochs import EpochFollower, EpochNotAnnounced
from trinity_workers.launch.processes import ReducerFailed, ReducerProcess
from trinity_workers.launch.progress import ProgressView
from trinity_workers.launch.ranks import RankLost, claimed_rank

pytestmark = pytest.mark.server

RUN = "run"
AWAY = 0.3
"""Seconds of an outage. More than the client's own patience, of which these have none."""
LONG_AWAY = 2.0
"""Seconds of an outage that is longer than the patience of clients with retries."""


@pytest.fixture
def server(tmp_path):
    with servers(tmp_path, 1) as [redis_server]:
        yield redis_server


@pytest.fixture
async def client(server):
    async with connect(server.url, retry=False) as connected:
        yield connected


@pytest.fixture
async def log(client):
    await open_run(client, RUN)
    return RedisEventLog(client, RUN)


@pytest.fixture
def publisher(log):
    return AsyncPublisher(log, 1, new_producer("trainer"))


@pytest.fixture
def config(server, tmp_path):
    return RunConfig(
        run_id=RUN,
        epoch=1,
        redis_url=server.url,
        weights_url=server.url,
        checkpoint_folder=tmp_path,
        model_folder=tmp_path,
        steps=1,
        sync=SyncConfig(transport="redis", timeout=PATIENCE),
    )


async def outage(server, seconds=AWAY):
    """Away from now on, for so long."""
    server.kill()
    await anyio.sleep(seconds)
    await anyio.to_thread.run_sync(server.start)


@asynccontextmanager
async def beside(*work):
    async with anyio.create_task_group() as tasks:
        for function in work:
            tasks.start_soon(function)
        yield
        tasks.cancel_scope.cancel()


@contextmanager
def raising(kind, **attributes):
    with pytest.RaisesGroup(kind, flatten_subgroups=True) as caught:
        yield
    assert_attributes(first_error(caught.value), **attributes)


async def test_a_run_tells_why_it_failed_whatever_that_is_made_of(client, config, log):
    with pytest.raises(RuntimeError, match="is not there"):
        async with lifecycle.closing(client, config):
            raise RuntimeError("/ckpt/\udcff is not there")  # as names come that are no text
    [*_, closed] = [decode_envelope(entry.payload).event for entry in await log.read()]
    assert closed.error == r"RuntimeError: /ckpt/\udcff is not there"


@pytest.mark.skipif(not available(), reason="the host has no shared memory as files")
async def test_weights_in_shared_memory_are_published_while_the_server_is_away(server, log):
    trainer = Synchronizer(RUN, 1, redis_url=server.url, transport="shm")
    model = pytest.importorskip("torch").nn.Linear(4, 4)
    with closing(trainer):
        for step in (1, 2, 3):
            if step == 2:
                server.kill()
            trainer.open_version(step)
            trainer.publish(model.state_dict(), step)
            trainer.commit(step)
        await anyio.to_thread.run_sync(server.start)
        await anyio.to_thread.run_sync(trainer.flush)
    # The kill may take the reply of what was written: that is sent again, under its number.
    envelopes = [decode_envelope(entry.payload) for entry in await log.read()]
    once = {
        (envelope.producer.incarnation, envelope.sequence): envelope.event for envelope in envelopes
    }
    assert [event.step for event in once.values() if isinstance(event, StepCommitted)] == [1, 2, 3]


# --- the view ---------------------------------------------------------------------------------


@pytest.mark.processes
async def test_an_outage_of_the_server_does_not_end_the_training(server, log, publisher, capsys):
    async with launcher._show_run(ProgressView(RUN, 10), log):
        await anyio.sleep(0.1)
        await outage(server)
        await publisher.publish(committed(1))
        shown = ""

        def is_shown():
            nonlocal shown
            shown += capsys.readouterr().err
            return "step 1/10" in shown

        await until(is_shown)


async def test_a_log_is_followed_on_through_an_outage(server, log, publisher, capsys):
    options = _TailOptions(lines=5, follow=True, form="json")
    async with beside(partial(_tail, server.url, RUN, Path(), options)):
        output = ""
        for step in (1, 2):
            await publisher.publish(StepCommitted(step=step, kind="weights"))
            with anyio.fail_after(PATIENCE):
                while f'"step": {step}' not in output:
                    output += capsys.readouterr().out
                    await anyio.sleep(0.05)
            await outage(server, LONG_AWAY)


@pytest.mark.processes
async def test_a_view_that_fails_does_not_end_the_training(log, publisher, monkeypatch, caplog):
    view = ProgressView(RUN, 10)
    monkeypatch.setattr(view, "_show", lambda *_: 1 / 0)
    async with launcher._show_run(view, log):
        await until(lambda: "is not shown any more: division by zero" in caplog.text)
        await anyio.sleep(0)
        await publisher.publish(committed(1))


# --- epochs ---------------------------------------------------------------------------------


@asynccontextmanager
async def followed_epochs(server, log):
    """Epochs of the run, as a stand-alone explorer follows them, beside a reducer."""
    async with reducer_task(server.url, log.run_id), followed_run(RUN, server.url) as run:
        epochs = EpochFollower(run)
        async with epochs.listening():
            yield epochs


async def test_an_explorer_hears_of_an_opening_after_an_outage(server, client, log):
    async with followed_epochs(server, log) as epochs:
        assert (await epochs.opened(PATIENCE)).epoch == 1
        await outage(server, LONG_AWAY)
        await open_run(client, RUN)
        await until(lambda: epochs._newest.epoch == 2)


async def test_openings_that_cannot_be_read_at_first_are_read_later(server, log):
    async with followed_epochs(server, log) as epochs, beside(partial(outage, server, LONG_AWAY)):
        assert (await epochs.opened(PATIENCE)).epoch == 1


async def test_a_server_that_stays_away_is_named_as_the_cause_that_no_run_was_found(server):
    async with followed_run("never-opened", server.url) as run:
        epochs = EpochFollower(run)
        async with epochs.listening():
            server.kill()
            await until(run.fault)
            with raises(
                RunNotFound, fault="not opened", deadline=0.3, way_out=re.compile(r"answer \(E")
            ):
                await epochs.opened(0.3)


@pytest.mark.usefixtures("log")
async def test_a_run_of_an_older_trainer_is_refused_by_its_epoch(server):
    async with followed_run(RUN, server.url) as run:  # no reducer announces its opening
        epochs = EpochFollower(run)
        async with epochs.listening():
            with pytest.raises(EpochNotAnnounced) as refusal:
                await epochs.opened(0.1)
    assert (refusal.value.run_id, refusal.value.epoch) == (RUN, 1)


# --- ranks ------------------------------------------------------------------------------------


SHORT_LEASE = 0.2


async def test_each_of_any_number_of_explorers_has_the_lowest_free_rank(client, config):
    async with AsyncExitStack() as exits:
        for expected in range(2 * config.explorer.count + 3):
            rank = await exits.enter_async_context(claimed_rank(client, config, None))
            assert rank == expected
    # Those that ended gave theirs up.
    async with claimed_rank(client, config, None) as rank:
        assert rank == 0


async def test_the_rank_of_an_explorer_that_died_is_free_once_its_lease_ends(client, config):
    dead = explorer_key(RUN, 1, 0)
    await client.set(dead, "dead", px=600_000)
    async with claimed_rank(client, config, None) as rank:
        assert rank == 1, "its lease has just been renewed"
    # It has missed renewals: who is started in its place waits for its rank.
    await client.pexpire(dead, int(ranks.LEASE * 100))
    async with claimed_rank(client, config, None) as rank:
        assert rank == 0


async def test_a_given_rank_is_taken_although_it_is_held_and_is_held_then(client, config):
    given = config.explorer.count + 7
    key = explorer_key(RUN, 1, given)
    await client.set(key, "dead", px=600_000)
    async with claimed_rank(client, config, given) as rank:
        assert rank == given
        assert await client.get(key) != b"dead"
        assert await client.pttl(key) <= ranks.LEASE * 1000
    assert not await client.exists(key)


async def test_a_rank_is_kept_through_an_outage_that_is_longer_than_its_lease(
    server, client, config
):
    async with claimed_rank(client, config, None, SHORT_LEASE) as rank:
        assert rank == 0
        await outage(server)
        await until(lambda: client.exists(explorer_key(RUN, 1, 0)))
        await anyio.sleep(0.2)


async def test_a_rank_that_another_has_after_an_outage_is_lost(server, client, config):
    with raising(RankLost, run_id=RUN, rank=0):
        async with claimed_rank(client, config, None, SHORT_LEASE):
            await client.set(explorer_key(RUN, 1, 0), "another")
            await outage(server)
            await anyio.sleep(10)


async def test_a_rank_is_claimed_when_the_server_is_back(server, client, config):
    server.kill()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outage, server)
        async with claimed_rank(client, config, None) as rank:
            assert rank == 0


async def test_a_server_that_stays_away_from_ranks_is_named_and_leaving_it_is_no_error(
    server, client, config
):
    config = config.replaced("sync", timeout=0.2)
    with raising(
        DeadlineExceeded, missing=f"explorer rank 0 of run {RUN} was not held", deadline=0.2
    ):
        async with claimed_rank(client, config, None):
            server.kill()
            await anyio.sleep(10)


@pytest.mark.processes
def test_the_command_that_replays_a_run_can_be_typed_as_it_is(tmp_path, monkeypatch):
    home = tmp_path / "my home"
    monkeypatch.setenv("TRINITY_HOME", str(home))
    given = launcher.LaunchOptions(
        run_id=RUN,
        alone=True,
        settings=TrainConfig(),
        redis_url=None,
        weights_redis_url=None,
        checkpoint_root=home / "checkpoints",
    )
    assert launcher._replay_command(given) == f"TRINITY_HOME='{home}' trinity-events replay {RUN}"
    url = "rediss://me:secret@host?ssl_ca_certs=a&ssl_check_hostname=false"
    there = structs.replace(given, redis_url=url, checkpoint_root=tmp_path)
    shown = launcher._replay_command(there)
    assert shown.endswith(f"hostname=false' --checkpoint-root {tmp_path}")
    assert "'rediss://me:***@host?" in shown


# --- the end of a run -------------------------------------------------------------------------


async def test_a_run_ends_once_the_last_reports_of_its_explorers_are_accepted(
    client, log, config, monkeypatch
):
    accept = ReportIntake.run

    async def accept_late(intake):
        await until(partial(is_closed, log))
        await anyio.sleep(0.2)
        await accept(intake)

    monkeypatch.setattr(ReportIntake, "run", accept_late)
    explorer = AsyncPublisher(log, 1, new_producer("explorer"))
    async with reducer_task(config.redis_url, RUN), lifecycle.closing(client, config):
        await explorer.publish(ExplorerStatusChanged(status="stopped"))
    assert [envelope.event.status for envelope in await events_of(log, ExplorerStatusChanged)] == [
        "stopped"
    ]


async def is_closed(log):
    return (await current_state(log)).closed is not None


@pytest.mark.processes
async def test_the_last_weights_are_waited_for_through_an_outage(
    server, log, client, config, publisher, capsys
):
    explorer = AsyncPublisher(log, 1, new_producer("explorer"))
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await accept_reports(log)
    async with claimed_rank(client, config, 0), anyio.create_task_group() as tasks:
        view = ProgressView(RUN, 1)
        tasks.start_soon(launcher._last_weights_taken, client, config, view)
        await anyio.sleep(0.1)
        await outage(server)
        await explorer.publish(ExplorerStatusChanged(status="stopped"))
        await accept_reports(log)
    assert "did not take" not in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.processes
async def test_an_outage_does_not_count_against_the_wait_for_the_last_weights(
    server, log, client, config, publisher, monkeypatch
):
    lines = []
    view = ProgressView(RUN, 1)
    monkeypatch.setattr(view, "print_line", lines.append)
    explorer = AsyncPublisher(log, 1, new_producer("explorer"))
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await accept_reports(log)
    config = config.replaced("sync", timeout=5.0)
    async with claimed_rank(client, config, 0), anyio.create_task_group() as tasks:
        began = anyio.current_time()
        tasks.start_soon(launcher._last_weights_taken, client, config, view)
        server.kill()
        await anyio.sleep(2)  # the outage
        await anyio.to_thread.run_sync(server.start)
        await until(lambda: lines)
        assert anyio.current_time() - began >= 2 + 5
    assert lines[0].startswith("explorer-0 did not take the last weights within 5 s")


@pytest.mark.processes
async def test_a_dead_explorer_is_not_waited_for_and_a_live_one_is(
    client, log, config, publisher, monkeypatch
):
    lines = []
    view = ProgressView(RUN, 1)
    monkeypatch.setattr(view, "print_line", lines.append)
    config = config.replaced("explorer", count=2)
    dead, alive = (AsyncPublisher(log, 1, new_producer("explorer", rank)) for rank in (0, 1))
    async with (
        reducer_task(config.redis_url, RUN),
        claimed_rank(client, config, 1),
        anyio.create_task_group() as tasks,
    ):
        with anyio.fail_after(PATIENCE):
            await dead.publish(ExplorerStatusChanged(status="running"))
            await reports_accepted(log)
            patient = config.replaced("sync", timeout=2 * PATIENCE)
            await launcher._last_weights_taken(client, patient, view, gone_after=0.2)
            assert not lines
        await alive.publish(ExplorerStatusChanged(status="running"))
        await reports_accepted(log)
        wait = partial(launcher._last_weights_taken, gone_after=0.2)
        tasks.start_soon(wait, client, config.replaced("sync", timeout=3.0), view)
    [line] = lines
    assert line.startswith("explorer-1 did not take the last weights within 3 s")


@pytest.mark.processes
async def test_an_excluded_explorer_is_a_line_of_the_terminal(log, publisher, monkeypatch):
    lines = []
    view = ProgressView(RUN, 1)
    monkeypatch.setattr(view, "print_line", lambda line, style="": lines.append(line))
    excluded = ExplorerExcluded(explorer="explorer-1", malformed=3, reason="its reward is inf")
    await publisher.publish(excluded)
    async with launcher._show_run(view, log):
        await until(lambda: lines)
    [line] = lines
    assert line.startswith("explorer-1 is excluded")


@pytest.mark.processes
async def test_what_is_in_the_log_when_a_run_fails_is_still_shown(log, publisher, monkeypatch):
    lines = []
    view = ProgressView(RUN, 1)
    monkeypatch.setattr(view, "print_line", lambda line, style="": lines.append(line))

    async def fail():
        async with launcher._show_run(view, log):
            excluded = ExplorerExcluded(explorer="explorer-1", malformed=3, reason="it is inf")
            await publisher.publish(excluded)
            raise OSError

    with pytest.raises(BaseExceptionGroup):
        await fail()
    [line] = lines
    assert line.startswith("explorer-1 is excluded")


@pytest.mark.processes
async def test_a_server_that_stays_away_is_named_where_the_last_weights_were_not_seen(
    server, client, config, monkeypatch
):
    lines = []
    view = ProgressView(RUN, 1)
    monkeypatch.setattr(view, "print_line", lines.append)
    server.kill()
    await launcher._last_weights_taken(client, config.replaced("sync", timeout=0.2), view)
    [line] = lines
    assert "were not seen to take the last weights within 0.2 s: the server does not" in line


async def test_the_end_of_a_run_is_waited_for_through_an_outage(server, client, log, config):
    async with anyio.create_task_group() as tasks:

        async def fold_after_an_outage():
            await until(lambda: _is_closed(log))
            await outage(server)
            await client.set(log.keys.position, await log.last_id())

        tasks.start_soon(fold_after_an_outage)
        async with lifecycle.closing(client, config):
            pass


async def _is_closed(log):
    return len(await log.read()) == 2


# --- the reducer ------------------------------------------------------------------------------


@pytest.fixture
def reducer(server, tmp_path):
    limits = RestartLimits(first_pause=0.01)
    return ReducerProcess(server.url, RUN, tmp_path, restart_limits=limits)


def ends_at_once(reducer):
    reducer._command = [sys.executable, "-c", "raise SystemExit(3)"]


def pauses(caplog):
    return [
        float(message.split()[-2]) for message in caplog.messages if "started again in" in message
    ]


@pytest.mark.processes
async def test_the_password_of_its_server_is_in_no_list_of_processes(server, client, log, tmp_path):
    await client.execute_command("ACL SETUSER demo on >in-secret ~* &* +@all")
    url = server.url.replace("//", "//demo:in-secret@")
    async with ReducerProcess(url, RUN, tmp_path).running():
        await until(lambda: client.exists(log.keys.leader))
        for listed in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                assert b"in-secret" not in listed.read_bytes()


@pytest.mark.processes
async def test_a_reducer_that_does_not_come_to_work_is_given_up_after_growing_pauses(
    reducer, caplog
):
    ends_at_once(reducer)
    with raising(ReducerFailed, times=6, status=3, log=re.compile("reducer.log$")):
        async with reducer.running():
            await anyio.sleep(20)
    assert pauses(caplog) == [0.01, 0.02, 0.04, 0.08, 0.16]
    assert reducer.restarts == 5


@pytest.mark.processes
async def test_what_a_reducer_did_before_it_worked_is_forgotten(server, tmp_path, caplog):
    limits = RestartLimits(first_pause=0.01, settled_after=0.0)
    reducer = ReducerProcess(server.url, RUN, tmp_path, restart_limits=limits)
    ends_at_once(reducer)
    async with reducer.running():
        await until(lambda: reducer.restarts > 2 * limits.most)
    assert set(pauses(caplog)) == {0.01}


@pytest.mark.processes
async def test_a_reducer_that_is_started_while_the_server_is_away_works_when_it_is_back(
    server, client, log, reducer
):
    server.kill()
    async with reducer.running():
        await until(lambda: reducer.restarts)
        await anyio.to_thread.run_sync(server.start)
        await until(lambda: client.exists(log.keys.leader))
