"""An explorer's lease: one whose host is off, or cut off, is lost in the log."""

import io
from contextlib import closing
from dataclasses import dataclass

import anyio
import anyio.to_thread
import pytest
from msgspec import structs
from rich.console import Console

from tests.support.event_histories import History
from tests.support.faulty_proxy import Proxy
from tests.support.pipeline import events_of, reducer_task, until
from tests.support.waits import PATIENCE
from trinity_events.analysis.causes import HostProcess, LiveFacts, find_causes
from trinity_events.core import expired, lease_holders
from trinity_events.core.limits import KEPT_EXPLORERS, SHORTEST_EXPLORER_LEASE
from trinity_events.dashboard.state_view import build_view
from trinity_events.log import (
    Publisher,
    RedisEventLog,
    SyncEventLog,
    new_producer,
    renewing_explorer_lease,
)
from trinity_events.replay import current_state
from trinity_events.server import connect, open_client
from trinity_events.views.panels import explorers_panel
from trinity_events.views.status import status_panel
from trinity_schemas import (
    ExplorerStatusChanged,
    LeaseExpired,
    RunClosed,
    SyncRequested,
    TrainerStatusChanged,
)

LEASE = SHORTEST_EXPLORER_LEASE
SERVING = ExplorerStatusChanged(status="running", endpoint="http://here")
RUNNING = ExplorerStatusChanged(status="running", lease=15.0)
REQUEST = SyncRequested()


@pytest.fixture
def history():
    built = History()
    built.add(RUNNING, by="explorer", rank=1)
    built.add(RUNNING, by="explorer", rank=2)
    return built


def lose(history, *ranks):
    """Let the leases of some explorers expire."""
    state = history.fold()[0].state
    silent = {state.explorers[f"explorer-{rank}"].lease.holder.incarnation for rank in ranks}
    for event in expired(state, silent):
        history.add(event, by="reducer")


def statuses(history):
    return [explorer.shown_status for explorer in history.fold()[0].state.explorers.values()]


@pytest.mark.parametrize("event", [RUNNING, REQUEST], ids=["its return", "any event"])
def test_an_explorer_without_a_heartbeat_is_lost_until_it_is_heard_again(history, event):
    lose(history, 1)
    state = history.fold()[0].state
    assert statuses(history) == ["lost", "running"]
    [holder] = lease_holders(state).values()
    assert holder.producer.rank == 2, "a lease expires once"
    history.add(event, by="explorer", rank=1)
    assert set(statuses(history)) == {"running"}
    assert len(lease_holders(history.fold()[0].state)) == 2


def test_a_status_of_the_same_process_leaves_its_lease_and_one_of_another_ends_it(history):
    status = ExplorerStatusChanged(status="require_sync")
    history.add(status, by="explorer", rank=1)
    assert len(lease_holders(history.fold()[0].state)) == 2
    entry_id, envelope = history.entries[-1]
    restarted = structs.replace(envelope.producer, incarnation="explorer-1-restarted")
    history.entries.append((f"2{entry_id}", structs.replace(envelope, producer=restarted)))
    [holder] = lease_holders(history.fold()[0].state).values()
    assert holder.producer.rank == 2


def test_an_explorer_that_stopped_has_no_lease(history):
    history.add(ExplorerStatusChanged(status="stopped"), by="explorer", rank=1)
    [holder] = lease_holders(history.fold()[0].state).values()
    assert holder.producer.rank == 2


def test_a_closed_run_waits_for_no_lease_of_an_explorer(history):
    history.add(RunClosed(reason="finished"))
    assert not lease_holders(history.fold()[0].state)


def test_the_expiry_of_an_earlier_process_leaves_the_explorer_as_it_is(history):
    holder = history.fold()[0].state.explorers["explorer-1"].lease.holder
    earlier = structs.replace(holder, incarnation="explorer-1-earlier")
    history.add(LeaseExpired(holder=earlier, lease=15.0), by="reducer")
    assert statuses(history) == ["running", "running"]


def test_an_explorer_cannot_end_the_trainers_lease_by_its_own(history):
    history.add(TrainerStatusChanged(status="running", lease=15.0), by="trainer")
    trainer = history.fold()[0].state.trainer_lease.holder
    forged = structs.replace(trainer, role="explorer")
    history.add(LeaseExpired(holder=forged, lease=15.0), by="reducer")
    assert history.fold()[0].state.trainer_status == "running"


def test_a_lease_that_is_too_short_is_lengthened(history):
    history.add(ExplorerStatusChanged(status="running", lease=0.001), by="explorer", rank=3)
    state = history.fold()[0].state
    assert state.explorers["explorer-3"].lease.lease == SHORTEST_EXPLORER_LEASE


def test_no_more_leases_are_watched_than_explorers_are_known():
    history = History()
    for rank in range(KEPT_EXPLORERS + 10):
        history.add(RUNNING, by="explorer", rank=rank)
    assert len(lease_holders(history.fold()[0].state)) == KEPT_EXPLORERS


def test_lost_explorers_of_a_host_are_one_cause_and_the_first_where_none_runs(history):
    history.add(TrainerStatusChanged(status="running", lease=15.0), by="trainer")
    lose(history, 1)
    facts = LiveFacts(now=0, is_led=True)
    [cause] = find_causes(history.fold()[0].state, facts)
    assert (cause.reason, cause.process) == ("silent", "explorer-1")
    lose(history, 2)
    [cause] = find_causes(history.fold()[0].state, facts)
    assert "explorer-1, explorer-2 on here" in cause.sentence
    # What is seen of a process of this host says more.
    ended = {f"explorer-{rank}": HostProcess(pid=7, condition="ended") for rank in (1, 2)}
    causes = find_causes(history.fold()[0].state, structs.replace(facts, processes=ended))
    assert {cause.reason for cause in causes} == {"ended"}


def test_views_show_a_lost_explorer_with_the_time_since_it_was_heard(history):
    lose(history, 1)
    state = history.fold()[0].state
    expired_at = state.explorers["explorer-1"].lease.silent_at
    assert state.explorers["explorer-1"].last_heard_at == max(
        state.explorers["explorer-1"].heard_at, expired_at - 15_000
    )
    now = state.explorers["explorer-1"].last_heard_at + 41_000
    for panel in (status_panel(state, LiveFacts(now=now)), explorers_panel(state, now)):
        console = Console(width=160, file=io.StringIO())
        console.print(panel)
        [line] = [line for line in console.file.getvalue().splitlines() if "explorer-1" in line]
        assert "lost" in line
        assert "41" in line
    [row, _] = build_view(state, now, {})["explorers"]
    assert row[:2] == ["explorer-1", "lost"]


@dataclass
class Cut:
    """An explorer behind a link that can be cut."""

    link: Proxy
    publisher: Publisher


@pytest.fixture
def explorer(redis_url, run_id, publisher):
    with Proxy(redis_url) as link, open_client(link.url) as client:
        log = SyncEventLog(client, run_id)
        with closing(Publisher(log, publisher.epoch, new_producer("explorer", 1))) as reports:
            yield Cut(link, reports)


@pytest.mark.server
async def test_an_explorer_that_is_cut_off_is_lost_and_runs_again_once_it_is_back(
    redis_url, run_id, explorer
):
    async with connect(redis_url) as client, reducer_task(redis_url, run_id):
        log = RedisEventLog(client, run_id)

        async def is_explorer(status: str) -> bool:
            state = (await current_state(log)).explorers.get("explorer-1")
            return state is not None and state.shown_status == status

        lease = renewing_explorer_lease(explorer.publisher, lambda: SERVING, lease=LEASE)
        with anyio.fail_after(2 * PATIENCE):
            await anyio.to_thread.run_sync(lease.__enter__)
            await until(lambda: is_explorer("running"))
            await anyio.sleep(2 * LEASE)  # heartbeats add nothing to the log
            assert len(await events_of(log, ExplorerStatusChanged)) == 1
            explorer.link.refuse()
            await until(lambda: is_explorer("lost"))
            explorer.link.heal()
            await until(lambda: is_explorer("running"))
            assert (await current_state(log)).explorers["explorer-1"].endpoint == "http://here"
            await anyio.to_thread.run_sync(lease.__exit__, None, None, None)
            await until(lambda: is_explorer("stopped"))
        assert len(await events_of(log, LeaseExpired)) == 1
