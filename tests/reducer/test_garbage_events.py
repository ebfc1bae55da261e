"""Large garbage in a log costs little, and holds up neither the lead, other runs nor the end."""

import asyncio
import itertools
import signal
import subprocess
import threading
import tracemalloc

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.support.event_histories import finished
from tests.support.pipeline import announced, publish_steps, reducer_process, until
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events import replay
from trinity_events.core import decode_state
from trinity_events.log import (
    AsyncPublisher,
    Entry,
    MemoryEventLog,
    RedisEventLog,
    list_runs,
    new_producer,
    open_run,
)
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_events.reducer import (
    FoldLimits,
    Policy,
    ReducerTimeouts,
    reduce_all,
    run_supervisor,
)
from trinity_events.reducer.reducer import Reducer
from trinity_events.replay import current_state, load_monitor
from trinity_events.server import connect
from trinity_schemas import (
    MAX_EVENT_BYTES,
    ContractError,
    EnvelopeReader,
    MessageTooLarge,
    UnknownEventType,
    decode_envelope,
)

DECODERS = {
    "decode_envelope": decode_envelope,
    "a reader": lambda payload: EnvelopeReader().decode(payload),
}
LITTLE = 1 << 20
"""Bytes of memory."""


def garbage(run_id, nbytes=MAX_EVENT_BYTES, tag="from-the-future"):
    """An event of an unknown type with millions of empty lists, of which it is made in no time."""
    raw = msgspec.msgpack.decode(
        EnvelopeFactory(run_id, 1, new_producer("actor")).next(finished(3))
    )
    del raw["event"]  # the event comes last, and its junk at its end
    small = msgspec.msgpack.encode({**raw, "event": {"type": tag, "junk": 0}})
    count = nbytes - len(small) - 5
    return small[:-1] + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


def peak_of(decode, payload, error):
    """Bytes that decoding takes at most, beside those of the payload."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            decode(payload)
        return tracemalloc.get_traced_memory()[1], caught.value
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_of_an_unknown_event_no_more_is_built_than_its_tag_and_its_sender(run_id, decode):
    peak, error = peak_of(decode, garbage(run_id), UnknownEventType)
    assert peak < LITTLE
    assert error.tag == "from-the-future"
    assert error.sender.run_id == run_id


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00,
        b"\x81\xa5event" + b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00,
        b"\x81\xa5event\x81\xa4type" + b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00,
        b"\x91" * 4_000_000,
        b"\x81\xa5event\x82\xa4junk" + b"\x91" * 4_000_000,
    ],
    ids=["a list", "an event that is a list", "a tag that is a list", "deep", "a deep event"],
)
def test_of_other_garbage_nothing_is_built(decode, payload):
    peak, _ = peak_of(decode, payload, ContractError)
    assert peak < LITTLE


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_what_is_too_long_is_not_decoded(run_id, decode):
    payload = garbage(run_id, 8 * MAX_EVENT_BYTES, tag="save-finished")
    peak, error = peak_of(decode, payload, MessageTooLarge)
    assert peak < LITTLE
    assert error.limit == MAX_EVENT_BYTES


class Watched:
    """Notes how many bytes are decoded between two turns of everyone else in the loop."""

    def __init__(self, monkeypatch):
        self.most = self.now = 0
        plain = EnvelopeReader.decode

        def decode(reader, payload):
            self.now += len(payload)
            self.most = max(self.most, self.now)
            return plain(reader, payload)

        monkeypatch.setattr(EnvelopeReader, "decode", decode)

    async def turns(self):
        while True:
            self.now = 0
            await anyio.lowlevel.checkpoint()


LARGE, COUNT = 100_000, 60
ENOUGH = 1_200_000
"""Bytes that may be decoded in one turn: a MiB, and the entry with which it is reached."""


async def log_of_garbage(run_id):
    log = MemoryEventLog(run_id)
    for _ in range(COUNT):
        await log.append(garbage(run_id, LARGE))
    return log


async def test_others_have_their_turns_while_garbage_is_folded(run_id, monkeypatch):
    log, watched = await log_of_garbage(run_id), Watched(monkeypatch)
    token, _ = await log.lead(60)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watched.turns)
        tasks.start_soon(Reducer(log, None, token).run)
        await until(lambda: log._position == log.last_id_now())
        tasks.cancel_scope.cancel()
    assert 0 < watched.most <= ENOUGH


async def test_others_have_their_turns_while_a_new_leader_folds_it_again(run_id, monkeypatch):
    log, watched = await log_of_garbage(run_id), Watched(monkeypatch)
    log._position = log.last_id_now()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watched.turns)
        loaded = await load_monitor(log)
        tasks.cancel_scope.cancel()
    assert loaded.monitor.state.dead_letters == COUNT
    assert 0 < watched.most <= ENOUGH


async def test_others_have_their_turns_while_it_is_asked_whether_a_run_is_over(run_id, monkeypatch):
    from trinity_events.core import MonitorState, encode_state

    log = await log_of_garbage(run_id)
    log._snapshot = encode_state(MonitorState(run_id=run_id, closed="finished"))
    log._position, watched = log.last_id_now(), Watched(monkeypatch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watched.turns)
        assert await run_supervisor._is_over(log, COUNT + 1)
        tasks.cancel_scope.cancel()
    assert 0 < watched.most <= ENOUGH


@pytest.mark.parametrize(
    "limits", [FoldLimits(snapshot_bytes=10 * LARGE), FoldLimits(snapshot_seconds=0.0)]
)
async def test_what_took_long_to_fold_is_in_a_snapshot(run_id, limits):
    log = await log_of_garbage(run_id)
    token, _ = await log.lead(60)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Reducer(log, None, token, policy=Policy(fold=limits)).run)
        await until(lambda: log._position == log.last_id_now())
        tasks.cancel_scope.cancel()
    snapshot, _ = await log.load()
    assert snapshot is not None, "although it is of few entries"
    assert decode_state(snapshot).dead_letters > COUNT - 20


async def test_what_a_new_leader_folded_again_counts_for_the_next_snapshot(run_id):
    policy = Policy(fold=FoldLimits(snapshot_bytes=COUNT * (LARGE - 1)))
    log = await log_of_garbage(run_id)
    log._position = log.last_id_now()
    token, _ = await log.lead(60)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Reducer(log, None, token, policy=policy).run)
        await log.append(b"one more")
        await until(lambda: log._snapshot)
        tasks.cancel_scope.cancel()


async def test_folding_an_archive_anew_ends_when_it_is_cancelled(run_id, publisher, log):
    for _ in range(3):
        await publisher.publish(finished(1))
    entries = await log.read()
    await log.trim(replay.Stream.EVENTS, entries[-1].id)
    folding = anyio.Event()

    def endless(_):
        payload = entries[1].payload
        for number in itertools.count(1):
            loop.call_soon_threadsafe(folding.set)
            yield Entry(f"1-{number}", payload)
            if gave_up.is_set():
                return

    loop, gave_up = asyncio.get_running_loop(), threading.Event()
    giving_up = threading.Timer(60, gave_up.set)
    giving_up.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load_monitor, log, endless)
        await folding.wait()
        tasks.cancel_scope.cancel()
    giving_up.cancel()
    assert not gave_up.is_set()


FEW = 24


async def append_garbage(client, run_id):
    payload = garbage(run_id)
    for _ in range(FEW):
        await RedisEventLog(client, run_id).append(payload)


@pytest.mark.server
async def test_garbage_of_one_run_does_not_hold_up_another_of_the_same_reducer(
    tmp_path,
):
    # The garbage takes two seconds alone, and more than a lease of three on a busy machine.
    policy = Policy(timeouts=ReducerTimeouts(leader_lease=15.0))
    # Of a server of its own: of the session's, the reducer would serve the runs of all tests.
    with servers(tmp_path, 1) as [server]:
        async with connect(server.url) as client:
            runs = {}
            for name in ("bad", "good"):
                log = RedisEventLog(client, name)
                runs[name] = AsyncPublisher(
                    log, await open_run(client, name), new_producer("trainer")
                )
            await append_garbage(client, "bad")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    lambda: reduce_all(server.url, run_id=None, root=None, policy=policy)
                )
                for step in (1, 2, 3):
                    await publish_steps(runs["good"], [step])
                    await announced(runs["good"].log, step)
                await publish_steps(runs["bad"], [1])
                await announced(runs["bad"].log, 1)
                fences = [await client.get(publisher.log.keys.fence) for publisher in runs.values()]
                tasks.cancel_scope.cancel()
            assert fences == [b"1", b"1"], "neither lost its lead"
            assert (await current_state(runs["bad"].log)).dead_letters == FEW
            assert set(runs) <= set(await list_runs(client))


@pytest.mark.processes
async def test_a_reducer_that_folds_garbage_ends_when_it_is_asked_to(
    redis_url, client, log, publisher, run_id, tmp_path
):
    await append_garbage(client, run_id)
    with reducer_process(redis_url, run_id, tmp_path, stderr=subprocess.PIPE) as process:
        await until(lambda: client.exists(log.keys.leader), deadline=60)
        process.send_signal(signal.SIGTERM)
        _, stderr = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=PATIENCE))
    assert process.returncode == 0
    assert b"Traceback" not in stderr
    await client.delete(log.keys.events)
