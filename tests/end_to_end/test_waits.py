"""A trainer that waits for explorers in real processes, as users see it in status and explain."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import anyio
import pytest

from tests.support.judging_explorer import DEADLINE, LEASE
from tests.support.pipeline import accept_reports, events_of
from tests.support.rollout_parts import settings
from tests.support.waits import PATIENCE, child, until
from trinity_events.diagnostics.waits import THRESHOLD, WaitReporter
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import AsyncPublisher, Publisher, SyncEventLog, new_producer
from trinity_events.rollouts import RolloutDispatcher
from trinity_schemas import (
    ExplorerStatusChanged,
    RunClosed,
    StacksTaken,
    StepRef,
    WaitEnded,
    WaitStarted,
)

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

REWARDS = """
import os, time

def quick(question, answer):
    return 1.0

def hangs(question, answer):
    explorer = os.getppid()
    while os.getppid() == explorer:  # it leaves no process behind
        time.sleep(0.1)
    os._exit(1)
"""


@pytest.fixture
def reporting(publisher, log, sync_client, run_id):
    """Makes a dispatcher of the trainer whose waits are reported after some seconds."""
    with ExitStack() as exits:

        async def make(threshold):
            own = Publisher(
                SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("trainer")
            )
            exits.enter_context(closing(own))
            made = RolloutDispatcher(
                log._redis,
                publisher,
                settings(run_id, publisher.epoch, claim_lease=LEASE),
                waits=WaitReporter(own, threshold=threshold, run_id=run_id),
            )
            await made.start()
            return made

        yield make


@pytest.fixture
def explorer(redis_url, run_id, publisher, tmp_path):
    """Starts an explorer whose reward is a function above."""
    (tmp_path / "mine.py").write_text(REWARDS)

    @contextmanager
    def start(rank, reward, threshold=PATIENCE):
        command = [
            *(sys.executable, "-m", "tests.support.judging_explorer", redis_url, run_id),
            *(str(publisher.epoch), str(rank), f"{tmp_path}/mine.py:{reward}", str(threshold)),
        ]
        with child(command, stdout=subprocess.PIPE, text=True) as process:
            yield process

    return start


async def claims(process) -> int:
    """Return the ordinal that an explorer claims next."""
    with anyio.fail_after(PATIENCE):
        return int(await anyio.to_thread.run_sync(process.stdout.readline))


async def test_an_explorer_that_is_stopped_is_named_by_status_within_the_threshold(
    cli, reporting, explorer, log, run_id
):
    dispatcher = await reporting(THRESHOLD)
    await dispatcher.dispatch(1, StepRef(1, 0))
    with explorer(3, "hangs") as process:
        assert await claims(process) == 0
        os.kill(process.pid, signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_take, dispatcher)
            [entry] = await until(lambda: events_of(log, WaitStarted))
            wait = entry.event
            assert (wait.what, wait.waits_for) == ("the rollouts of 0", ("explorer-3",))
            assert wait.seconds >= THRESHOLD
            shown = json.loads(cli("status", run_id, "--json").stdout)
            [wait] = shown["waits"].values()
            assert (wait["by"], wait["waits_for"]) == ("trainer-0", ["explorer-3"])
            row = r"^trainer-0 +the rollouts of 0 +explorer-3 +\d+ s ago +in \d+ s *$"
            assert re.search(row, cli("status", run_id).stdout, re.MULTILINE)
            tasks.cancel_scope.cancel()
    [ended] = await until(lambda: events_of(log, WaitEnded))
    assert ended.event.outcome == "cancelled"
    assert "WAITS" not in cli("status", run_id).stdout


async def accepted_events(log, kind):
    """The events of a type, once all that explorers reported is among them."""
    await accept_reports(log)
    return await events_of(log, kind)


async def _take(dispatcher):
    await dispatcher.take(1, deadline=LEASE)


async def test_explain_walks_from_the_trainer_to_the_reward_that_hangs(
    cli, reporting, explorer, publisher, log, run_id
):
    dispatcher = await reporting(0.5)
    await dispatcher.dispatch(1, StepRef(1, 0))
    with explorer(3, "hangs", 0.5) as process:
        assert await claims(process) == 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_take, dispatcher)

            async def both_are_told():
                entries = await accepted_events(log, WaitStarted)
                return {"trainer", "explorer"} == {
                    entry.producer.role for entry in entries
                } and any(entry.event.waits_for == ("explorer-3",) for entry in entries)

            await until(both_are_told)
            cause, *lines = cli("explain", run_id).stdout.splitlines()
            assert cause.startswith(f"First cause: No reducer leads run {run_id}")
            first = r"trainer-0 waits for the rollouts of 0 from explorer-3 for [\d.]+ s"
            assert re.fullmatch(rf"{first}, and gives up in \d+ s\.", lines[0].rstrip())
            second = r"  explorer-3 waits for the reward \S+mine\.py:hangs from process \d+ for "
            match = re.fullmatch(rf"{second}[\d.]+ s, and gives up in (\d+) s\.", lines[1].rstrip())
            assert 0 < int(match[1]) <= DEADLINE
            assert len(lines) == 2
            tasks.cancel_scope.cancel()
    # The killed explorer told no end of its wait: that it is gone is told by the next one.
    await until(lambda: accepted_events(log, WaitEnded))
    assert "explorer-3 waits" in cli("explain", run_id).stdout
    again = AsyncPublisher(log, 0, new_producer("explorer", 3))
    await again.publish(ExplorerStatusChanged(status="running"))
    await accept_reports(log)
    assert "explorer-3 waits" not in cli("explain", run_id).stdout
    await publisher.publish(RunClosed(reason="finished"))


async def test_the_stacks_of_an_explorer_that_misses_a_deadline_are_in_the_log(
    cli, reporting, explorer, log, run_id
):
    dispatcher = await reporting(0.05)
    await dispatcher.dispatch(1, StepRef(1, 0))
    with explorer(3, "hangs") as process:
        assert await claims(process) == 0
        with pytest.raises(DeadlineExceeded):
            await dispatcher.take(1, deadline=1.0)
        [entry] = await until(lambda: events_of(log, StacksTaken))
        assert (entry.event.process, entry.event.pid) == ("explorer-3", process.pid)
        assert "judging_explorer.py" in entry.event.stacks
        assert "judging_explorer.py" in cli("explain", run_id).stdout


async def test_a_run_in_which_nothing_lasts_reports_no_wait(reporting, explorer, log):
    dispatcher = await reporting(PATIENCE)
    with explorer(0, "quick"), explorer(1, "quick"):
        for step in range(1, 9):
            await dispatcher.dispatch(4, StepRef(1, step - 1))
            groups = await dispatcher.take(4, deadline=PATIENCE)
            await dispatcher.trained(step, groups)
    assert await accepted_events(log, (WaitStarted, WaitEnded)) == []
