"""Every script checks the epoch of its caller first, and changes nothing for an older one."""

import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import answer, samples_of
from tests.support.waits import PATIENCE
from trinity_events.errors import EpochLost, KeyConflict, StaleEpoch
from trinity_events.log import open_run
from trinity_events.rollouts import streams as module
from trinity_events.rollouts.streams import RolloutStreams
from trinity_events.server import Deadline
from trinity_schemas import RunKeys, encode

ARGUMENTS = {
    "begin": lambda claim, _: [1],
    "issue": lambda claim, _: [claim.entry_id, 0, "1-99", b"request", "", 0, "1-100", b"request"],
    "renew": lambda claim, _: ["a", claim.entry_id],
    "leave": lambda *_: [0, ""],
    "answer": lambda claim, _: [claim.entry_id, 2, "e", *map(encode, samples_of(claim))],
    "fail": lambda claim, _: [claim.entry_id, "reason", "a"],
    "free": lambda _, answered: [answered.decode()],
    "mend": lambda _, answered: [answered.decode()],
}
"""Arguments, after the epoch and the group, with which a script of the present epoch writes."""


def test_every_script_is_tried():
    assert ARGUMENTS.keys() == module._KEYS.keys()


async def everything(client, run_id):
    keys = RunKeys.of(run_id)
    contents = []
    for key in (keys.rollouts, keys.experiences):
        contents.append(await client.xrange(key))
        groups = await client.xinfo_groups(key) if await client.exists(key) else []
        contents.append([(group["name"], group["pending"], group["consumers"]) for group in groups])
        for group in groups:
            pending = await client.xpending_range(key, group["name"], "-", "+", 10)
            contents.append([(claim["message_id"], claim["consumer"]) for claim in pending])
    return contents


async def prepared(parts):
    """A claimed request, and the id of the newest sample."""
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer()
    await answer(explorer)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    # Redis 7.0 makes no member of a client that found nothing.
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    await parts.client.xgroup_createconsumer(streams.keys.rollouts, streams.group, "idle")
    [_, [entry_id, _]] = await parts.client.xrange(RunKeys.of(parts.run_id).experiences)
    return claim, entry_id


def group_of(name, streams):
    return [] if name in ("free", "mend") else [streams.group]


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_script_of_an_older_epoch_writes_nothing(parts, name):
    claim, answered = await prepared(parts)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    arguments = [*group_of(name, streams), *ARGUMENTS[name](claim, answered)]
    await open_run(parts.client, parts.run_id)
    before = await everything(parts.client, parts.run_id)
    with raises(StaleEpoch, epoch=1, newest=2):
        await streams.write(Deadline(PATIENCE, ""), name, *arguments)
    assert await everything(parts.client, parts.run_id) == before


@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() - {"renew"}))
async def test_the_same_script_of_the_present_epoch_writes(parts, name):
    claim, answered = await prepared(parts)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    arguments = [*group_of(name, streams), *ARGUMENTS[name](claim, answered)]
    before = await everything(parts.client, parts.run_id)
    await streams.write(Deadline(PATIENCE, ""), name, *arguments)
    assert await everything(parts.client, parts.run_id) != before


async def test_renewal_restarts_the_idle_time_of_a_claim(parts):
    claim, _ = await prepared(parts)
    keys = RunKeys.of(parts.run_id)
    aged = {"min_idle_time": 0, "idle": 60_000, "justid": True}
    await parts.client.xclaim(
        keys.rollouts, "explorers-1", "a", message_ids=[claim.entry_id], **aged
    )
    other = parts.explorer("other")
    assert await other.renew([claim]) == [], "it is the claim of another explorer"
    assert await parts.explorer("a").renew([claim]) == [claim]
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    [seen] = (await streams.take_snapshot(Deadline(PATIENCE, ""))).claims.values()
    assert seen.explorer == "a"
    assert seen.idle < 59


async def test_a_server_that_lost_the_epoch_is_told_apart(parts):
    dispatcher = await parts.dispatcher()
    await parts.client.delete(RunKeys.of(parts.run_id).epoch)
    with raises(EpochLost):
        await dispatcher.dispatch(1, parts.version)


async def test_issuing_twice_writes_once(parts):
    await parts.dispatcher()
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    wait = Deadline(PATIENCE, "")
    for _ in range(2):  # As after a lost reply.
        rows = ["", 0, "1-1", b"request"]
        assert await streams.write(wait, "issue", streams.group, *rows) == [1]
    for _ in range(2):
        rows = ["1-1", 0, "1-2", b"next"]
        assert await streams.write(wait, "issue", streams.group, *rows) == [1]
    entries = await parts.client.xrange(RunKeys.of(parts.run_id).rollouts)
    assert entries == [(b"1-2", {b"e": b"next"})]


async def test_a_renewed_claim_is_not_replaced(parts):
    claim, _ = await prepared(parts)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    rows = [claim.entry_id, 600_000, "1-99", b"next"]
    assert await streams.write(Deadline(PATIENCE, ""), "issue", streams.group, *rows) == [2]
    assert await parts.explorer().renew([claim]) == [claim]


async def test_ids_that_a_foreign_program_chose_do_not_stop_an_epoch(parts):
    keys = RunKeys.of(parts.run_id)
    await parts.client.xadd(keys.rollouts, {"e": b"foreign"}, id="99999999-7")
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer()) == [0]


@pytest.mark.parametrize("field", ["rollouts", "experiences"])
async def test_a_key_of_another_type_is_named(parts, field):
    key = getattr(RunKeys.of(parts.run_id), field)
    await parts.client.sadd(key, b"of something else")
    with raises(KeyConflict, key=key, fault="type", actual="set"):
        await parts.dispatcher()
