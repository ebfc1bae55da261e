"""States of a run after any entry, from kept states, against a fold from the beginning."""

import zlib

import anyio
import msgspec
import pytest

from tests.support.errors import raises
from tests.support.pipeline import folded, publish_steps, reducer_task
from trinity_events.archive import Archive, Header, record_run
from trinity_events.archive.format import (
    bare_line,
    events_from,
    last_events,
    lines_of_stream,
    read_lines,
    write_lines,
)
from trinity_events.archive.kept_states import KeptStates
from trinity_events.archive.state_at import FileSource, RunSource, StateAt
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.kept_states import (
    KeptState,
    StateSpacing,
    decode_kept,
    encode_kept,
)
from trinity_events.core.state import SNAPSHOT_VERSION
from trinity_events.log import ORIGIN, Entry, Stream
from trinity_events.replay import UntilNotFound
from trinity_schemas import RunClosed

FOURTH = StateSpacing(every=4)
"""A state is kept after every fourth entry."""


@pytest.fixture
async def run(publisher, log):
    await publish_steps(publisher, range(5))
    await log.append(b"\xff\x00 from elsewhere")
    await publisher.publish(RunClosed(reason="finished", step=4))
    return log


@pytest.fixture
async def file(run, tmp_path):
    path = tmp_path / "run.jsonl"
    await record_run(run, path)
    return path


def folded_from_the_beginning(run_id, entries):
    monitor = Monitor(MonitorState(run_id=run_id))
    monitor.fold(entries)
    return monitor.state


class Watched:
    """A source that counts the entries that are read."""

    def __init__(self, source):
        self.source, self.run_id, self.read = source, source.run_id, 0
        self.kept_states = source.kept_states
        self.identity, self.announcements = source.identity, source.announcements

    async def events(self, since=None):
        async for entry in self.source.events(since):
            self.read += 1
            yield entry


async def test_every_state_of_a_run_is_that_of_a_fold_from_the_beginning(run, tmp_path):
    entries = await run.read()
    states = StateAt(RunSource(run, tmp_path, FOURTH))
    for number, entry in enumerate(entries, 1):
        expected = folded_from_the_beginning(run.run_id, entries[:number])
        assert await states.at(entry.id) == expected
        assert await states.at_number(number) == expected
    assert await states.at() == await states.at_number(10**9) == expected
    assert (await states.at(ORIGIN)).entries == 0


async def test_states_of_a_file_are_those_of_its_run(run, file):
    entries = await run.read()
    states = StateAt(FileSource(file, FOURTH))
    await states.at()
    for number, entry in enumerate(entries, 1):
        assert await states.at(entry.id) == folded_from_the_beginning(run.run_id, entries[:number])


async def test_a_second_question_reads_no_more_than_the_entries_between_two_kept_states(file):
    await StateAt(FileSource(file, FOURTH)).at()
    source = Watched(FileSource(file, FOURTH))
    end = await StateAt(source).at_number(15)
    assert end.entries == 15
    assert source.read <= 1 + 4 + 1, "the entry to compare, those between, and the one beyond"


async def test_states_are_kept_beside_the_archive(run, redis_url, tmp_path):
    async with reducer_task(redis_url, run.run_id, tmp_path):
        await folded(run)
        with anyio.fail_after(60):
            while Archive(tmp_path / run.run_id, run.run_id).through(Stream.EVENTS) == ORIGIN:
                await anyio.sleep(0.01)
    await StateAt(RunSource(run, tmp_path, FOURTH)).at()
    assert sorted((tmp_path / run.run_id / "log" / "states").iterdir())


async def test_states_of_another_log_of_the_name_are_not_used(run, tmp_path):
    await StateAt(RunSource(run, tmp_path, FOURTH)).at()
    other = await run.read()
    await run._redis.delete(run.keys.events)
    for entry in other:
        await run._redis.xadd(run.keys.events, {"e": b"\xff" + entry.payload}, id=entry.id)
    state = await StateAt(RunSource(run, tmp_path, FOURTH)).at()
    assert (state.entries, state.dead_letters) == (18, 18)


async def test_a_damaged_state_and_one_of_another_version_are_folded_anew(file):
    states = StateAt(FileSource(file, FOURTH))
    expected = await states.at()
    stored = states.source.kept_states
    for path in stored.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert await states.at() == expected
    for path in stored.folder.iterdir():
        log, entry, snapshot = msgspec.msgpack.decode(path.read_bytes())
        _, state = msgspec.msgpack.decode(zlib.decompress(snapshot))
        later = zlib.compress(msgspec.msgpack.encode((SNAPSHOT_VERSION + 1, state)))
        path.write_bytes(msgspec.msgpack.encode((log, entry, later)))
    assert stored.before((2**64, 0)) is None
    assert await states.at() == expected


async def test_where_no_state_can_be_kept_every_state_is_still_found(run, file, monkeypatch):
    source = FileSource(file, FOURTH)
    source.kept_states.folder.parent.mkdir(parents=True, exist_ok=True)
    source.kept_states.folder.write_text("a file in its place")
    assert (await StateAt(source).at()).entries == 18


async def test_the_entry_of_a_step_is_the_cause_of_its_first_announcement(run, redis_url, tmp_path):
    async with reducer_task(redis_url, run.run_id):
        await folded(run)
    states = StateAt(RunSource(run, tmp_path, FOURTH))
    state = await states.at(await states.after_step(3))
    assert state.ready["weights"].at.step == 3
    with raises(UntilNotFound, fault="step", until="9"):
        await states.after_step(9)


async def test_entries_are_folded_one_by_one_from_any_entry_on(run, tmp_path):
    entries = await run.read()
    states = StateAt(RunSource(run, tmp_path, FOURTH))
    numbers = [
        (state.entries, folded_entry.entry.id)
        async for state, folded_entry in states.folded(entries[9].id)
    ]
    assert numbers == [(n, entry.id) for n, entry in enumerate(entries[10:], 11)]


def test_a_longer_log_keeps_its_states_further_apart_and_never_too_many():
    spacing = StateSpacing()
    assert [spacing.interval(n) for n in (0, 1_000_000, 1_285_000)] == [5_000, 5_000, 10_000]
    assert all(n // spacing.interval(n) <= spacing.most for n in (10**6, 10**8, 10**12))


def test_states_that_are_too_near_are_removed_as_the_log_grows(tmp_path):
    spacing = StateSpacing(every=4, most=4)
    store = KeptStates(tmp_path / "states", spacing)
    for number in range(4, 49, 4):
        if number % spacing.interval(number) == 0:
            state = MonitorState(run_id="r", position=f"{number}-0", entries=number)
            store.save(KeptState(log="l", entry="e", state=state))
    numbers = sorted(int(path.name.split(".")[0]) for path in store.folder.iterdir())
    assert numbers == [16, 32, 48]


def test_a_kept_state_is_read_as_it_was_written():
    stored = KeptState(log="l", entry="e", state=MonitorState(run_id="r", entries=7))
    assert decode_kept(encode_kept(stored)) == stored


@pytest.mark.parametrize("count", [1, 2, 17, 500])
def test_bisection_finds_every_line_of_a_file(tmp_path, count):
    path = tmp_path / "log.jsonl"
    entries = [Entry(f"{n}-{n % 3}", bytes(n % 50)) for n in range(1, count + 1)]
    lines = [bare_line("events", entry) for entry in entries]
    lines += [bare_line("announcements", entry) for entry in entries]
    write_lines(path, Header(run_id="r"), lines)
    for number, entry in enumerate(entries[:: max(1, count // 20)]):
        at = number * max(1, count // 20)
        assert list(events_from(path, entry.id)) == entries[at:]
    assert list(events_from(path, f"{count + 1}-0")) == []
    assert len(list(read_lines(path)[1])) == 2 * count
    assert [line.entry for line in lines_of_stream(path, "announcements")] == entries
    assert list(lines_of_stream(path, "dead")) == []
    for limit in (1, 3, count, 2 * count):
        assert last_events(path, limit) == entries[-limit:]
