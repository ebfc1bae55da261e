"""The dispatcher hands out each ordinal once, asks again for what is lost, and tells its fate.

The numbers are those of the invariants in `trinity_events/rollouts/dispatcher.py`.
"""

import re

import anyio
import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import LEASE, answer, samples_of
from tests.support.waits import PATIENCE, until
from trinity_events.core.ledger import Ledger, LedgerError
from trinity_events.errors import DeadlineExceeded
from trinity_events.rollouts import RolloutsFailed
from trinity_events.rollouts.dispatcher import DispatchMisused
from trinity_schemas import RolloutsDispatched, RunKeys, StepRef, StepTrained, decode_envelope


async def events(parts, kind):
    entries = await parts.publisher.log.read()
    log_events = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in log_events if isinstance(event, kind)]


def ordinals(groups):
    return [group.ordinal for group in groups]


async def claim_all(explorer, count=8):
    claims = await explorer.claim(count, seconds=PATIENCE)
    return {claim.request.ordinal: claim for claim in claims}


async def test_a_claim_that_lapses_while_it_trains_is_issued_again_before_it_is_waited_for(parts):
    """6."""
    dispatcher = await parts.dispatcher(claim_lease=LEASE)
    await dispatcher.dispatch(4, parts.version)
    dead, alive = parts.explorer("dead", lease=LEASE), parts.explorer("alive")
    assert await answer(alive, 2) == [0, 1]
    assert await claim_all(dead, 2)
    groups = await dispatcher.take(2, deadline=PATIENCE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatcher.watch_claims)
        answered = set()

        async def answered_again():
            answered.update(await answer(alive, 2))
            return answered == {2, 3}

        await until(answered_again)
        await dispatcher.trained(1, groups)
        later = await dispatcher.take(2, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert [(group.ordinal, group.attempt) for group in later] == [(2, 2), (3, 2)]
    reissued = [
        rollout for event in await events(parts, RolloutsDispatched) for rollout in event.reissued
    ]
    assert {(rollout.ordinal, rollout.reason) for rollout in reissued} == {
        (2, "lapsed"),
        (3, "lapsed"),
    }


async def test_an_ordinal_without_attempts_left_is_given_up_by_the_step_alone(parts):
    """6."""
    dispatcher = await parts.dispatcher(claim_lease=LEASE, max_attempts=1)
    await dispatcher.dispatch(4, parts.version)
    dead, alive = parts.explorer("dead", lease=LEASE), parts.explorer("alive")
    await claim_all(dead, 1)
    assert await answer(alive, 3) == [1, 2, 3]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatcher.watch_claims)
        await until(lambda: 0 in dispatcher._due)
        assert dispatcher.ledger.dropped == {}
        groups = await dispatcher.take(2, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert ordinals(groups) == [1, 2]
    assert dispatcher.ledger.dropped == {"attempts": 1}


async def test_a_step_takes_whole_groups_and_tells_their_fate(parts):
    dispatcher = await parts.dispatcher()
    assert await dispatcher.dispatch(2, parts.version) == 2
    assert await answer(parts.explorer(), 2) == [0, 1]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    assert ordinals(groups) == [0, 1]
    assert [[experience.sample for experience in group.experiences] for group in groups] == [
        [0, 1]
    ] * 2
    await dispatcher.trained(1, groups, metrics={"loss": 0.5}, staleness={0: 4})
    [dispatch_event] = await events(parts, RolloutsDispatched)
    assert (dispatch_event.ordinals, dispatch_event.reissued, dispatch_event.oldest) == (
        ((0, 1),),
        (),
        parts.version,
    )
    [step_event] = await events(parts, StepTrained)
    assert (step_event.step, step_event.trained, step_event.metrics) == (
        1,
        ((0, 1),),
        {"loss": 0.5},
    )
    assert dispatcher.ledger_at(1).trained == 2
    keys = RunKeys.of(parts.run_id)
    assert await parts.client.xlen(keys.experiences) == await parts.client.xlen(keys.rollouts) == 0


async def test_fates_of_dropped_ordinals_are_published_once_where_no_step_follows(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(), 2) == [0, 1]
    with pytest.raises(DeadlineExceeded):
        await dispatcher.take(2, deadline=0.3, usable=lambda _: "filtered")
    for _ in range(2):
        await dispatcher.publish_dropped()
    dropped = [event.dropped for event in await events(parts, RolloutsDispatched) if event.dropped]
    assert dropped == [{"filtered": ((0, 1),)}]
    assert dispatcher.ledger.dropped == {"filtered": 2}


async def test_the_order_of_ordinals_waits_for_the_lowest(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(4, parts.version)
    explorer = parts.explorer()
    claims = await claim_all(explorer)
    for ordinal in (3, 2, 1):
        assert await explorer.answer(claims[ordinal], samples_of(claims[ordinal]))
    with raises(DeadlineExceeded, missing=re.compile(r"0 \(claimed by a \d+ s ago\)")):
        await dispatcher.take(2, deadline=0.3)
    assert await explorer.answer(claims[0], samples_of(claims[0]))
    assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [0, 1]
    assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [2, 3]


async def test_the_order_of_arrival_takes_what_is_there_sorted(parts):
    dispatcher = await parts.dispatcher(order="arrival")
    await dispatcher.dispatch(4, parts.version)
    explorer = parts.explorer()
    claims = await claim_all(explorer)
    for ordinal in (3, 1):
        assert await explorer.answer(claims[ordinal], samples_of(claims[ordinal]))
    assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [1, 3]


async def test_the_window_bounds_what_is_open_and_an_answer_is_never_refused(parts):
    """Invariant 4."""
    dispatcher = await parts.dispatcher(window=3)
    assert await dispatcher.dispatch(5, parts.version) == 3
    assert await dispatcher.dispatch(1, parts.version) == 0
    assert await answer(parts.explorer(), 8) == [0, 1, 2]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    assert await dispatcher.dispatch(1, parts.version) == 0, "taken ordinals have no fate yet"
    await dispatcher.trained(1, groups)
    assert await dispatcher.dispatch(5, parts.version) == 2
    with raises(DispatchMisused, run_id=parts.run_id, window=3):
        await dispatcher.take(4, deadline=1)


async def test_a_stale_group_is_asked_for_again_and_a_filtered_one_makes_room(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer()
    await answer(explorer, 2)

    def usable(group):
        if group.ordinal == 0 and group.attempt == 1:
            return "stale"
        return "filtered" if group.ordinal == 1 else True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        groups = await dispatcher.take(2, deadline=PATIENCE, usable=usable)
        tasks.cancel_scope.cancel()
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (2, 1)]
    await dispatcher.trained(1, groups)
    [step_event] = await events(parts, StepTrained)
    assert step_event.dropped == {"filtered": ((1, 1),)}
    again = [
        rollout for event in await events(parts, RolloutsDispatched) for rollout in event.reissued
    ]
    assert [(rollout.ordinal, rollout.attempt, rollout.reason) for rollout in again] == [
        (0, 2, "stale")
    ]


async def test_a_checkpoint_holds_the_ledger_that_its_step_told(parts):
    dispatcher = await parts.dispatcher()
    before = dispatcher.ledger_at(0)
    assert (before.next, before.trained) == (0, 0)
    await dispatcher.dispatch(4, parts.version)
    assert dispatcher.ledger_at(0) == before, "no step was told yet"
    await answer(parts.explorer(), 4)
    groups = await dispatcher.take(1, deadline=PATIENCE)
    await dispatcher.trained(1, groups)
    ledger = dispatcher.ledger_at(1)
    # The next step drops an ordinal, and asks for another one, before step 1 is saved.
    filtered = {1: "filtered"}
    later = await dispatcher.take(
        1, deadline=PATIENCE, usable=lambda group: filtered.get(group.ordinal, True)
    )
    assert ordinals(later) == [2]
    await dispatcher.dispatch(1, parts.version)
    assert dispatcher.ledger_at(1) == ledger
    assert (ledger.mark, ledger.next, ledger.trained, ledger.dropped) == (1, 4, 1, {})
    await dispatcher.trained(2, later)
    assert dispatcher.ledger_at(2).dropped == {"filtered": 1}


async def keep_answering(explorer):
    while True:
        await answer(explorer, 8)


async def test_a_failed_attempt_is_issued_again_and_exhausted_ones_are_dropped(parts):
    dispatcher = await parts.dispatcher(max_attempts=2, prompts_per_step=1, window=2)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer()

    async def explore():
        while True:
            for claim in await explorer.claim(1, seconds=PATIENCE):
                if claim.request.ordinal == 0:
                    await explorer.fail(claim, "the reward died")
                else:
                    await explorer.answer(claim, samples_of(claim))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(explore)
        groups = await dispatcher.take(1, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    await dispatcher.trained(1, groups)
    assert ordinals(groups) == [1]
    [step_event] = await events(parts, StepTrained)
    assert step_event.dropped == {"attempts": ((0, 0),)}
    assert dispatcher.ledger.dropped == {"attempts": 1}


async def test_a_run_of_which_every_prompt_fails_ends_with_the_reason(parts):
    dispatcher = await parts.dispatcher(max_attempts=2, prompts_per_step=9, window=100)
    await dispatcher.dispatch(9, parts.version)
    explorer = parts.explorer()

    async def explore():
        while True:
            for claim in await explorer.claim(9, seconds=PATIENCE):
                await explorer.fail(claim, "the reward died")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(explore)
        failures = {"in_a_row": 9, "attempts": 2, "reason": "the reward died"}
        with raises(RolloutsFailed, run_id=parts.run_id, **failures):
            await dispatcher.take(9, deadline=PATIENCE)
        tasks.cancel_scope.cancel()


async def test_the_claim_of_a_silent_explorer_lapses_and_its_late_answer_is_discarded(parts):
    dispatcher = await parts.dispatcher(claim_lease=LEASE)
    await dispatcher.dispatch(2, parts.version)
    silent, lively = parts.explorer("silent", lease=LEASE), parts.explorer("lively", lease=LEASE)
    claims = await claim_all(silent)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, lively)
        groups = await dispatcher.take(2, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert {experience.explorer for group in groups for experience in group.experiences} == {
        "lively"
    }
    assert await silent.renew(claims.values()) == []
    assert not await silent.answer(claims[0], samples_of(claims[0]))
    assert silent.discarded == 1
    await dispatcher.trained(1, groups)
    assert await parts.client.xlen(RunKeys.of(parts.run_id).experiences) == 0


async def test_renewal_keeps_a_claim_and_never_its_deadline(parts):
    dispatcher = await parts.dispatcher(claim_lease=LEASE, request_deadline=5 * LEASE)
    await dispatcher.dispatch(1, parts.version)
    slow, other = parts.explorer("slow", lease=LEASE), parts.explorer("other", lease=LEASE)
    async with anyio.create_task_group() as tasks:
        claims = await claim_all(slow)
        began = anyio.current_time()

        async def hold():
            async with slow.renewing(claims.values()) as still:
                while still:
                    await anyio.sleep(0.01)

        tasks.start_soon(hold)
        tasks.start_soon(keep_answering, other)
        await dispatcher.take(1, deadline=PATIENCE)
        assert anyio.current_time() - began > 4 * LEASE
        tasks.cancel_scope.cancel()
    again = [
        rollout for event in await events(parts, RolloutsDispatched) for rollout in event.reissued
    ]
    # A loaded machine may renew too late: then the claim lapses first.
    assert again[-1].reason in ("deadline", "lapsed")


async def test_requests_that_were_never_written_are_issued_again(parts):
    """Invariant 2."""
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    keys = RunKeys.of(parts.run_id)
    await parts.client.xtrim(keys.rollouts, maxlen=0)
    explorer = parts.explorer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [0, 1]
        tasks.cancel_scope.cancel()


async def test_streams_that_vanish_are_only_recomputed(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    keys = RunKeys.of(parts.run_id)
    explorer = parts.explorer()
    await answer(explorer)
    await parts.client.delete(keys.rollouts, keys.experiences)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [0, 1]
        tasks.cancel_scope.cancel()


async def test_entries_that_are_no_answers_are_freed(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    key = RunKeys.of(parts.run_id).experiences
    await parts.client.xadd(key, {"e": b"nonsense"})
    await parts.client.xadd(key, {"failed": "nonsense", "reason": "none"})
    await answer(parts.explorer())
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    assert await parts.client.xlen(key) == 0


async def test_a_group_is_trained_once(parts):
    """Invariant 1."""
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    await answer(parts.explorer())
    groups = await dispatcher.take(1, deadline=PATIENCE)
    await dispatcher.trained(1, groups)
    with raises(LedgerError, fault="untaken", step=2):
        await dispatcher.trained(2, groups)
    with raises(LedgerError, fault="step", actual=1, step=2):
        dispatcher.ledger_at(2)
    assert len(await events(parts, StepTrained)) == 1


async def test_a_step_needs_a_version_that_may_serve_it(parts):
    dispatcher = await parts.dispatcher()
    with raises(DispatchMisused, run_id=parts.run_id, count=None):
        await dispatcher.take(1, deadline=PATIENCE)


async def test_a_restored_ledger_asks_for_its_open_ordinals_first(parts):
    """Invariant 1."""
    ledger = Ledger(next=4, mark=1, settled=[(2, 2)], trained=2, fingerprint=None)
    dispatcher = await parts.dispatcher(ledger)
    assert await dispatcher.dispatch(3, parts.version) == 3
    [dispatch_event] = await events(parts, RolloutsDispatched)
    assert dispatch_event.ordinals == ((1, 1), (3, 4))
    assert await answer(parts.explorer(), 8) == [1, 3, 4]
    assert ordinals(await dispatcher.take(2, deadline=PATIENCE)) == [1, 3]


async def test_another_task_set_drops_what_was_open(parts):
    ledger = Ledger(next=2, mark=0, fingerprint="sha256:" + "2" * 64)
    dispatcher = await parts.dispatcher(ledger)
    await dispatcher.dispatch(1, parts.version)
    await answer(parts.explorer())
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    [step_event] = await events(parts, StepTrained)
    assert (step_event.trained, step_event.dropped) == (((2, 2),), {"task-set": ((0, 1),)})


async def test_answers_are_kept_until_a_checkpoint_covers_them(parts):
    dispatcher = await parts.dispatcher(keep_answers="checkpoint")
    key = RunKeys.of(parts.run_id).experiences
    explorer = parts.explorer()
    for step in (1, 2):
        await dispatcher.dispatch(1, parts.version)
        await answer(explorer)
        await dispatcher.trained(step, await dispatcher.take(1, deadline=PATIENCE))
    assert await parts.client.xlen(key) == 4
    await dispatcher.checkpointed(1)
    assert await parts.client.xlen(key) == 2


async def test_requests_to_come_name_the_newest_version(parts):
    dispatcher = await parts.dispatcher()
    newer = StepRef(parts.version.epoch, 3)
    await dispatcher.dispatch(0, newer, exact=True)
    explorer = parts.explorer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert group.experiences[0].oldest_version == newer


# --- staleness --------------------------------------------------------------------------------


async def test_every_answer_that_is_too_old_is_asked_for_again_before_its_step_comes(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(4, parts.version)
    explorer = parts.explorer()
    await answer(explorer, 4)
    newer = StepRef(parts.version.epoch, 2)
    await dispatcher.dispatch(0, newer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        groups = await dispatcher.take(1, deadline=PATIENCE, oldest=2)
        tasks.cancel_scope.cancel()
    assert [(group.ordinal, group.attempt, group.oldest_step) for group in groups] == [(0, 2, 2)]
    reissued = [
        rollout for event in await events(parts, RolloutsDispatched) for rollout in event.reissued
    ]
    assert {(rollout.ordinal, rollout.reason) for rollout in reissued} == {
        (at, "stale") for at in range(4)
    }


@pytest.mark.parametrize(("when_stale", "expected"), [("wait", [0, 2]), ("drop", [1, 2])])
async def test_a_step_waits_for_what_the_next_one_could_not_use_or_goes_on(
    parts, when_stale, expected
):
    dispatcher = await parts.dispatcher(order="arrival", when_stale=when_stale)
    explorer = parts.explorer()
    await dispatcher.dispatch(1, parts.version)
    await dispatcher.dispatch(3, StepRef(parts.version.epoch, 1))
    [slow, *others] = await explorer.claim(4, seconds=PATIENCE)
    for claim in others[1:2] + others[:1]:
        await explorer.answer(claim, samples_of(claim))

    async def answer_late():
        if when_stale == "wait":
            await until(lambda: dispatcher.waits_for(2))
            await explorer.answer(slow, samples_of(slow))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer_late)
        groups = await dispatcher.take(2, deadline=PATIENCE, oldest=0)
    assert ordinals(groups) == expected


async def test_a_request_that_is_given_back_as_superseded_names_the_newest_version(parts):
    dispatcher = await parts.dispatcher(max_attempts=1)
    await dispatcher.dispatch(1, parts.version, exact=True)
    newer = StepRef(parts.version.epoch, 2)
    await dispatcher.dispatch(0, newer, exact=True)
    explorer = parts.explorer()
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    assert claim.request.oldest == parts.version
    await explorer.give_back(claim)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_answering, explorer)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert (group.attempt, group.experiences[0].oldest_version) == (2, newer)
    [reissue] = [
        rollout for event in await events(parts, RolloutsDispatched) for rollout in event.reissued
    ]
    assert reissue.reason == "superseded", "it is no failed attempt, of which there was but one"
