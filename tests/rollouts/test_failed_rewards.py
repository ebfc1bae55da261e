"""A reward that fails has one effect on its request, and is never passed over in silence."""

import anyio
import pytest
from msgspec.structs import replace

from tests.support.errors import raises
from tests.support.rollout_parts import answer, reward_error_of, samples_of
from tests.support.waits import PATIENCE
from trinity_events.analysis.audit import Auditor
from trinity_events.core.ledger import Ledger
from trinity_events.core.reward_errors import REWARD_FAILED
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_events.rollouts import AnswerLimits, Exclusions, RewardsFailed
from trinity_events.rollouts.exclusions import FailureStreaks
from trinity_schemas import (
    ExplorerExcluded,
    LedgerRestored,
    RewardErrorReported,
    RolloutsDispatched,
    StepRef,
    StepTrained,
    decode_envelope,
)

REASON = "the reward mine raised KeyError: 'a' (reward.py, line 2), for the answer 'four'"


async def fail(explorer, claim):
    await explorer.fail(claim, REASON, reward_error_of(claim, explorer.name))


async def fail_all(explorer):
    while True:
        for claim in await explorer.claim(1, seconds=PATIENCE):
            await fail(explorer, claim)


async def judge_but(explorer, failing):
    """Answer requests, and fail those of some ordinals."""
    while True:
        for claim in await explorer.claim(1, seconds=PATIENCE):
            if claim.request.ordinal in failing:
                await fail(explorer, claim)
            else:
                await explorer.answer(claim, samples_of(claim, explorer.name))


async def take(dispatcher, count, *explorers):
    """Take groups while explorers explore, each as its function says."""
    async with anyio.create_task_group() as tasks:
        for explore, *arguments in explorers:
            tasks.start_soon(explore, *arguments)
        groups = await dispatcher.take(count, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    return [group.ordinal for group in groups], groups


async def envelopes_of(parts):
    return [decode_envelope(entry.payload) for entry in await parts.publisher.log.read()]


async def events(parts, kind):
    return [
        envelope.event for envelope in await envelopes_of(parts) if isinstance(envelope.event, kind)
    ]


async def reissued(parts):
    return [
        request for event in await events(parts, RolloutsDispatched) for request in event.reissued
    ]


async def audit(parts):
    auditor = Auditor(parts.run_id)
    for envelope in await envelopes_of(parts):
        auditor.add(envelope)
    [*_, books] = auditor.audit().lineages
    return books


async def test_by_default_the_first_failed_reward_ends_the_run_and_its_prompt_stays_open(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer("bad")
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    await fail(explorer, claim)
    for _ in range(2):  # A trainer that asks again gets the same error, and no second attempt.
        failure = {"run_id": parts.run_id, "ordinal": 0, "explorer": "bad"}
        with raises(RewardsFailed, **failure, reason=REASON, in_a_row=1):
            await dispatcher.take(2, deadline=PATIENCE)
    assert await events(parts, RewardErrorReported) == [reward_error_of(claim, "bad")], (
        "before the run ends"
    )
    await dispatcher.publish_dropped()
    books = await audit(parts)
    assert (books.open, books.dropped, books.balanced) == (2, {}, True)
    assert await reissued(parts) == []


async def test_a_group_is_dropped_once_and_its_prompt_is_not_issued_again(parts):
    dispatcher = await parts.dispatcher(on_reward_error="drop_group")
    await dispatcher.dispatch(2, parts.version)
    ordinals, groups = await take(dispatcher, 2, (judge_but, parts.explorer(), {0, 2}))
    assert ordinals == [1, 3], "others come in the place of those that were dropped"
    await dispatcher.trained(1, groups)
    [trained] = await events(parts, StepTrained)
    assert trained.dropped == {REWARD_FAILED: ((0, 0), (2, 2))}
    assert await reissued(parts) == []
    books = await audit(parts)
    assert (books.dropped, books.trained, books.balanced) == ({REWARD_FAILED: 2}, 2, True)


@pytest.mark.parametrize("published", [False, True])
async def test_a_dropped_ordinal_has_one_fate_after_a_kill_and_a_resume(parts, published):
    dispatcher = await parts.dispatcher(on_reward_error="drop_group", prompts_per_step=1)
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer()
    _, groups = await take(dispatcher, 1, (judge_but, explorer, {0}))
    if published:
        await dispatcher.trained(1, groups)
    step = int(published)
    ledger = dispatcher.ledger_at(step)
    at = StepRef(parts.publisher.epoch, step)
    epoch = await open_run(parts.client, parts.run_id, resume_from=at)
    parts.publisher = AsyncPublisher(parts.publisher.log, epoch, new_producer("trainer"))
    parts.version = StepRef(epoch, step)
    await parts.publisher.publish(LedgerRestored(ledger=ledger, digest=ledger.digest))
    resumed = await parts.dispatcher(
        Ledger.restored(ledger), on_reward_error="drop_group", prompts_per_step=1
    )
    await resumed.dispatch(2, parts.version)
    ordinals, groups = await take(resumed, 1, (judge_but, parts.explorer(), {0}))
    await resumed.trained(step + 1, groups)
    books = await audit(parts)
    assert ordinals == [2 if published else 1]
    assert (books.dropped, books.contradictions) == ({REWARD_FAILED: 1}, [])


async def test_rewards_that_fail_in_a_row_end_the_run_with_their_cause(parts):
    dispatcher = await parts.dispatcher(
        on_reward_error="drop_group", max_consecutive_failures=3, prompts_per_step=1
    )
    await dispatcher.dispatch(1, parts.version)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail_all, parts.explorer("bad"))
        with raises(RewardsFailed, in_a_row=3, reason=REASON):
            await dispatcher.take(1, deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    await dispatcher.publish_dropped()
    [dropped] = [
        event.dropped for event in await events(parts, RolloutsDispatched) if event.dropped
    ]
    assert dropped == {REWARD_FAILED: ((0, 1),)}, "the prompt that ends the run is open"


@pytest.mark.parametrize("of_reward", [True, False])
async def test_an_explorer_that_fails_each_request_while_others_answer_is_excluded(
    parts, of_reward
):
    dispatcher = await parts.dispatcher(
        on_reward_error="drop_group", max_consecutive_failures=3, max_attempts=9
    )
    await dispatcher.dispatch(8, parts.version)
    sound, bad = parts.explorer("sound"), parts.explorer("bad")
    assert await answer(sound) == [0]
    for claim in await bad.claim(4, seconds=PATIENCE):
        if of_reward:
            await fail(bad, claim)
        else:
            await bad.fail(claim, "no memory is left")
    ordinals, _ = await take(dispatcher, 2, (judge_but, sound, ()))
    reason = REASON if of_reward else "no memory is left"
    [excluded] = await events(parts, ExplorerExcluded)
    assert (excluded.explorer, excluded.failed, excluded.reason) == ("bad", 3, reason)
    assert ordinals == ([0, 4] if of_reward else [0, 1])
    assert dispatcher.ledger.dropped == ({REWARD_FAILED: 3} if of_reward else {})
    again = {(request.ordinal, request.reason) for request in await reissued(parts)}
    assert (4, "excluded") in again, "what it failed after its exclusion costs no prompt"


async def test_a_score_is_taken_only_where_the_run_is_configured_for_it(parts):
    def scored(claim, explorer, score=-1.0):
        return [
            replace(sample, reward=score, reward_error=REASON)
            for sample in samples_of(claim, explorer)
        ]

    limits = AnswerLimits(error_score=-1.0)
    for changes in ({}, {"limits": limits, "on_reward_error": "score"}):
        dispatcher = await parts.dispatcher(prompts_per_step=1, **changes)
        await dispatcher.dispatch(1, parts.version)
        explorer = parts.explorer("scorer")
        [claim] = await explorer.claim(1, seconds=PATIENCE)
        first, second = scored(claim, explorer.name)
        await explorer.answer(claim, [replace(first, reward=0.5, reward_error=""), second])
        _, [group] = await take(dispatcher, 1, (judge_but, parts.explorer("sound"), ()))
        by = "scorer" if changes else "sound"
        assert {experience.explorer for experience in group.experiences} == {by}
    assert [request.reason for request in await reissued(parts)] == ["malformed"]


async def test_requests_without_one_reward_end_a_run_that_scores_errors(parts):
    dispatcher = await parts.dispatcher(
        limits=AnswerLimits(error_score=0.0),
        on_reward_error="score",
        max_consecutive_failures=2,
        prompts_per_step=1,
    )
    await dispatcher.dispatch(3, parts.version)
    explorer = parts.explorer("scorer")
    for claim in await explorer.claim(3, seconds=PATIENCE):
        await explorer.answer(
            claim,
            [
                replace(sample, reward=0.0, reward_error=REASON)
                for sample in samples_of(claim, explorer.name)
            ],
        )
    with raises(RewardsFailed, in_a_row=2, explorer="scorer"):
        await dispatcher.take(1, deadline=PATIENCE)


async def test_an_error_that_breaks_the_contract_is_a_failed_attempt(parts):
    dispatcher = await parts.dispatcher(prompts_per_step=1)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer("bad")
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    await explorer._write("fail", claim.entry_id, "why", "bad", b"\xff" * 100)
    ordinals, _ = await take(dispatcher, 1, (judge_but, parts.explorer("sound"), ()))
    assert ordinals == [0]
    assert [request.reason for request in await reissued(parts)] == ["failed"]


# --- failures in a row --------------------------------------------------------------------------


def streaks(limit=3):
    exclusions = Exclusions()
    return FailureStreaks(exclusions, limit), exclusions


def fail_reward(counted, *names):
    return [counted.add_failure(name, "no", of_reward=True) for name in names]


def test_failures_of_all_explorers_in_a_row_end_the_run_and_exclude_none():
    counted, exclusions = streaks()
    fail_reward(counted, "a", "b")
    assert not counted.ends_run
    fail_reward(counted, "a")
    assert counted.ends_run and exclusions.names == ()


def test_an_answer_between_two_failures_begins_the_count_again():
    counted, _ = streaks()
    for _ in range(5):
        fail_reward(counted, "a", "a")
        counted.add_answer("a")
    assert not counted.ends_run


def test_an_explorer_that_alone_fails_is_excluded_and_the_run_continues():
    counted, exclusions = streaks()
    counted.add_answer("sound")
    assert [
        exclusion and exclusion.failed for exclusion in fail_reward(counted, "a", "a", "a")
    ] == [None, None, 3]
    assert (exclusions.names, counted.ends_run) == (("a",), False)


def test_the_last_explorer_that_answers_is_never_excluded():
    counted, exclusions = streaks()
    counted.add_answer("a")
    fail_reward(counted, "a", "a", "a")
    assert (exclusions.names, counted.ends_run) == ((), True)


def test_failures_for_another_reason_than_the_reward_end_no_run():
    counted, exclusions = streaks()
    for _ in range(9):
        counted.add_failure("a", "no memory", of_reward=False)
    assert (exclusions.names, counted.ends_run) == ((), False)
