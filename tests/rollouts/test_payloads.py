"""Tokens of answers lie next to the streams: written before an answer, freed after its fate."""

from __future__ import annotations

import os
import time

import pytest
from msgspec.structs import replace

from tests.rollouts.test_malformed_answers import reissued, send
from tests.support.errors import raises
from tests.support.payloads import MemoryPayloads
from tests.support.rollout_parts import answer, samples_of
from tests.support.waits import PATIENCE, until
from trinity_events.core.ledger import LedgerError
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import AnswerLimits, RolloutDispatcher
from trinity_events.rollouts.payloads import (
    ANSWER_LEASE,
    CHECKPOINT_LEASE,
    PayloadFault,
    PayloadsUnusable,
    RedisPayloadReader,
    RedisPayloads,
    SharedMemoryPayloadReader,
    SharedMemoryPayloads,
    load_groups,
)
from trinity_events.server import open_client
from trinity_schemas import (
    ContractError,
    ExperienceReference,
    PayloadAddress,
    RunKeys,
    StepRef,
    Turn,
    decode_turns,
    encode,
    encode_turns,
    payload_key,
    refer,
)


@pytest.fixture(params=["redis", "shm"])
def media(request, client, redis_url, run_id, tmp_path):
    """A store of payloads, and a reader of it."""
    if request.param == "shm":
        yield SharedMemoryPayloads(run_id, tmp_path), SharedMemoryPayloadReader(run_id, tmp_path)
    else:
        with open_client(redis_url) as reader:
            yield (
                RedisPayloads(client, run_id),
                RedisPayloadReader(reader, run_id, deadline=PATIENCE),
            )


@pytest.fixture
def store(client, run_id):
    return RedisPayloads(client, run_id)


def long_samples(claim, tokens=50_000):
    """All samples of a request, each with many tokens."""
    version = claim.request.oldest
    policy = Turn(
        role="policy",
        tokens=range(100_000, 100_000 + tokens),
        logprobs=[-0.5] * tokens,
        versions=[(version, tokens)],
    )
    return [
        replace(sample, turns=[sample.turns[0], policy]) for sample in samples_of(claim, "long")
    ]


async def test_an_answer_travels_by_reference_whatever_its_length(parts, media):
    """Invariant 1 of payloads/base.py."""
    store, reader = media
    dispatcher = await parts.dispatcher(sampling_tokens=50_000, payloads=store)
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer(payloads=store)
    claims = await explorer.claim(2, seconds=PATIENCE)
    samples = [long_samples(claim) for claim in claims]
    assert await explorer.answer_all(list(zip(claims, samples, strict=True))) == [True, True]
    entries = await parts.client.xrange(RunKeys.of(parts.run_id).experiences)
    assert all(len(fields[b"r"]) < 600 for _, fields in entries)
    groups = await dispatcher.take(2, deadline=PATIENCE)
    references = [group.experiences for group in groups]
    assert all(isinstance(sample, ExperienceReference) for group in references for sample in group)
    assert groups[0].size > 2 * 8 * 50_000
    assert {sample.token_count for sample in references[0]} == {50_001}
    assert load_groups(reader, references) == samples
    await dispatcher.trained(1, groups)
    with raises(PayloadsUnusable) as raised:
        load_groups(reader, references)
    assert {fault.kind for fault in raised.value.faults} == {"missing"}


async def test_a_death_before_the_answer_leaves_a_payload_whose_lease_ends(parts, store):
    """Invariant 2 of payloads/base.py."""
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer(payloads=store)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    [address] = await explorer._write_payloads([(claim, samples_of(claim))])
    milliseconds = await parts.client.pttl(payload_key(parts.run_id, address.name))
    assert 0 < milliseconds <= ANSWER_LEASE * 1000
    assert await parts.explorer(payloads=store).answer(claim, samples_of(claim))
    [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert group.payload not in (None, address.name)


async def test_an_answer_to_a_claim_that_is_known_to_be_lost_writes_no_payload(parts, store):
    """Invariant 6 of payloads/base.py."""
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    slow, fast = (parts.explorer(name, lease=0.1, payloads=store) for name in ("slow", "fast"))
    claims = await slow.claim(2, seconds=PATIENCE)
    answers = [(claim, samples_of(claim)) for claim in claims]
    async with slow.renewing(claims) as held_claims:
        assert await fast.answer(*answers[0])
        await until(lambda: held_claims == claims[1:])
        assert await slow.answer_all(answers) == [False, True]
    assert slow.discarded == 1
    assert len(await parts.client.keys(payload_key(parts.run_id, "*"))) == 2
    groups = await dispatcher.take(2, deadline=PATIENCE)
    assert [group.ordinal for group in groups] == [0, 1]


async def test_an_answer_whose_payload_is_gone_is_generated_again(parts, store, redis_url):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(payloads=store), 2) == [0, 1]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    await store.free([groups[1].payload])
    with open_client(redis_url) as reading:
        reader = RedisPayloadReader(reading, parts.run_id, deadline=PATIENCE)
        with raises(PayloadsUnusable) as raised:
            load_groups(reader, [group.experiences for group in groups])
        assert [fault.ordinal for fault in raised.value.faults] == [1]
        await dispatcher.return_groups(groups, raised.value.faults)
        with raises(DeadlineExceeded):
            await dispatcher.take(2, deadline=0.05)
        assert await answer(parts.explorer(payloads=store), 2) == [1]
        again = await dispatcher.take(2, deadline=PATIENCE)
        assert [(group.ordinal, group.attempt) for group in again] == [(0, 1), (1, 2)]
        assert again[0].payload == groups[0].payload
        assert len(load_groups(reader, [group.experiences for group in again])) == 2
    assert await reissued(parts) == {(1, 2, "payload-lost")}
    await dispatcher.trained(1, again)
    assert dispatcher.ledger.trained == 2


async def test_groups_that_were_not_taken_are_not_returned(parts, store):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer(payloads=store)) == [0]
    groups = await dispatcher.take(1, deadline=PATIENCE)
    await dispatcher.trained(1, groups)
    with raises(LedgerError):
        await dispatcher.return_groups(groups, [])


async def test_an_explorer_that_writes_malformed_payloads_is_excluded(parts, store, redis_url):
    """Invariant 3 of payloads/loading.py."""
    dispatcher = await parts.dispatcher(payloads=store, max_attempts=1)
    await dispatcher.dispatch(1, parts.version)
    limits = AnswerLimits(vocabulary_size=5)  # its token is 7
    with open_client(redis_url) as reading:
        reader = RedisPayloadReader(reading, parts.run_id, deadline=PATIENCE)
        for attempt in range(1, 4):
            assert await answer(parts.explorer("bad", payloads=store)) == [0]
            groups = await dispatcher.take(1, deadline=PATIENCE)
            assert groups[0].attempt == attempt
            with raises(PayloadsUnusable) as raised:
                load_groups(reader, [group.experiences for group in groups], limits)
            assert [fault.kind for fault in raised.value.faults] == ["malformed"]
            await dispatcher.return_groups(groups, raised.value.faults)
            with raises(DeadlineExceeded):
                await dispatcher.take(1, deadline=0.05)
    assert dispatcher.exclusions.names == ("bad",)
    assert {reason for *_, reason in await reissued(parts)} == {"malformed"}
    await dispatcher.checkpointed(0)  # frees what take had no time for
    assert await parts.client.keys(f"trinity-weights:{{{parts.run_id}.*") == []


async def test_a_payload_of_other_bytes_is_damaged(media, parts):
    store, reader = media
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer(payloads=store)) == [0]
    [group] = await dispatcher.take(1, deadline=PATIENCE)
    first = group.experiences[0]
    for changes in ({"size": first.payload.size - 1}, {"digest": "xxh3:" + "0" * 32}):
        address = replace(first.payload, **changes)
        foreign = [replace(sample, payload=address) for sample in group.experiences]
        with raises(PayloadsUnusable) as raised:
            load_groups(reader, [foreign])
        assert [fault.kind for fault in raised.value.faults] == ["damaged"]


@pytest.mark.parametrize(
    "turns", [[], [[]], [[], []], [[Turn(role="prompt", tokens=[1])] * 2] * 2, b"\xc1"]
)
def test_no_content_of_a_payload_raises_but_its_error(turns):
    import msgspec

    address = PayloadAddress(transport="redis", name="0" * 32, size=1, digest="xxh3:" + "0" * 32)
    reference = ExperienceReference(
        run_id="r",
        epoch=1,
        ordinal=0,
        attempt=1,
        sample=0,
        samples=2,
        explorer="a",
        reward=0.0,
        payload=address,
        tokens=2,
        versions=[(StepRef(1, 0), 1)],
    )
    payload = turns if isinstance(turns, bytes) else msgspec.msgpack.encode(turns)
    with pytest.raises(ContractError):
        decode_turns(payload, [reference, replace(reference, sample=1)])


async def test_a_checkpoint_frees_what_a_resume_would_have_used(parts, store, run_id):
    """Invariant 7 of dispatcher.py."""
    dispatcher = await parts.dispatcher(payloads=store, keep_answers="checkpoint")
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(payloads=store), 2) == [0, 1]
    [first] = await dispatcher.take(1, deadline=PATIENCE)
    await dispatcher.trained(1, [first])
    epoch = await open_run(parts.client, run_id, resume_from=None)
    log = RedisEventLog(parts.client, run_id)
    publisher = AsyncPublisher(log, epoch, new_producer("trainer"))
    resumed = RolloutDispatcher(
        parts.client,
        publisher,
        replace(dispatcher.settings, epoch=epoch),
        payloads=store,
    )
    await resumed.start(lambda _: True)
    milliseconds = await parts.client.pttl(payload_key(run_id, first.payload))
    assert milliseconds > (CHECKPOINT_LEASE - 60) * 1000
    await resumed.dispatch(2, StepRef(epoch, 0))
    groups = await resumed.take(2, deadline=PATIENCE)
    assert groups[0].payload == first.payload
    await resumed.trained(1, groups)
    assert await parts.client.exists(payload_key(run_id, first.payload))
    await resumed.checkpointed(1)
    assert await parts.client.keys(f"trinity-weights:{{{run_id}.*") == []


async def test_a_new_epoch_frees_the_payloads_of_answers_that_it_does_not_keep(parts, store):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(payloads=store), 2) == [0, 1]
    epoch = await open_run(parts.client, parts.run_id)
    resumed = RolloutDispatcher(
        parts.client, None, replace(dispatcher.settings, epoch=epoch), payloads=store
    )
    await resumed.start()
    assert await parts.client.keys(f"trinity-weights:{{{parts.run_id}.*") == []


async def test_an_entry_of_another_writer_frees_no_payload_that_is_used(parts, store):
    """Invariant 5 of inspection.py."""
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer(payloads=store)
    assert await answer(explorer, 1) == [0]
    [used] = await dispatcher.take(1, deadline=PATIENCE)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    address = used.experiences[0].payload
    foreign = [replace(sample, reward=float("inf")) for sample in samples_of(claim)]
    await send(parts, claim, [*map(encode, refer(foreign, address))], field="r")
    with raises(DeadlineExceeded):
        await dispatcher.take(1, deadline=0.3)
    assert await parts.client.exists(payload_key(parts.run_id, address.name))
    await dispatcher.trained(1, [used])
    assert not await parts.client.exists(payload_key(parts.run_id, address.name))


async def test_references_are_refused_where_no_rank_reads_them(parts, store):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    [claim] = await parts.explorer().claim(1, seconds=PATIENCE)
    address = PayloadAddress(transport="redis", name="0" * 32, size=1, digest="xxh3:" + "0" * 32)
    await send(parts, claim, [*map(encode, refer(samples_of(claim), address))], field="r")
    with raises(DeadlineExceeded):
        await dispatcher.take(1, deadline=0.3)
    assert {reason for *_, reason in await reissued(parts)} == {"malformed"}


async def test_an_answer_without_a_sampled_token_is_refused_and_its_explorer_goes_on(parts, store):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer(payloads=store)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    nothing = Turn(role="policy", tokens=[])
    samples = samples_of(claim)
    empty = [replace(sample, turns=[sample.turns[0], nothing]) for sample in samples]
    assert await explorer.answer(claim, empty)
    with raises(DeadlineExceeded):
        await dispatcher.take(1, deadline=0.3)
    assert {reason for *_, reason in await reissued(parts)} == {"malformed"}


async def test_an_explorer_writes_payloads_for_a_trainer_that_reads_them_alone(parts, media):
    store, reader = media
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer(payloads=store)) == [0]
    [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert group.payload is None
    assert load_groups(reader, [group.experiences]) == [list(group.experiences)]


async def test_whole_samples_are_taken_next_to_references(parts, store, redis_url):
    dispatcher = await parts.dispatcher(payloads=store)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer("own")) == [0]
    assert await answer(parts.explorer(payloads=store)) == [1]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    assert [group.payload is None for group in groups] == [True, False]
    with open_client(redis_url) as reading:
        reader = RedisPayloadReader(reading, parts.run_id, deadline=PATIENCE)
        loaded = load_groups(reader, [group.experiences for group in groups])
    assert [sample.turns[1].tokens for group in loaded for sample in group] == [[7]] * 4


async def test_a_payload_that_is_lost_before_its_step_is_found_by_the_renewal(parts):
    payloads = MemoryPayloads(time.monotonic)
    dispatcher = await parts.dispatcher(payloads=payloads)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(payloads=payloads), 1) == [0]
    with raises(DeadlineExceeded):
        await dispatcher.take(2, deadline=0.05)
    payloads.vanish()
    dispatcher._next_renewal = 0.0
    dispatcher._looked_at = -1e9
    with raises(DeadlineExceeded):
        await dispatcher.take(2, deadline=0.3)
    assert (0, 2, "payload-lost") in await reissued(parts)


def test_files_are_removed_once_their_lease_has_ended(tmp_path, run_id):
    store = SharedMemoryPayloads(run_id, tmp_path)
    names = ["0" * 32, "1" * 32]
    store._write(dict.fromkeys(names, b"x"))
    [folder] = tmp_path.iterdir()
    assert store._renew(names[:1], CHECKPOINT_LEASE) == {names[0]}
    assert store._renew(["2" * 32], CHECKPOINT_LEASE) == set()
    hour = time.time() - 2 * ANSWER_LEASE
    os.utime(folder / f"{run_id}.{names[1]}", (hour, hour))
    other = SharedMemoryPayloads("another-run", tmp_path)
    other._renew([], 0.0)
    assert [path.name for path in folder.iterdir()] == [f"{run_id}.{names[0]}"]
    store._free(names)
    assert [*folder.iterdir()] == []


def test_a_fault_names_the_ordinal_and_the_way_out():
    faults = tuple(PayloadFault(ordinal, "missing", "it is gone") for ordinal in range(6))
    text = str(PayloadsUnusable(faults))
    assert "6 groups" in text
    assert "and 2 more" in text
    assert "--weights-redis-url" in text


async def test_turns_of_a_group_have_their_prompt_once(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    [claim] = await parts.explorer().claim(1, seconds=PATIENCE)
    samples = samples_of(claim)
    prompt = Turn(role="prompt", tokens=range(70_000, 80_000))
    group = [replace(sample, turns=[prompt, *sample.turns[1:]]) for sample in samples]
    payload = encode_turns(group)
    assert len(payload) < 4 * 10_000 + 500
    address = PayloadAddress(transport="redis", name="0" * 32, size=1, digest="xxh3:" + "0" * 32)
    assert decode_turns(payload, refer(group, address)) == group
