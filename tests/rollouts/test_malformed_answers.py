"""A malformed answer of an explorer is refused, and neither ends nor stalls a trainer."""

import logging
from functools import partial

import anyio
import pytest
from msgspec.structs import replace

from tests.support.errors import raises
from tests.support.malformed_experiences import FAULTS, LIMITS, malformed
from tests.support.rollout_parts import answer, samples_of, settings
from tests.support.waits import PATIENCE, until
from trinity_events.core.ledger import Ledger
from trinity_events.errors import StaleEpoch
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_events.log.position import LAST_ID
from trinity_events.rollouts import (
    ExplorersExcluded,
    RolloutClient,
    RolloutDispatcher,
    evaluation_keys,
)
from trinity_events.rollouts.exclusions import MALFORMED_ANSWERS
from trinity_events.rollouts.streams import BYTES_AT_ONCE, RolloutStreams
from trinity_events.server import Deadline
from trinity_schemas import (
    MAX_EVENT_BYTES,
    ExplorerExcluded,
    RolloutsDispatched,
    RunKeys,
    StepRef,
    decode_envelope,
    decode_experience,
    encode,
    share_prompts,
)

FOR_EVER = 3600.0


async def events(parts, kind):
    entries = await parts.publisher.log.read()
    every = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in every if isinstance(event, kind)]


async def reissued(parts):
    dispatched = await events(parts, RolloutsDispatched)
    again = [rollout for event in dispatched for rollout in event.reissued]
    return {(rollout.ordinal, rollout.attempt, rollout.reason) for rollout in again}


def explorers_of(groups):
    return {sample.explorer for group in groups for sample in group.experiences}


async def send(parts, claim, payloads, keys=None, field="e"):
    """Answer a claim with any payloads, as an explorer may."""
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch, keys=keys)
    row = [streams.group, claim.entry_id, len(payloads), field, *payloads]
    assert await streams.write(Deadline(PATIENCE, "not sent"), "answer", *row) == [1]


async def send_malformed(parts, explorer, count, kind="inf reward"):
    """Claim requests, and answer them malformed; return their ordinals."""
    claims = await explorer.claim(count, seconds=PATIENCE)
    for claim in claims:
        first, *others = samples_of(claim, explorer.name)
        await send(parts, claim, [malformed(kind, first), *map(encode, others)])
    return [claim.request.ordinal for claim in claims]


async def test_a_sample_whose_shared_prompt_did_not_come_is_refused(parts):
    dispatcher = await parts.dispatcher(limits=LIMITS)
    await dispatcher.dispatch(2, parts.version)
    bad, sound = parts.explorer("bad"), parts.explorer("sound")
    [claim] = await bad.claim(1, seconds=PATIENCE)
    shared = share_prompts(samples_of(claim, "bad"))
    assert [sample.shares_prompt for sample in shared] == [False, True]
    await send(parts, claim, [encode(sample) for sample in reversed(shared)])
    groups = await take(parts, dispatcher, 2, sound)
    assert explorers_of(groups) == {"sound"}
    assert await reissued(parts) == {(claim.request.ordinal, 2, "malformed")}


async def test_the_prompt_of_a_group_is_sent_once(parts):
    dispatcher = await parts.dispatcher(limits=LIMITS)
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(), 1) == [0]
    sent = [
        decode_experience(entry[b"e"])
        for _, entry in await parts.client.xrange(experiences_of(parts))
    ]
    assert [len(sample.turns[0].tokens) for sample in sent] == [1, 0]
    [group] = await dispatcher.take(1, deadline=PATIENCE)
    first, second = group.experiences
    assert first.turns[0] is second.turns[0]
    assert not second.shares_prompt


async def take(parts, dispatcher, count, *explorers, **more):
    """Take groups while explorers answer soundly whatever they can claim."""

    async def keep_answering(explorer):
        while True:
            if not await answer(explorer, 8):
                await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        for explorer in explorers:
            tasks.start_soon(keep_answering, explorer)
        groups = await dispatcher.take(count, deadline=PATIENCE, **more)
        tasks.cancel_scope.cancel()
    return groups


def experiences_of(parts):
    return RunKeys.of(parts.run_id).experiences


# --- commands that rules of access allow explorers, and that no explorer of ours sends ----------


async def read_without_claims(client, key, group, requests):
    await client.xreadgroup(group, "hostile", {key: ">"}, noack=True)


async def acknowledge_alone(client, key, group, requests):
    await client.xreadgroup(group, "hostile", {key: ">"})
    await client.xack(key, group, *requests)


async def remove_the_holder(client, key, group, requests):
    await client.xreadgroup(group, "hostile", {key: ">"})
    await client.xgroup_delconsumer(key, group, "hostile")


async def move_the_group(client, key, group, requests):
    await client.execute_command("XCLAIM", key, group, "hostile", 0, "1-1", "LASTID", LAST_ID)


async def leave_claims_of_deleted_requests(client, key, group, requests):
    await client.xreadgroup(group, "hostile", {key: ">"})
    await client.xdel(key, *requests)


@pytest.mark.parametrize(
    "attack",
    [
        read_without_claims,
        acknowledge_alone,
        remove_the_holder,
        move_the_group,
        leave_claims_of_deleted_requests,
    ],
)
async def test_requests_that_nobody_can_claim_are_issued_again_and_cost_no_attempt(parts, attack):
    dispatcher = await parts.dispatcher(max_attempts=1)
    await dispatcher.dispatch(2, parts.version)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    key = streams.keys.rollouts
    requests = [entry_id for entry_id, _ in await parts.client.xrange(key)]
    await attack(parts.client, key, streams.group, requests)
    groups = await take(parts, dispatcher, 2, parts.explorer("sound"))
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (1, 2)]
    assert dispatcher.ledger.dropped == {}


async def test_claims_of_deleted_requests_hide_no_claim(parts):
    dispatcher = await parts.dispatcher(window=2)
    await dispatcher.dispatch(2, parts.version)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    key, wait = streams.keys.rollouts, Deadline(PATIENCE, "not seen")
    for number in range(3, 13):
        await parts.client.xadd(key, {"e": b""}, id=streams.request_id(number))
    [[_, claimed]] = await parts.client.xreadgroup(streams.group, "hostile", {key: ">"})
    await parts.client.xdel(key, *(entry_id for entry_id, _ in claimed[:-1]))
    assert set((await streams.take_snapshot(wait)).claims) == {12}


async def test_a_name_of_any_bytes_ends_no_trainer(parts):
    dispatcher = await parts.dispatcher(claim_lease=0.1)
    await dispatcher.dispatch(1, parts.version)
    streams = RolloutStreams(parts.client, parts.run_id, parts.publisher.epoch)
    await parts.client.xreadgroup(streams.group, b"\xff" * 10_000, {streams.keys.rollouts: ">"})
    [claim] = (await streams.take_snapshot(Deadline(PATIENCE, "not seen"))).claims.values()
    assert claim.explorer == "\N{REPLACEMENT CHARACTER}" * 256
    [group] = await take(parts, dispatcher, 1, parts.explorer("sound"))
    assert group.attempt == 2


# --- malformed answers ------------------------------------------------------------------------


async def test_every_malformed_answer_is_issued_again_and_costs_no_attempt(parts):
    kinds = list(FAULTS)
    count = len(kinds)
    dispatcher = await parts.dispatcher(limits=LIMITS, window=count, max_attempts=1)
    await dispatcher.dispatch(count, parts.version)
    claims = await parts.explorer("mixed").claim(count, seconds=PATIENCE)
    for kind, claim in zip(kinds, claims, strict=True):
        first, second = samples_of(claim, f"explorer that sends {kind}")
        await send(parts, claim, [encode(first), malformed(kind, replace(second))])
    groups = await take(parts, dispatcher, count, parts.explorer("sound"))
    assert [group.ordinal for group in groups] == list(range(count))
    assert explorers_of(groups) == {"sound"}
    assert await reissued(parts) == {(ordinal, 2, "malformed") for ordinal in range(count)}
    await dispatcher.trained(1, groups)
    assert dispatcher.ledger.dropped == {}
    assert await parts.client.xlen(experiences_of(parts)) == 0
    assert dispatcher.exclusions.names == (), "each of them sent one"


async def test_an_answer_that_lacks_samples_is_malformed(parts, caplog):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    [claim] = await parts.explorer().claim(1, seconds=PATIENCE)
    await send(parts, claim, [encode(samples_of(claim)[0])])
    [group] = await take(parts, dispatcher, 1, parts.explorer("sound"))
    assert (group.attempt, len(group.experiences)) == (2, 2)
    assert await reissued(parts) == {(0, 2, "malformed")}
    assert "it has 1 of 2 samples" in caplog.text


async def test_a_version_that_was_not_published_is_malformed(parts):
    dispatcher = await parts.dispatcher()
    dispatcher.add_published(parts.version)
    await dispatcher.dispatch(2, parts.version)
    [early, claim] = await parts.explorer().claim(2, seconds=PATIENCE)
    to_come = StepRef(parts.version.epoch, 3)
    request = replace(early.request, oldest=to_come)
    await send(parts, early, [*map(encode, samples_of(replace(early, request=request)))])
    await send(parts, claim, [*map(encode, samples_of(claim))])
    groups = await take(parts, dispatcher, 2, parts.explorer("sound"))
    assert [group.attempt for group in groups] == [2, 1]
    dispatcher.add_published(to_come)
    await dispatcher.dispatch(1, to_come)
    [group] = await take(parts, dispatcher, 1, parts.explorer("sound"), oldest=3)
    assert (group.attempt, group.oldest_step) == (1, 3)


async def test_a_false_answer_displaces_no_true_one(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    [claim] = await parts.explorer("true").claim(1, seconds=PATIENCE)
    false = samples_of(claim, "false")
    for payload in (malformed("nan reward", false[0]), encode(false[1])):
        await parts.client.xadd(experiences_of(parts), {"e": payload})
    async with anyio.create_task_group() as tasks:

        async def answer_late():
            await anyio.sleep(0.5)
            assert await parts.explorer("true").answer(claim, samples_of(claim, "true"))

        tasks.start_soon(answer_late)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert (group.attempt, group.experiences[0].explorer) == (1, "true")
    assert await reissued(parts) == set()
    await dispatcher.trained(1, [group])
    assert await parts.client.xlen(experiences_of(parts)) == 0


async def test_a_kept_answer_that_is_malformed_is_not_used_by_a_resume(parts):
    first = await parts.dispatcher(keep_answers="checkpoint")
    await first.dispatch(2, parts.version)
    await send_malformed(parts, parts.explorer(), 1)
    assert await answer(parts.explorer(), 1) == [1]
    epoch = await open_run(parts.client, parts.run_id)
    publisher = AsyncPublisher(parts.publisher.log, epoch, new_producer("trainer"))
    rollout_settings = settings(parts.run_id, epoch, keep_answers="checkpoint")
    second = RolloutDispatcher(parts.client, publisher, rollout_settings, Ledger())
    await second.start(lambda _: True)
    await second.dispatch(2, StepRef(epoch, 0))
    [claim] = await RolloutClient(parts.client, parts.run_id, epoch, "b", lease=60.0).claim(
        2, seconds=PATIENCE
    )
    assert claim.request.ordinal == 0
    assert await parts.client.xlen(experiences_of(parts)) == 2, "those of ordinal 1"


# --- excluded explorers ------------------------------------------------------------------------


async def test_an_explorer_that_repeats_it_is_excluded_and_no_prompt_is_lost(parts, caplog):
    count = MALFORMED_ANSWERS + 2
    dispatcher = await parts.dispatcher(max_attempts=1)
    await dispatcher.dispatch(count, parts.version)
    bad = parts.explorer("explorer-1")
    early = await bad.claim(2, seconds=PATIENCE)
    assert len(await send_malformed(parts, bad, MALFORMED_ANSWERS)) == MALFORMED_ANSWERS
    groups = await take(parts, dispatcher, count, parts.explorer("explorer-0"))
    assert explorers_of(groups) == {"explorer-0"}
    again = await reissued(parts)
    assert {(ordinal, 2, "malformed") for ordinal in range(2, count)} <= again
    assert {reason for _, _, reason in again} == {"malformed", "excluded"}
    [excluded] = await events(parts, ExplorerExcluded)
    assert (excluded.explorer, excluded.malformed) == ("explorer-1", MALFORMED_ANSWERS)
    assert "its reward is inf" in excluded.reason
    assert "explorer-1 is excluded" in caplog.text
    assert dispatcher.ledger.dropped == {}
    late = [await bad.answer(claim, samples_of(claim, bad.name)) for claim in early]
    assert late == [False, False], "what it held was issued again at once"


async def test_an_excluded_explorer_claims_nothing_more_and_gives_back_what_it_claims(parts):
    dispatcher = await parts.dispatcher(max_attempts=1)
    await dispatcher.dispatch(MALFORMED_ANSWERS, parts.version)
    bad = parts.explorer("explorer-1")
    await send_malformed(parts, bad, MALFORMED_ANSWERS)
    async with anyio.create_task_group() as tasks:
        claimed = []

        async def claim_and_fall_silent():
            while not bad.is_excluded:
                claimed.extend(await bad.claim(8, seconds=0.05))

        async def take_them():
            await take(parts, dispatcher, MALFORMED_ANSWERS, after_exclusion)

        class AfterExclusion(RolloutClient):
            async def claim(self, count, *, seconds):
                if not bad.is_excluded:
                    return []
                return await super().claim(count, seconds=seconds)

        after_exclusion = AfterExclusion(
            parts.client, parts.run_id, parts.publisher.epoch, "explorer-0", lease=FOR_EVER
        )
        tasks.start_soon(claim_and_fall_silent)
        tasks.start_soon(take_them)
    assert claimed == []
    assert await bad.claim(8, seconds=0.0) == []
    assert dispatcher.ledger.dropped == {}
    assert {reason for _, _, reason in await reissued(parts)} == {"malformed", "excluded"}


async def test_at_the_deadline_of_a_run_the_excluded_explorers_are_named(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2 * MALFORMED_ANSWERS, parts.version)
    for name in ("explorer-0", "explorer-1"):
        await send_malformed(parts, parts.explorer(name), MALFORMED_ANSWERS, "nan logprob")
    excluded = {"run_id": parts.run_id, "explorers": ("explorer-0", "explorer-1")}
    with raises(ExplorersExcluded, deadline=0.6, **excluded) as caught:
        await dispatcher.take(1, deadline=0.6)
    assert {exclusion.malformed for exclusion in caught.value.exclusions} == {MALFORMED_ANSWERS}
    assert all("is not finite" in exclusion.reason for exclusion in caught.value.exclusions)


async def test_training_and_evaluations_exclude_the_same_explorers(parts):
    keys = evaluation_keys(parts.run_id)
    epoch = parts.publisher.epoch
    training = RolloutDispatcher(parts.client, parts.publisher, settings(parts.run_id, epoch))
    rollout_settings = settings(parts.run_id, epoch, may_drop=False)
    evaluation = RolloutDispatcher(parts.client, None, rollout_settings, keys=keys, shares=training)
    await evaluation.start()
    await evaluation.dispatch(MALFORMED_ANSWERS, parts.version, exact=True)
    judged = RolloutClient(parts.client, parts.run_id, epoch, "explorer-1", lease=60.0, keys=keys)
    for claim in await judged.claim(MALFORMED_ANSWERS, seconds=PATIENCE):
        first, *others = samples_of(claim, "explorer-1")
        await send(parts, claim, [malformed("nan reward", first), *map(encode, others)], keys)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(evaluation.take, 1, deadline=PATIENCE))
        await until(lambda: training.exclusions.names)
        tasks.cancel_scope.cancel()
    await training.start()
    await training.dispatch(1, parts.version)
    [excluded] = await events(parts, ExplorerExcluded)
    assert excluded.explorer == "explorer-1"
    assert await parts.explorer("explorer-1").claim(1, seconds=0.0) == []


# --- entries ------------------------------------------------------------------------------------


async def test_entries_of_any_content_are_passed_over(parts, caplog):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    for fields in (
        {"large": b"\xff"},
        {"e": b""},
        {"e": b"\xff" * 100},
        {"e": b"\x81\xa6run_id\xa1\xff"},
        {"e": b"\x91" * 5000},
        {"e": b"\0" * (MAX_EVENT_BYTES + 1)},
        {"failed": b"1-" + b"9" * 5000, "reason": b"\xff" * 5000},
        {"failed": "1-\N{ARABIC-INDIC DIGIT THREE}", "reason": "none"},
        {f"field {at}": b"" for at in range(300)},
    ):
        await parts.client.xadd(experiences_of(parts), fields)
    [group] = await take(parts, dispatcher, 1, parts.explorer())
    assert group.attempt == 1
    await dispatcher.trained(1, [group])
    assert await parts.client.xlen(experiences_of(parts)) == 0
    counts = [line for line in caplog.messages if "which are passed over" in line]
    assert len(counts) == 3, "the first, the second and the fourth of seven"


async def test_one_read_is_bounded_by_bytes(parts):
    entry = bytes(MAX_EVENT_BYTES // 2)
    for _ in range(12):
        await parts.client.xadd(experiences_of(parts), {"e": entry})
    await parts.client.xadd(experiences_of(parts), {"e": bytes(2 * MAX_EVENT_BYTES)})
    streams = RolloutStreams(parts.client, parts.run_id, 1)
    wait = Deadline(PATIENCE, "not read")
    first = await streams.answers_after(wait, "0-0", 1.0)
    assert 0 < sum(len(fields[b"e"]) for _, fields in first) <= BYTES_AT_ONCE
    second = await streams.answers_after(wait, first[-1][0].decode())
    assert len(first) + len(second) == 13
    assert second[-1][1] == {b"large": b"%d" % (2 * MAX_EVENT_BYTES + 1)}


@pytest.mark.parametrize("is_removed", [False, True], ids=["there", "removed"])
async def test_a_stream_that_was_ended_by_the_largest_id_begins_again(parts, caplog, is_removed):
    dispatcher = await parts.dispatcher(keep_answers="checkpoint")
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(), 1) == [0]
    await parts.client.xadd(experiences_of(parts), {"e": b"the end"}, id=LAST_ID)
    if is_removed:
        await parts.client.xdel(experiences_of(parts), LAST_ID)
    [claim] = await parts.explorer().claim(1, seconds=PATIENCE)
    async with anyio.create_task_group() as tasks:
        counted = []

        async def answer_once_it_begins_again():
            counted.append(await parts.explorer().answer(claim, samples_of(claim)))

        tasks.start_soon(answer_once_it_begins_again)
        groups = await dispatcher.take(2, deadline=PATIENCE)
    assert counted == [True], "no request was withdrawn before its answer could be written"
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 1), (1, 1)]
    assert [record.levelno for record in caplog.records if LAST_ID in record.message] == [
        logging.WARNING
    ]
    info = await parts.client.xinfo_stream(experiences_of(parts))
    assert int(info["last-generated-id"].split(b"-")[0]) < 10**15


async def test_a_request_is_given_back_once_the_stream_begins_again(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    await parts.client.xadd(experiences_of(parts), {"e": b"late"}, id="99999999999999999-1")
    [claim] = await parts.explorer().claim(1, seconds=PATIENCE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(parts.explorer().fail, claim, "the reward died")
        [group] = await take(parts, dispatcher, 1, parts.explorer("b"))
    assert await reissued(parts) == {(0, 2, "failed")}
    assert group.attempt == 2


async def test_an_epoch_begins_on_a_stream_that_was_ended(parts):
    await parts.client.xadd(experiences_of(parts), {"e": b"the end"}, id=LAST_ID)
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer()) == [0]
    assert len(await dispatcher.take(1, deadline=PATIENCE)) == 1


async def test_a_trainer_of_an_older_epoch_trains_nothing_also_where_answers_are_kept(parts):
    dispatcher = await parts.dispatcher(keep_answers="checkpoint")
    await dispatcher.dispatch(1, parts.version)
    await answer(parts.explorer())
    groups = await dispatcher.take(1, deadline=PATIENCE)
    await open_run(parts.client, parts.run_id)
    with pytest.raises(StaleEpoch):
        await dispatcher.trained(1, groups)
