"""The full-screen view, by textual's own pilot over a real log, and once in a real terminal."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial

import anyio.to_thread
import msgspec
import pytest
import redis

from tests.support.event_histories import committed, failed, opened, part, registration, started
from tests.support.pipeline import accept_reports, publish_steps
from tests.support.waits import PATIENCE, until, wait_until
from trinity_events.analysis.causes import LiveFacts
from trinity_events.live_facts import read_lags, read_live_facts
from trinity_events.log import AsyncPublisher, Stream, new_producer
from trinity_events.replay import follow_state
from trinity_events.views.watch import WatchApp
from trinity_schemas import (
    AppliedPhases,
    EvaluationFailed,
    EvaluationFinished,
    ExplorerStatusChanged,
    StepRef,
    StepTrained,
    WaitStarted,
    WeightsApplied,
)


def text_of(app):
    """The screen as lines of text."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


def shows(app, *texts):
    return lambda: all(text in "\n".join(text_of(app)) for text in texts)


@pytest.fixture
async def run(publisher, log):
    """A run with an explorer that is behind, a running save, a wait and a failure."""
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer", 3))
    await publish_steps(publisher, [1, 2, 3])
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await explorer.publish(
        WeightsApplied(
            version=StepRef(publisher.epoch, 1),
            digest="sha256:" + "0" * 64,
            bytes=8,
            verified_at=1.0,
            phases=AppliedPhases(fetch=0.1, pause=0.1),
        )
    )
    await accept_reports(log)
    await publisher.publish(committed(2, "state_dict", registration(expected=2)))
    await actor.publish(started(2, "a"))
    await actor.publish(failed(2, "b", rank=1))
    await publisher.publish(opened(4, 0, 1))
    await publisher.publish(part(4))
    await publisher.publish(
        WaitStarted(wait_id="w", what="rollouts of step 4", waits_for=("explorer-3",), seconds=9.0)
    )
    return log


async def test_it_shows_what_is_wrong_what_travels_and_who_is_behind_in_80_columns(run):
    app = WatchApp(run.run_id, partial(follow_state, run))
    async with app.run_test(size=(80, 50)) as pilot:
        await until(shows(app, "explorer-3", "rollouts of step 4"))
        await pilot.pause()
        lines = text_of(app)
    screen = "\n".join(lines)
    assert max(map(len, lines)) == 80
    assert "weights 3" in screen
    assert "trainer-0 waits for rollouts of step 4 from explorer-3" in screen
    assert "FAILED" in screen
    assert "1/2 parts" in screen
    [explorer] = [line for line in lines if line.strip("│ ").startswith("explorer-3  running")]
    assert explorer.split()[3:5] == [f"{1}/1", "2"]
    assert screen.index("Waits and errors") < screen.index("Explorers")


async def test_lags_of_readers_are_shown_in_80_columns(run, client):
    await run.create_group(Stream.EVENTS, "an-evaluation-of-each-step", "0-0")
    await run.read_group(Stream.EVENTS, "an-evaluation-of-each-step", "one", seconds=0, limit=2)
    await run.create_group(Stream.EVENTS, "quick", "0-0")
    entries = await run.read_group(Stream.EVENTS, "quick", "two", seconds=0)
    for entry in entries:
        await run.ack(Stream.EVENTS, "quick", entry.id)
    await client.xadd(run.keys.dead, {"e": b"?", "reason": "it is\x1b[31m no event", "id": "1-0"})

    async def read_late():
        facts = await read_lags(client, run)
        late = msgspec.structs.replace(facts, now=facts.unfolded_since + 5_000)
        return late, await run.dead_letters(last=1)

    app = WatchApp(run.run_id, partial(follow_state, run), read_lags=read_late)
    async with app.run_test(size=(80, 60)) as pilot:
        await until(shows(app, "Behind the log", "explorer-3"))
        await pilot.pause()
        lines = text_of(app)
    assert max(map(len, lines)) == 80
    rows = [line.strip("│ \n") for line in lines]
    assert "The reducer has not folded an entry of 5 s ago." in rows
    [dead] = [row for row in rows if row.startswith("Last dead letter")]
    assert dead.endswith("it is\\x1b[31m no event")
    [late] = [row.split() for row in rows if row.startswith("an-evaluation-of-ea")]
    [quick] = [row.split() for row in rows if row.startswith("quick")]
    assert late[1:5] == ["events", "1", str(len(entries) - 2), "2"]
    assert quick[1:6] == ["events", "1", "0", "0", "-"]
    assert rows.index(next(row for row in rows if row.startswith("quick"))) > rows.index(
        next(row for row in rows if row.startswith("an-evaluation"))
    )


async def test_lags_are_those_of_all_live_facts(run, client):
    await run.create_group(Stream.EVENTS, "quick", "0-0")
    lags, facts = await read_lags(client, run), await read_live_facts(client, run.run_id)
    assert lags.unfolded_since == facts.unfolded_since
    names = [[group.name for group in each.groups] for each in (lags, facts)]
    assert names == [["quick"], ["quick"]]
    assert facts.heard and not lags.heard


async def test_without_a_reader_that_lags_there_is_no_such_panel(run):
    async def read_lags():
        return LiveFacts(now=1000, unfolded_since=500), ()

    app = WatchApp(run.run_id, partial(follow_state, run), read_lags=read_lags)
    async with app.run_test(size=(80, 60)):
        await until(shows(app, "explorer-3"))
        await until(lambda: app._lags is not None)
        assert not app.query_one("#lags").display


async def test_a_look_that_fails_leaves_the_screen_as_it_is(run):
    async def read_lags():
        raise redis.ConnectionError("it is away")

    app = WatchApp(run.run_id, partial(follow_state, run), read_lags=read_lags)
    async with app.run_test(size=(80, 60)):
        await until(shows(app, "explorer-3"))
        assert not app.query_one("#lags").display


async def test_it_goes_on_with_the_run_and_can_be_held_still(run, publisher):
    app = WatchApp(run.run_id, partial(follow_state, run))
    async with app.run_test(size=(80, 50)) as pilot:
        await until(shows(app, "rollouts of step 4"))
        await publish_steps(publisher, [7])
        await until(shows(app, "weights 7"))
        await pilot.press("space")
        await until(shows(app, "held still"))
        await publish_steps(publisher, [8])
        await until(lambda: app._state.trainer_step == 8 or "weights" in app._state.ready)
        assert "weights 8" not in "\n".join(text_of(app)).partition("Events")[0]
        await pilot.press("space")
        await until(shows(app, "weights 8"))


async def test_a_server_that_goes_away_is_told_and_asked_again(run):
    requests = []

    async def follow():
        requests.append(1)
        if len(requests) == 1:
            raise redis.ConnectionError("it is away")
        async for state in follow_state(run):
            yield state

    app = WatchApp(run.run_id, follow)
    async with app.run_test(size=(80, 50)):
        await until(shows(app, "the server does not answer (it is away)"))
        await until(shows(app, "explorer-3"))
        await until(lambda: not app.fault)


async def test_it_leads_with_step_pace_and_reward(publisher, log):
    mean = {"mean": 0.41, "mean_low": 0.38, "mean_high": 0.45}
    await publisher.publish(
        EvaluationFinished(name="held-out", version=StepRef(1, 0), metrics=mean, seconds=1.0)
    )
    for step in range(1, 31):
        await publisher.publish(StepTrained(step=step, metrics={"reward": step / 30}))
    app = WatchApp(log.run_id, partial(follow_state, log))
    async with app.run_test(size=(80, 50)) as pilot:
        await until(shows(app, "step 30"))
        await pilot.pause()
        [reward] = [line for line in text_of(app) if "reward: " in line]
        assert "0.183 at first, 0.85 now" in reward
        assert reward.index("▁") < reward.index("█")
        assert shows(app, "held-out: 0.41 (0.38 to 0.45) at step 0", " a step")()


async def test_before_the_first_step_it_shows_what_the_start_waits_for(publisher, log):
    await publisher.publish(WaitStarted(wait_id="w", what="setup of its ranks"))
    app = WatchApp(log.run_id, partial(follow_state, log))
    async with app.run_test(size=(80, 50)):
        await until(shows(app, "starting: trainer-0 waits for setup of its ranks, opened"))


async def test_what_a_person_must_look_at_is_not_shown_as_nothing(publisher, log):
    await publisher.publish(
        EvaluationFailed(name="held-out", version=StepRef(1, 0), reason="no explorer")
    )
    app = WatchApp(log.run_id, partial(follow_state, log))
    async with app.run_test(size=(80, 50)):
        await until(shows(app, "1 evaluation failed (held-out)."))
        assert not shows(app, "nothing failed")()


@pytest.mark.processes
@pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN])
def test_it_ends_when_its_terminal_goes(run, redis_url, hang_up):
    terminal, side = os.openpty()
    command = (sys.executable, "-m", "trinity_events", "watch", run.run_id)
    # Of a shell, whose terminal controls its session, and that may ignore SIGHUP as nohup does.
    leads = "import os, fcntl, termios, sys, signal; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    leads += f"signal.signal(signal.SIGHUP, signal.{hang_up.name}); "
    leads += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    process = subprocess.Popen(
        (sys.executable, "-c", leads, *command[1:], "--redis-url", redis_url),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(side)
    try:
        shown = b""
        while b"explorer-3" not in shown:
            shown += os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(PATIENCE) in (0, 1, 128 + signal.SIGHUP)
    finally:
        process.kill()
        process.wait()


def test_without_a_terminal_it_names_other_commands(cli):
    shown = cli("watch", "any")
    assert shown.returncode == 1
    assert shown.stderr == (
        "error: watch needs a terminal: elsewhere use status, or tail --follow\n"
    )


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
async def test_it_works_in_a_real_terminal(run, redis_url):
    with tempfile.TemporaryDirectory(prefix="tmux-") as folder:  # a socket's path must be short
        await anyio.to_thread.run_sync(_in_tmux, run.run_id, redis_url, f"{folder}/socket")


def _in_tmux(run_id, redis_url, socket):
    def tmux(*arguments):
        command = ["tmux", "-S", socket, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout

    command = f"{sys.executable} -m trinity_events watch {run_id} --redis-url {redis_url}"
    tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "40", command)
    try:
        wait_until(
            lambda: "rollouts of step 4" in tmux("capture-pane", "-p"), "it never showed the run"
        )
        screen = tmux("capture-pane", "-p")
        assert run_id in screen and "explorer-3" in screen
        tmux("send-keys", "q")
        wait_until(lambda: _is_over(tmux), "it did not quit")
    finally:
        subprocess.run(["tmux", "-S", socket, "kill-server"], capture_output=True, check=False)


def _is_over(tmux):
    try:
        tmux("list-sessions")
    except subprocess.CalledProcessError:
        return True
    return False
