"""A byte of an archived or exported log that was changed is noticed by every reader."""

import json

import anyio
import pytest

from tests.support.errors import raises
from tests.support.pipeline import is_folded, publish_steps, reducer_task, trimming, until
from trinity_events.archive import Archive, BadRecording, read_recording, record_run
from trinity_events.archive.export import whole_stream
from trinity_events.log import Entry, Stream
from trinity_events.replay import load_monitor

RUN = "run"
CHANGED = "was changed since it was written"


def segment_of(folder, payloads=(b"one", b"two", b"three")):
    archive = Archive(folder / RUN, RUN)
    entries = [Entry(f"{number}-0", payload) for number, payload in enumerate(payloads, 1)]
    archive.add(Stream.EVENTS, entries)
    [path] = archive.folder.iterdir()
    return archive, path


@pytest.fixture
async def trimmed(publisher, log, redis_url, run_id, tmp_path):
    """A run whose beginning is in segments alone; its folder."""
    async with reducer_task(redis_url, run_id, tmp_path / "root", trimming(10)):
        for step in range(1, 30):
            await publish_steps(publisher, [step])
            await until(lambda: is_folded(log))
            if await log.first_retained_id(Stream.EVENTS) is not None:
                break
    assert await log.first_retained_id(Stream.EVENTS) is not None
    return tmp_path / "root" / run_id


def flip_a_metric(folder):
    """Change one character of an event's bytes in the first segment; it is base64 still."""
    path = min((folder / "log").glob("events.*"))
    first, line, *rest = path.read_bytes().splitlines(keepends=True)
    entry = json.loads(line)
    payload = entry["payload"]
    at = len(payload) // 2
    other = "A" if payload[at] != "A" else "B"
    changed = line.replace(payload.encode(), (payload[:at] + other + payload[at + 1 :]).encode())
    assert changed != line
    path.write_bytes(first + changed + b"".join(rest))
    return path


@pytest.mark.parametrize("command", ["replay", "export", "verify"])
async def test_a_flipped_character_of_a_segment_is_told_by_every_command_that_reads_it(
    trimmed, run_id, cli, tmp_path, command
):
    path = flip_a_metric(trimmed)
    output = ["--output", str(tmp_path / "run.jsonl")] if command == "export" else []
    arguments = (command, run_id, "--checkpoint-root", str(trimmed.parent), *output)
    result = await anyio.to_thread.run_sync(lambda: cli(*arguments))
    assert result.returncode == 1, result.stdout
    assert f"error: {path} {CHANGED}" in result.stderr
    assert not (tmp_path / "run.jsonl").exists()


async def test_a_flipped_character_is_noticed_by_readers_that_go_on_on_the_server(
    trimmed, log, run_id
):
    flip_a_metric(trimmed)
    archive = Archive(trimmed, run_id)
    with raises(BadRecording, fault="changed"):
        async for _ in whole_stream(log, Stream.EVENTS, archive):
            pass
    await log._redis.delete(log.keys.snapshot)  # the reducer folds anew, from the files
    with raises(BadRecording, fault="changed"):
        await load_monitor(log, lambda after: archive.read(Stream.EVENTS, after))


async def test_a_reducer_that_has_to_fold_a_changed_segment_says_so_and_announces_nothing(
    trimmed, log, redis_url, run_id, caplog
):
    path = flip_a_metric(trimmed)
    await log._redis.delete(log.keys.snapshot)
    before = await log.last_id(Stream.ANNOUNCEMENTS)
    async with reducer_task(redis_url, run_id, trimmed.parent):
        await until(lambda: f"{path} {CHANGED}" in caplog.text)
    assert await log.last_id(Stream.ANNOUNCEMENTS) == before


def test_nothing_of_a_changed_segment_is_used(tmp_path):
    archive, path = segment_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"id":"3-0"', b'"id":"4-0"'))
    read = []
    with raises(BadRecording, fault="changed"):
        read.extend(entry.payload for entry in archive.read(Stream.EVENTS))
    assert read == []


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_every_byte_of_a_segment_is_in_its_digest(tmp_path, mask):
    archive, path = segment_of(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        with pytest.raises(BadRecording):
            list(archive.read(Stream.EVENTS))
    path.write_bytes(whole)
    assert len(list(archive.read(Stream.EVENTS))) == 3


def test_a_segment_of_before_there_were_digests_is_read(tmp_path):
    archive, path = segment_of(tmp_path)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    header = json.loads(first)
    del header["digest"]
    path.write_bytes(b"".join([json.dumps(header).encode() + b"\n", *rest]))
    assert [entry.payload for entry in archive.read(Stream.EVENTS)] == [b"one", b"two", b"three"]


async def test_what_is_shared_with_a_log_is_not_kept_out_of_a_changed_segment(tmp_path):
    archive, path = segment_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"payload":"b', b'"payload":"c', 1))
    aside = archive.set_aside(Stream.EVENTS, "0-0", "3-0")
    assert list(archive.read(Stream.EVENTS)) == []
    assert [file.name for file in aside.iterdir()] == [path.name]


async def test_a_flipped_character_of_an_export_is_told_and_never_imported(
    publisher, log, cli, tmp_path
):
    await publish_steps(publisher, [1])
    path = tmp_path / "run.jsonl"
    await record_run(log, path)
    first, line, *rest = path.read_bytes().splitlines(keepends=True)
    at = line.index(b'"payload":"') + 40
    other = b"A" if line[at : at + 1] != b"A" else b"B"
    path.write_bytes(b"".join([first, line[:at], other, line[at + 1 :], *rest]))
    with raises(BadRecording, fault="changed"):
        read_recording(path)
    result = await anyio.to_thread.run_sync(
        lambda: cli("import", str(path), env={"TRINITY_HOME": str(tmp_path / "home")})
    )
    assert (result.returncode, result.stderr.startswith(f"error: {path} {CHANGED}")) == (1, True)
