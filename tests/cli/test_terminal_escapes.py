"""What names and messages hold is shown on a terminal, and never obeyed by it."""

import ast
import io
import json
import logging
import os
import pty
import re
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import trinity_events
import trinity_workers
from tests.support.event_histories import committed, finished, registration, slot, started
from tests.support.pipeline import announced, reducer_task
from tests.support.waits import child
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_events.views import terminal
from trinity_schemas import (
    ChosenTransport,
    ConsumerDetached,
    RunClosed,
    SaveFailed,
    SaveStarted,
    StepCommitted,
    VersionOpened,
    WaitStarted,
    to_json,
)

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eevil\x08\x7f"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
READING = ("status", "explain", "tail", "replay", "verify", "runs", "export", "audit")


@pytest.fixture
async def hostile_run(client, redis_url, run_id, tmp_path):
    """A run in which every text that a writer can choose has escape sequences."""
    chosen = ChosenTransport(name="redis", reason=EVIL)
    epoch = await open_run(client, run_id, config=EVIL, transport=chosen)
    log = RedisEventLog(client, run_id)
    trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
    evil = slot(1, name=EVIL)
    async with reducer_task(redis_url, run_id, tmp_path):
        for event in (
            SaveStarted(save_id="a", slot=evil),
            SaveFailed(save_id="a", slot=evil, error_type=EVIL, message=EVIL),
            SaveStarted(save_id="b", slot=evil),
            committed(1, "state_dict", registration(expected=2)),
            VersionOpened(step=2, ranks=(0, 1), transport="redis"),
            StepCommitted(step=2, kind="weights", metrics={f"{EVIL}\nforged line": 1.0}),
            finished(3, path=EVIL, name=f"{EVIL}\nforged line"),
            started(3, "c", name=f"{EVIL}\nforged line"),
            committed(3, "state_dict", registration(expected=2, name="3")),
            WaitStarted(wait_id="w", what=f"{EVIL}\nforged line", waits_for=(EVIL,)),
            ConsumerDetached(group=EVIL, stream="events", position="0-0", idle=1.0),
        ):
            await trainer.publish(event)
        unknown = to_json(
            msgspec.msgpack.decode(
                EnvelopeFactory(run_id, epoch, new_producer("x")).next(started(1))
            )
        )
        await log.append(msgspec.msgpack.encode({**unknown, "event": {"type": EVIL}}))
        await log.append(EVIL.encode())
        await trainer.publish(RunClosed(reason="failed", step=3, error=f"{EVIL}\nforged line"))
        await announced(log, 1)
    return run_id


def words(command, run_id, tmp_path):
    return {
        "explain": ("explain", run_id, "1"),
        "runs": ("runs",),
        "tail": ("tail", run_id, "-n", "100"),
        "export": ("export", run_id, "--output", str(tmp_path / "run.jsonl")),
    }.get(command, (command, run_id))


@pytest.mark.parametrize("command", READING)
async def test_no_command_writes_what_a_terminal_obeys(
    cli, hostile_run, redis_url, tmp_path, command
):
    env = {"TRINITY_REDIS_URL": redis_url}
    shown = cli(*words(command, hostile_run, tmp_path), env=env)
    assert "Traceback" not in shown.stderr
    assert not OBEYED.search(shown.stdout + shown.stderr)
    assert not re.search("^forged", shown.stdout + shown.stderr, re.MULTILINE)
    if command in ("status", "explain", "tail", "replay"):
        assert "evil" in shown.stdout, "it is shown all the same"


@pytest.mark.parametrize("command", ["status", "tail", "replay", "verify", "runs", "explain"])
async def test_json_stays_json(cli, hostile_run, redis_url, tmp_path, command):
    shown = cli(
        *words(command, hostile_run, tmp_path), "--json", env={"TRINITY_REDIS_URL": redis_url}
    )
    assert not OBEYED.search(shown.stdout + shown.stderr)
    for line in shown.stdout.splitlines():
        json.loads(line)


@pytest.mark.processes
@pytest.mark.parametrize("command", ["status", "tail", "replay", "verify"])
async def test_nor_does_any_where_there_is_a_terminal(hostile_run, redis_url, command):
    ours, theirs = pty.openpty()
    with child(
        [sys.executable, "-m", "trinity_events", command, hostile_run],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        env={**os.environ, "TRINITY_REDIS_URL": redis_url, "TERM": "xterm", "COLUMNS": "200"},
    ):
        os.close(theirs)
        read = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                read += part
    os.close(ours)
    text = read.decode().replace("\r\n", "\n")
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "evil" in text
    assert not OBEYED.search(without_colours)


def test_errors_and_tracebacks_are_shown_and_not_obeyed(cli, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"format": EVIL, "run_id": EVIL}) + "\n")
    for command in ("replay", "verify"):
        shown = cli(command, str(path))
        assert shown.returncode == 1
        assert not OBEYED.search(shown.stdout + shown.stderr)


def test_logs_are_shown_and_not_obeyed():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(terminal.LogFormatter("%(message)s"))
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = logging.makeLogRecord({"msg": EVIL, "exc_info": sys.exc_info()})
    handler.emit(record)
    assert not OBEYED.search(written.getvalue())
    assert "evil" in written.getvalue()


def test_what_is_harmless_is_shown_as_it_is():
    for text in ("a » b", "5 µs ┃ 测试 🙂", "two\nlines\tand a tab", "[bold]"):
        assert terminal.visible(text) == text
    assert terminal.visible("two\nlines", lines=False) == r"two\nlines"


def terminal_writers():
    """Everything of ours that may write to a terminal, beside the place that makes it safe."""
    events, workers = (
        Path(package.__file__).parent for package in (trinity_events, trinity_workers)
    )
    paths = [*(events / "cli").glob("*.py"), *(events / "views").glob("*.py")]
    paths += [workers / "cli.py", *(workers / "launch").glob("*.py")]
    return [path for path in paths if path != Path(terminal.__file__)]


@pytest.mark.parametrize(
    "path", terminal_writers(), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_commands_write_through_the_one_place_that_makes_it_safe(path):
    called = {
        getattr(node.func, "id", getattr(node.func, "attr", None))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    ours = "use say, tell or Terminal of trinity_events.views.terminal"
    assert not called & {"Console", "echo", "secho", "print_exc"}, ours
