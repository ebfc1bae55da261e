"""A trainer's lease: a host that is off, or cut off, is seen in the log."""

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from tests.support.event_histories import History
from tests.support.faulty_proxy import Proxy
from tests.support.pipeline import reducer_task, until
from tests.support.waits import PATIENCE
from trinity_events.analysis.causes import HostProcess, LiveFacts, find_causes
from trinity_events.client.training_run import training_run
from trinity_events.core import expired, lease_holders
from trinity_events.live_facts import read_live_facts
from trinity_events.log import RedisEventLog
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.views.status import format_trainer_status
from trinity_schemas import LeaseExpired, RunClosed, RunOpened, TrainerStatusChanged

LEASE = 0.5
RUNNING = TrainerStatusChanged(status="running", step=3, lease=15.0)


@pytest.fixture
def history():
    built = History()
    built.add(RUNNING, by="trainer")
    return built


def silence(history):
    """Let the lease of the trainer expire."""
    state = history.fold()[0].state
    for event in expired(state, set(lease_holders(state))):
        history.add(event, by="reducer")


def test_a_trainer_without_a_heartbeat_is_silent_until_it_says_that_it_runs(history):
    silence(history)
    state = history.fold()[0].state
    assert (state.trainer_status, format_trainer_status(state)) == ("silent", "silent")
    assert not lease_holders(state), "it expires once"
    history.add(RUNNING, by="trainer")
    state = history.fold()[0].state
    assert state.trainer_status == "running"
    assert [holder.lease for holder in lease_holders(state).values()] == [15.0]


@pytest.mark.parametrize(
    "end",
    [TrainerStatusChanged(status="stopped"), RunClosed(reason="finished"), RunOpened()],
    ids=["stopped", "closed", "opened again"],
)
def test_a_trainer_that_has_ended_has_no_lease(history, end):
    epoch = 2 if isinstance(end, RunOpened) else 1
    history.add(end, by="trainer" if epoch == 1 else "second", epoch=epoch)
    state = history.fold()[0].state
    assert state.trainer_lease is None
    assert not lease_holders(state)


def test_the_expiry_of_another_process_leaves_the_trainer_as_it_is(history):
    holder = history.fold()[0].state.trainer_lease.holder
    other = structs.replace(holder, incarnation="another")
    history.add(LeaseExpired(holder=other, lease=15.0), by="reducer")
    assert history.fold()[0].state.trainer_status == "running"


def test_a_silent_trainer_is_the_first_cause_and_its_host_is_named(history):
    silence(history)
    state = history.fold()[0].state
    node = state.trainer_lease.holder.node
    [cause] = find_causes(state, LiveFacts(now=state.trainer_lease.silent_at))
    assert (cause.reason, cause.process) == ("silent", "trainer-0")
    assert f"trainer-0 on {node}" in cause.sentence
    stopped = {"trainer-0": HostProcess(pid=7, condition="stopped")}
    [cause] = find_causes(state, LiveFacts(now=0, processes=stopped))
    assert (cause.reason, cause.pid) == ("stopped", 7)


@pytest.mark.server
async def test_a_trainer_that_is_cut_off_is_silent_and_runs_again_once_it_is_back(
    redis_url, run_id
):
    async with connect(redis_url) as client:
        with Proxy(redis_url) as link:
            run = training_run(run_id, redis_url=link.url, lease=LEASE, deadline=PATIENCE)

            async def is_trainer(status: str) -> bool:
                return (await current_state(log)).trainer_status == status

            log = RedisEventLog(client, run_id)
            async with reducer_task(redis_url, run_id):
                await anyio.to_thread.run_sync(run.open)
                await until(lambda: is_trainer("running"))
                link.refuse()
                await until(lambda: is_trainer("silent"))
                state, facts = await current_state(log), await read_live_facts(client, run_id)
                [cause] = [cause for cause in find_causes(state, facts) if cause.since]
                assert (cause.reason, cause.process) == ("silent", "trainer-0")
                link.heal()
                await until(lambda: is_trainer("running"))
                await anyio.to_thread.run_sync(run.close)
                await until(lambda: is_trainer("finished"))
