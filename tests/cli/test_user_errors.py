"""What users get wrong, and what is cut off: one sentence each, and nothing passed over."""

import socket
import subprocess
import sys

import pytest
import redis

from tests.support.pipeline import publish_steps, recorded, reducer_task
from tests.support.waits import PATIENCE
from trinity_events import StepReady, subscribe
from trinity_events.analysis.explain import explain
from trinity_events.archive import Archive, verify
from trinity_events.archive.export import import_recording, whole_stream
from trinity_events.core import MonitorState
from trinity_events.core.state import KindState, StepState
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import Stream
from trinity_events.replay import PAGE
from trinity_events.server import EmbeddedServer, connect
from trinity_events.subscriptions.subscription import SubscriptionEnded


def is_a_sentence(result, status=1):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_port_that_another_has_is_named(cli, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        result = cli("serve", "--port", str(port), env={"TRINITY_HOME": str(tmp_path)})
    assert f"cannot listen on port {port}" in is_a_sentence(result)


@pytest.mark.parametrize("option", ["foo=bar", "db=x", "socket_timeout=soon"])
def test_an_option_of_a_url_that_is_unknown_or_wrong_is_named(cli, option):
    result = cli("runs", "--redis-url", f"redis://host?{option}")
    assert "has an option that is unknown or wrong" in is_a_sentence(result)


def test_a_password_among_the_options_is_not_shown(cli):
    result = cli("runs", "--redis-url", "redis://127.0.0.1:1?password=open-sesame")
    assert "open-sesame" not in is_a_sentence(result)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"])
def test_a_file_of_tls_that_is_not_there_is_named(cli, option):
    result = cli("runs", "--redis-url", f"rediss://127.0.0.1:1?{option}=/nowhere/of.pem")
    shown = (
        f"/nowhere/of.pem, which rediss://127.0.0.1:1?{option}=/nowhere/of.pem names as {option}"
    )
    assert is_a_sentence(result).startswith(f"error: {shown}, cannot be used (No such file")


def test_authorities_that_are_none_are_named(cli, tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    result = cli("runs", "--redis-url", f"rediss://127.0.0.1:1?ssl_ca_certs={path}")
    assert f"error: {path}, which" in is_a_sentence(result)


def test_no_sentence_has_two_full_stops(cli):
    step = StepState(kinds={"weights": KindState(failure="Connection refused.")})
    sentence = explain(MonitorState(run_id="run", steps={1: step}), 1)
    assert sentence == "Step 1 weights FAILED: Connection refused; a retry still needs " + (
        "the trainer's commit, its version to be opened."
    )
    sentence = is_a_sentence(cli("runs", "--redis-url", "redis://127.0.0.1:1"))
    assert ".)" not in sentence


INTERRUPTED = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "trinity_events.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from trinity_events.cli import main
assert "msgspec" not in sys.modules, "nothing that takes long is loaded before main"
main()
"""


@pytest.mark.processes
def test_an_interrupt_while_the_command_line_is_loaded_shows_no_traceback():
    command = [sys.executable, "-c", INTERRUPTED]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert is_a_sentence(result, status=130) == ""


async def test_a_subscription_that_has_raised_says_so_when_it_is_asked_again(redis_url, run_id):
    async with subscribe(
        run_id, StepReady, redis_url=redis_url, wait_for_run=True, deadline=0.05
    ) as events:
        with pytest.raises(DeadlineExceeded):
            await anext(events)
        with pytest.raises(SubscriptionEnded):
            await anext(events)


async def test_a_reader_that_is_overtaken_by_the_trimming_goes_on_in_the_archive(
    publisher, log, run_id, tmp_path
):
    await publish_steps(publisher, range(PAGE))  # three entries each
    expected = [entry.id for entry in await log.read(limit=10 * PAGE)]
    archive, read = Archive(tmp_path / run_id, run_id), []
    async for entry in whole_stream(log, Stream.EVENTS, archive):
        read.append(entry.id)
        if len(read) == 10:
            entries, after = await log.read(limit=2 * PAGE + 10), "0-0"
            for first in range(0, len(entries), 300):
                segment = entries[first : first + 300]
                archive.add(Stream.EVENTS, segment, after)
                after = segment[-1].id
            await log.trim(Stream.EVENTS, entries[-300].id)
    assert read == expected


async def test_an_import_that_is_cut_off_leaves_the_name_free(
    publisher, log, client, redis_url, run_id, tmp_path, monkeypatch
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
    recording = await recorded(log)
    with EmbeddedServer(tmp_path).attached() as other:
        async with connect(other) as elsewhere:
            with monkeypatch.context() as broken:
                broken.setattr("trinity_events.archive.export.add_run", _breaks)
                with pytest.raises(redis.ConnectionError):
                    await import_recording(elsewhere, recording)
            await import_recording(elsewhere, recording)


async def _breaks(*_):
    raise redis.ConnectionError("cut off")


async def test_a_recording_that_ends_before_its_position_is_not_sound(
    publisher, log, redis_url, run_id
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1, 2])
        async with subscribe(run_id, StepReady, redis_url=redis_url, deadline=PATIENCE) as events:
            async for event in events:
                if event.step == 2:
                    break
    recording = await recorded(log)
    assert verify(recording, None).sound
    del recording.events[4:]
    del recording.announcements[:]
    findings = [finding.what for finding in verify(recording, None).findings]
    assert any("the file was cut off" in finding for finding in findings)
