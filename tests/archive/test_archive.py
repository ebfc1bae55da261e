"""Exports, imports, segments, retention and verification, against a real server."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE

import anyio
import msgspec
import pytest

from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration, started
from tests.support.pipeline import TWO_SEGMENTS, publish_steps, recorded, reducer_task, until
from tests.support.waits import PATIENCE, child
from trinity_events.archive import (
    Archive,
    ArchiveMissing,
    BadRecording,
    Header,
    NotWritten,
    import_recording,
    read_recording,
    record_run,
    verify,
)
from trinity_events.archive.export import RunExists
from trinity_events.archive.format import lines_written
from trinity_events.core import Monitor, MonitorState, encode_state
from trinity_events.log import ORIGIN, Entry, Stream
from trinity_events.reducer.log_retention import LogRetention
from trinity_events.replay import SnapshotUnreadable, current_state, load_monitor
from trinity_events.server import EmbeddedServer, connect
from trinity_schemas import RunClosed


@pytest.fixture
async def finished_run(publisher, log, redis_url, run_id, tmp_path):
    async with reducer_task(redis_url, run_id, tmp_path / "root"):
        await publish_steps(publisher, range(5))
        await publisher.publish(started(3))
        await log.append(b"\xff\x00 from elsewhere")
        last = await publisher.publish(RunClosed(reason="finished", step=4))
        archive = Archive(tmp_path / "root" / run_id, run_id)
        with anyio.fail_after(PATIENCE):  # the archive's second stream is the last that is written
            while archive.through(Stream.ANNOUNCEMENTS) == ORIGIN:
                await anyio.sleep(0.01)
        assert (await log.load())[1] == last
    return tmp_path / "root" / run_id


@pytest.fixture
async def exported(finished_run, log, tmp_path):
    path = tmp_path / "run.jsonl"
    await record_run(log, path)
    return path


async def test_an_export_goes_through_a_link_and_takes_the_place_of_nothing_but_files(
    finished_run, log, tmp_path
):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("there.jsonl")
    os.mkfifo(pipe)
    await record_run(log, link)
    assert link.is_symlink()
    assert read_recording(tmp_path / "there.jsonl").header.run_id == log.run_id
    with raises(NotWritten, path=pipe, reason="it is not a file, and would be replaced"):
        await record_run(log, pipe)
    assert pipe.is_fifo()


WRITING = (
    "import sys; from pathlib import Path\n"
    "from trinity_events.archive import Header\n"
    "from trinity_events.archive.format import lines_written\n"
    "with lines_written(Path(sys.argv[1]), Header(run_id='r')):\n"
    "    print('writing', flush=True); sys.stdin.read()\n"
)


@pytest.mark.processes
async def test_what_killed_exports_have_left_is_removed_by_the_next(finished_run, log, tmp_path):
    folder = tmp_path / "exports"
    path = folder / "run.jsonl"
    for _ in range(2):
        command = [sys.executable, "-c", WRITING, str(path)]
        with child(command, stdin=PIPE, stdout=PIPE, text=True) as writer:
            assert writer.stdout.readline() == "writing\n"
            writer.kill()
    [part_file] = folder.iterdir()
    assert re.fullmatch(r"\.run\.jsonl\.[0-9a-f]{16}\.part", part_file.name), (
        "it is seen what it is"
    )
    await record_run(log, path)
    assert list(folder.iterdir()) == [path]


async def test_two_exports_to_one_file_are_not_mixed(log, tmp_path):
    path = tmp_path / "run.jsonl"
    with (
        lines_written(path, Header(run_id=log.run_id)),
        raises(NotWritten, path=path, reason=re.compile("another process")),
    ):
        await record_run(log, path)
    assert read_recording(path).header.entries == 0, "the first is whole"
    await record_run(log, path)


UNREADABLE = "/proc/self/mem"  # it can be opened, and not be read


async def test_what_cannot_be_read_is_not_said_to_be_the_file_that_cannot_be_written(
    finished_run, log, cli, run_id, tmp_path
):
    [segment] = (finished_run / "log").glob("events.*")
    segment.unlink()
    segment.symlink_to(UNREADABLE)
    result = cli(
        "export", run_id, "-o", f"{tmp_path}/run.jsonl", "--checkpoint-root", str(tmp_path / "root")
    )
    assert result.returncode == 1
    assert result.stderr == f"error: {segment} cannot be read: Input/output error\n"
    assert not (tmp_path / "run.jsonl").exists()
    result = cli("import", UNREADABLE)
    assert result.stderr == f"error: {UNREADABLE} cannot be read: Input/output error\n"


@pytest.mark.processes
@pytest.mark.parametrize("command", ["export", "verify"])
async def test_what_is_terminated_leaves_nothing_behind(finished_run, run_id, tmp_path, command):
    [segment] = (finished_run / "log").glob("events.*")
    segment.unlink()
    os.mkfifo(segment)  # it is waited for
    room = tmp_path / "room"
    room.mkdir()
    arguments = (command, run_id, "--checkpoint-root", str(tmp_path / "root"))
    with child(
        [sys.executable, "-m", "trinity_events", *arguments],
        cwd=room,
        env={**os.environ, "TMPDIR": str(room)},
    ) as process:
        await until(lambda: list(room.glob("**/.*.part")))
        process.terminate()
        assert process.wait(PATIENCE) == 143
    assert list(room.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "way_out"),
    [("export", "name another with --output"), ("verify", "set TMPDIR to a folder with room")],
)
async def test_a_disk_on_which_the_log_has_no_room_is_one_sentence(
    finished_run, run_id, tmp_path, command, way_out
):
    root = tmp_path / "root"
    shell_command = (
        f"{sys.executable} -m trinity_events {command} {run_id} --checkpoint-root {root}"
    )
    result = subprocess.run(
        ["sh", "-c", f"ulimit -f 1 && {shell_command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert f"cannot be written (File too large): {way_out}" in line


async def test_an_export_read_back_is_the_run_bit_for_bit(exported, log):
    recording = read_recording(exported)
    assert list(recording.events) == await log.read()
    assert list(recording.announcements) == await log.read(stream=Stream.ANNOUNCEMENTS)
    assert list(recording.dead) == await log.dead_letters() != []
    assert recording.header.position == await log.last_id()
    for line in exported.read_text().splitlines():
        json.loads(line)


async def test_an_imported_run_is_the_run_on_another_server(exported, log, run_id, tmp_path):
    state = await current_state(log)
    with EmbeddedServer(tmp_path / "home").attached() as url:
        async with connect(url) as client, reducer_task(url, run_id):
            await import_recording(client, read_recording(exported))
            elsewhere = type(log)(client, run_id)
            assert await current_state(elsewhere) == state
            assert await recorded(elsewhere) == await recorded(log)
            assert [
                announcement.subject for announcement in await elsewhere.current_announcements()
            ] != []
            # A reducer that finds it announces nothing again.
            await anyio.sleep(0.3)
            count = len(list(read_recording(exported).announcements))
            assert len(await elsewhere.read(stream=Stream.ANNOUNCEMENTS)) == count


async def test_an_import_never_touches_a_run_that_is_there(exported, client, log):
    before = await recorded(log)
    with raises(RunExists, run_id=log.run_id):
        await import_recording(client, read_recording(exported))
    assert await recorded(log) == before


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def uncounted(header):
    fields = json.loads(header)
    del fields["entries"], fields["digest"]
    return json.dumps(fields).encode() + b"\n"


DAMAGES = {
    "no header": (lambda all_lines: all_lines[1:], {"fault": "foreign"}),
    "another file": (lambda _: [b"hello\n"], {"fault": "foreign"}),
    "empty": (lambda _: [], {"fault": "foreign"}),
    "another version": (
        lambda all_lines: [all_lines[0].replace(b'"version":1', b'"version":9'), *all_lines[1:]],
        {"fault": "version", "version": 9},
    ),
    "cut off": (
        lambda all_lines: [*all_lines[:-1], all_lines[-1][:20]],
        {"fault": "entry"},
    ),
    "cut off at a line's end": (
        lambda all_lines: all_lines[:-1],
        {"fault": "cut", "announced": re.compile(r"^\d+ entries$")},
    ),
    "cut off at a line's end, and of before its entries were counted": (
        lambda all_lines: [uncounted(all_lines[0]), *all_lines[1:4]],
        {"fault": "cut", "announced": re.compile("^events up to ")},
    ),
    "a line that does not parse": (
        lambda all_lines: [*all_lines[:3], b"{not json}\n", *all_lines[3:]],
        {"fault": "entry", "line": 4},
    ),
    "bytes that are no base64": (
        lambda all_lines: [*all_lines[:2], all_lines[2].replace(b'"payload":"', b'"payload":"*')],
        {"fault": "entry", "line": 3},
    ),
    "nested without end": (
        lambda all_lines: [all_lines[0], b'{"envelope":' + b"[" * 100_000 + b"\n"],
        {"fault": "entry", "line": 2},
    ),
    "a header that is nested without end": (
        lambda _: [b'{"format":"trinity-events-log","more":' + b"[" * 60_000 + b"\n"],
        {"fault": "foreign"},
    ),
    "out of order": (
        lambda all_lines: [all_lines[0], all_lines[2], all_lines[1]],
        {"fault": "order", "line": 3},
    ),
    "a run id that leaves its folder": (
        lambda all_lines: [b'{"format":"trinity-events-log","version":1,"run_id":"../x"}\n'],
        {"fault": "header", "line": 1},
    ),
}


@pytest.mark.parametrize(("damage", "fault"), DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_file_is_one_sentence_that_names_the_place(exported, damage, fault):
    exported.write_bytes(b"".join(damage(lines(exported))))
    with raises(BadRecording, path=exported, **fault):
        read_recording(exported)


async def test_a_whole_file_of_before_its_entries_were_counted_is_read(exported):
    all_lines = lines(exported)
    exported.write_bytes(b"".join([uncounted(all_lines[0]), *all_lines[1:]]))
    assert len(list(read_recording(exported).events)) > 0


@pytest.mark.parametrize("command", ["replay", "import", "verify"])
async def test_no_command_takes_a_file_that_was_cut_off_for_whole(exported, cli, command, tmp_path):
    exported.write_bytes(b"".join(lines(exported)[:-2]))
    result = cli(command, str(exported), env={"TRINITY_HOME": str(tmp_path / "elsewhere")})
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {exported} is not whole")
    assert len(result.stderr.splitlines()) == 1


def test_a_file_without_lines_is_not_read_to_its_end():
    with raises(BadRecording, path=Path("/dev/zero"), fault="foreign"):
        read_recording(Path("/dev/zero"))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with raises(BadRecording, fault="unreadable", reason="No such file or directory"):
        read_recording(tmp_path / "missing.jsonl")


async def test_a_sound_run_verifies_and_its_oddities_are_listed(finished_run, log):
    snapshot, _ = await log.load()
    report = verify(await recorded(log), snapshot, finished_run)
    assert report.sound
    assert report.checked == ("announcements", "snapshot", "iteration files")
    anomalies = [finding.what for finding in report.findings]
    assert any("undecodable" in what for what in anomalies)
    assert any("started, never ended" in what for what in anomalies)


async def test_verify_finds_what_the_log_does_not_give(finished_run, log, publisher):
    recording = await recorded(log)
    snapshot, _ = await log.load()
    fewer = recording._replace(announcements=recording.announcements[:-1])
    other = [*recording.announcements[:-1], Entry("9999999999999-0", b"forged")]
    forged = recording._replace(announcements=other)
    assert not verify(fewer).sound
    last = len(other)
    assert f"announcement {last} is not the one" in verify(forged).findings[0].what
    version, state = msgspec.msgpack.decode(snapshot, strict=False)
    changed = msgspec.msgpack.encode([version, {**state, "announced": 999}])
    assert not verify(recording, changed).sound
    not_text = b"\x92" + msgspec.msgpack.encode(version) + b"\x81\xa6run_id\xa1\xff"
    for unreadable in (b"\x01", not_text):
        assert not verify(recording, unreadable).sound
    earlier = recording._replace(events=recording.events[:-1])
    assert "snapshot" not in verify(earlier, snapshot).checked, "it is of a later entry"


async def test_verify_finds_an_iteration_file_that_lies(
    publisher, log, redis_url, run_id, tmp_path
):
    saved = tmp_path / run_id / "global_step_7"
    saved.mkdir(parents=True)
    (saved / "model.pt").touch()
    async with reducer_task(redis_url, run_id, tmp_path):
        await publisher.publish(committed(7, "checkpoint", registration("checkpoint")))
        await publisher.publish(finished(7, kind="checkpoint"))
        path = tmp_path / run_id / "latest_checkpointed_iteration.txt"
        with anyio.fail_after(PATIENCE):
            while not path.exists():
                await anyio.sleep(0.01)
    recording = await recorded(log)
    assert verify(recording, run_folder=tmp_path / run_id).sound
    path.write_text("8")
    [finding] = verify(recording, run_folder=tmp_path / run_id).findings
    assert "says '8', the log 7" in finding.what
    path.unlink()
    assert "cannot be read" in verify(recording, run_folder=tmp_path / run_id).findings[0].what
    saved.rename(tmp_path / "elsewhere")
    report = verify(recording, run_folder=tmp_path / run_id)
    assert [finding.severity for finding in report.findings] == ["open"], "no folder, no file"


async def test_a_run_that_ends_is_kept_in_its_folder(finished_run, log, run_id):
    archive = Archive(finished_run, run_id)
    for stream in Stream:
        assert list(archive.read(stream)) == await log.read(stream=stream)


async def keep(log, archive, entries):
    for number in range(entries):
        await log.append(b"%d" % number)
    token, _ = await log.lead(60)
    await LogRetention(log, archive, token, TWO_SEGMENTS)(await log.last_id())
    await log.renew(token, 0)


async def test_nothing_is_trimmed_before_it_is_kept(log, run_id, tmp_path):
    archive = Archive(tmp_path, run_id)
    for _ in range(4):
        await keep(log, archive, 10)
    assert [entry.payload for entry in archive.read(Stream.EVENTS)] == [
        b"%d" % number for number in range(10)
    ] * 4
    assert len(await log.read()) == 20, "the two newest segments stay on the server"
    recording = await recorded(log, archive)
    assert len(recording.events) == 40
    with raises(ArchiveMissing, fault="trimmed", run_id=run_id, stream="events"):
        await recorded(log)


async def test_what_a_group_has_not_acknowledged_or_read_is_not_trimmed(log, run_id, tmp_path):
    archive = Archive(tmp_path, run_id)
    await keep(log, archive, 10)
    ids = [entry.id for entry in await log.read()]
    redis = log._redis
    await redis.xgroup_create(log.keys.events, "slow", id="0")
    await redis.xreadgroup("slow", "one", {log.keys.events: ">"}, count=4)
    await redis.xack(log.keys.events, "slow", *ids[:2])
    for _ in range(3):
        await keep(log, archive, 10)
    assert (await log.read())[0].id == ids[2], "the oldest that is pending"
    await redis.xack(log.keys.events, "slow", *ids)
    await keep(log, archive, 10)
    assert (await log.read())[0].id == ids[3], "the last that was delivered"


async def test_a_segment_that_is_missing_is_noticed(log, run_id, tmp_path):
    archive = Archive(tmp_path, run_id)
    for _ in range(4):
        await keep(log, archive, 10)
    segments = sorted((tmp_path / "log").glob("events.*"))
    for missing in (segments[1], segments[0]):
        missing.unlink()
        with raises(ArchiveMissing, fault="segment", folder=tmp_path / "log"):
            await recorded(log, archive)


async def test_a_trimmed_log_without_its_snapshot_is_not_taken_for_the_whole(log, run_id, tmp_path):
    archive = Archive(tmp_path, run_id)
    for _ in range(4):
        await keep(log, archive, 10)
    await log._redis.set(log.keys.snapshot, b"\x01")
    with raises(SnapshotUnreadable, run_id=run_id, archived=None):
        await current_state(log)


async def test_a_snapshot_that_is_older_than_what_is_left_of_the_log_is_folded_anew(
    log, run_id, tmp_path
):
    archive = Archive(tmp_path, run_id)
    await keep(log, archive, 10)
    old = MonitorState(run_id=run_id, position=(await log.read())[4].id)
    for _ in range(3):
        await keep(log, archive, 10)
    whole = Monitor(MonitorState(run_id=run_id))
    whole.fold(list(archive.read(Stream.EVENTS)))
    keys = log.keys
    await log._redis.mset({keys.snapshot: encode_state(old), keys.position: await log.last_id()})
    loaded = await load_monitor(log, partial(archive.read, Stream.EVENTS))
    assert loaded.monitor.state == whole.state
    with raises(SnapshotUnreadable, reason=f"the snapshot is of {old.position}"):
        await current_state(log)


async def test_a_full_disk_keeps_the_log_on_the_server(log, run_id, caplog):
    archive = Archive(Path("/proc/nowhere"), run_id)
    await keep(log, archive, 10)
    assert len(await log.read()) == 10
    assert "stays on the server" in caplog.text


async def test_two_leaders_in_a_row_may_write_overlapping_segments(log, run_id, tmp_path):
    archive = Archive(tmp_path, run_id)
    ids = [await log.append(b"%d" % number) for number in range(10)]
    entries = await log.read()
    archive.add(Stream.EVENTS, entries[:6])
    archive.add(Stream.EVENTS, entries[3:], entries[2].id)
    assert [entry.id for entry in archive.read(Stream.EVENTS)] == ids
    assert archive.through(Stream.EVENTS) == ids[-1]


@pytest.mark.parametrize("order", [1, -1])
def test_archives_laid_together_have_what_both_had(tmp_path, order):
    entries = [Entry(f"{at}-0", b"%d" % at) for at in range(10, 90, 10)]
    first, other = Archive(tmp_path / "one", "r"), Archive(tmp_path / "other", "r")
    first.add(Stream.EVENTS, entries[:4])
    first.add(Stream.EVENTS, entries[4:6], "40-0")
    # The other leader found the same two on the server, which had dropped the ones before.
    other.add(Stream.EVENTS, entries[4:6], "49-18446744073709551615", after_gap=True)
    other.add(Stream.EVENTS, entries[6:], "60-0")
    for archive in (first, other)[::order]:
        for segment in archive.folder.iterdir():
            (tmp_path / "both" / "log").mkdir(parents=True, exist_ok=True)
            segment.replace(tmp_path / "both" / "log" / segment.name)
    both = Archive(tmp_path / "both", "r")
    assert list(both.read(Stream.EVENTS)) == entries
    for segment in (tmp_path / "both" / "log").glob("*.10-0.*"):
        segment.unlink()
    with raises(ArchiveMissing, before=re.compile(r"^events\.50-0\.60-0")):
        list(both.read(Stream.EVENTS))


async def test_commands_export_import_replay_and_verify(finished_run, cli, run_id, tmp_path):
    path = tmp_path / f"{run_id}.jsonl"
    root = ("--checkpoint-root", str(finished_run.parent))
    assert "entries of run" in cli("export", run_id, "-o", str(path), *root).stdout
    elsewhere = {"TRINITY_HOME": str(tmp_path / "elsewhere"), "PATH": os.environ["PATH"]}
    replayed = cli("replay", str(path), "--json", env=elsewhere)
    assert json.loads(replayed.stdout)["closed"] == "finished"
    assert not (tmp_path / "elsewhere").exists(), "a file needs no server"
    assert "is imported" in cli("import", str(path), env=elsewhere).stdout
    assert json.loads(cli("status", run_id, "--json", env=elsewhere).stdout) == json.loads(
        replayed.stdout
    )
    assert cli("verify", run_id, *root).returncode == 0
    report = cli("verify", str(path), "--json")
    assert json.loads(report.stdout)["run_id"] == run_id
    again = cli("import", str(path), env=elsewhere)
    assert again.returncode == 1
    assert again.stderr.startswith("error: run")
    missing = cli("replay", "missing.jsonl")
    assert missing.stderr == "error: missing.jsonl cannot be read: No such file or directory\n"
