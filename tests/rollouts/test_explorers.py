"""Explorers claim, renew and answer; the first answer wins."""

import os
import signal
import sys
import threading

import anyio
import pytest

from tests.support.errors import raises
from tests.support.faulty_proxy import Proxy, command
from tests.support.rollout_parts import FINGERPRINT, LEASE, answer, samples_of, settings
from tests.support.waits import PATIENCE, child, until
from trinity_events.core.ledger import Ledger
from trinity_events.errors import StaleEpoch
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_events.rollouts import RolloutClient, RolloutDispatcher
from trinity_events.rollouts.client import SamplesDiffer
from trinity_events.server import connect
from trinity_schemas import RunKeys, StepRef

CLAIM_AND_HANG = """
import asyncio, sys
from trinity_events.rollouts import RolloutClient, RolloutDispatcher
from trinity_events.server import connect

async def main(url, run_id):
    async with connect(url) as client:
        explorer = RolloutClient(client, run_id, 1, "killed", lease=float(sys.argv[3]))
        claims = await explorer.claim(8, seconds=120)
        async with explorer.renewing(claims):
            print(len(claims), flush=True)
            await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:3]))
"""


async def test_of_two_explorers_that_race_each_request_goes_to_one(parts, redis_url):
    dispatcher = await parts.dispatcher(window=64)
    await dispatcher.dispatch(40, parts.version)
    claimed: list[int] = []
    async with connect(redis_url) as other, anyio.create_task_group() as tasks:

        async def race(client, name):
            explorer = RolloutClient(client, parts.run_id, 1, name, lease=PATIENCE)
            while claims := await explorer.claim(3, seconds=0.01):
                claimed.extend(claim.request.ordinal for claim in claims)

        tasks.start_soon(race, parts.client, "a")
        tasks.start_soon(race, other, "b")
    assert sorted(claimed) == list(range(40))


async def test_of_two_answers_to_one_claim_the_first_counts(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer()
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    answers: list[bool] = []
    async with anyio.create_task_group() as tasks:

        async def say():
            answers.append(await explorer.answer(claim, samples_of(claim)))

        tasks.start_soon(say)
        tasks.start_soon(say)
    assert sorted(answers) == [False, True]
    assert explorer.discarded == 1
    assert await parts.client.xlen(RunKeys.of(parts.run_id).experiences) == claim.request.samples


async def test_several_requests_are_answered_in_one_call(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(3, parts.version)
    explorer = parts.explorer()
    first, second, third = await explorer.claim(3, seconds=PATIENCE)
    assert await explorer.answer(second, samples_of(second))
    answers = [(claim, samples_of(claim)) for claim in (first, second, third)]
    assert await explorer.answer_all(answers) == [True, False, True]
    assert await explorer.answer_all([]) == []
    assert explorer.discarded == 1
    groups = await dispatcher.take(3, deadline=PATIENCE)
    assert [group.ordinal for group in groups] == [0, 1, 2]
    assert [[experience.sample for experience in group.experiences] for group in groups] == [
        [0, 1]
    ] * 3


@pytest.mark.processes
async def test_the_claims_of_a_killed_explorer_come_back(parts, redis_url):
    dispatcher = await parts.dispatcher(claim_lease=LEASE)
    await dispatcher.dispatch(2, parts.version)
    command = [sys.executable, "-c", CLAIM_AND_HANG, redis_url, parts.run_id, str(LEASE)]
    with child(command, stdout=-1) as process:
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        assert line == b"2\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        explorer = parts.explorer("heir", lease=LEASE)
        async with anyio.create_task_group() as tasks:

            async def inherit():
                while True:
                    await answer(explorer, 8)

            tasks.start_soon(inherit)
            groups = await dispatcher.take(2, deadline=PATIENCE)
            tasks.cancel_scope.cancel()
    assert [group.ordinal for group in groups] == [0, 1]
    assert all(group.attempt > 1 for group in groups)


async def test_a_renewed_claim_outlives_many_leases(parts):
    dispatcher = await parts.dispatcher(claim_lease=1.0)
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer(lease=0.1)
    claims = await explorer.claim(1, seconds=PATIENCE)

    async def answer_late():
        async with explorer.renewing(claims) as active_claims:
            await anyio.sleep(2.0)
            assert active_claims == claims
        assert await explorer.answer(claims[0], samples_of(claims[0]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer_late)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
    assert group.attempt == 1


@pytest.mark.parametrize("retry", [False, True], ids=["told of faults", "client retries"])
async def test_a_lost_reply_to_a_claim_costs_no_attempt(parts, redis_url, tmp_path, retry):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(3, parts.version)
    with Proxy(redis_url, tmp_path / "proxy") as proxy:
        async with connect(proxy.url, retry=retry) as client:
            explorer = type(parts)(client, parts.publisher, parts.run_id).explorer()
            [first] = await explorer.claim(1, seconds=PATIENCE)
            lost = proxy.cut("after", command("xreadgroup"))
            claims = await explorer.claim(2, seconds=PATIENCE)
            assert lost.struck.is_set()
            assert [claim.request.ordinal for claim in claims] == [1, 2]
            assert await explorer.claim(1, seconds=0.01) == [], "all three are held"
            for claim in [first, *claims]:
                assert await explorer.answer(claim, samples_of(claim))
    groups = await dispatcher.take(3, deadline=PATIENCE)
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 1), (1, 1), (2, 1)]


async def test_claims_of_a_call_that_was_cancelled_come_with_the_next_one(
    parts, redis_url, tmp_path
):
    dispatcher = await parts.dispatcher()
    with Proxy(redis_url, tmp_path / "proxy") as proxy:
        async with connect(proxy.url) as client:
            explorer = type(parts)(client, parts.publisher, parts.run_id).explorer()
            assert await explorer.claim(1, seconds=0.01) == []
            claimed, cancelled = threading.Event(), threading.Event()

            def hold_reply(_):
                claimed.set()
                cancelled.wait(PATIENCE)

            proxy.at("after", command("xreadgroup"), hold_reply)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: explorer.claim(1, seconds=PATIENCE))
                await dispatcher.dispatch(1, parts.version)
                assert await anyio.to_thread.run_sync(claimed.wait, PATIENCE)
                tasks.cancel_scope.cancel()
            cancelled.set()
            [claim] = await explorer.claim(1, seconds=PATIENCE)
    assert (claim.request.ordinal, claim.request.attempt) == (0, 1)


async def test_an_explorer_that_was_restarted_takes_up_its_claims(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    before = await parts.explorer().claim(2, seconds=PATIENCE)
    restarted = parts.explorer()
    assert await restarted.claim(1, seconds=PATIENCE) == before[:1]
    assert await restarted.claim(2, seconds=PATIENCE) == before[1:]
    assert await restarted.claim(1, seconds=0.01) == []


async def test_tasks_that_claim_at_once_get_different_requests(parts):
    dispatcher = await parts.dispatcher()
    explorer = parts.explorer()
    claimed = []

    async def claim():
        claimed.extend(await explorer.claim(1, seconds=PATIENCE))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(claim)
        await dispatcher.dispatch(4, parts.version)
    assert sorted(claim.request.ordinal for claim in claimed) == [0, 1, 2, 3]


async def test_streams_that_vanish_end_no_explorer(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer(lease=0.1)
    claims = await explorer.claim(2, seconds=PATIENCE)
    keys = RunKeys.of(parts.run_id)
    async with explorer.renewing(claims) as active_claims:
        await parts.client.delete(keys.rollouts, keys.experiences)
        await until(lambda: not active_claims)
    assert not await explorer.answer(claims[0], samples_of(claims[0]))
    await explorer.fail(claims[1], "the stream is gone")
    await explorer.leave()
    assert await explorer.claim(1, seconds=0.01) == []


async def members(parts):
    key = RunKeys.of(parts.run_id).rollouts
    consumers = await parts.client.xinfo_consumers(key, f"explorers-{parts.publisher.epoch}")
    return sorted(consumer["name"].decode() for consumer in consumers)


async def test_an_explorer_leaves_its_group_unless_it_holds_a_claim(parts):
    await parts.explorer("early").leave()
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    busy, idle = parts.explorer("busy"), parts.explorer("idle")
    [claim] = await busy.claim(1, seconds=PATIENCE)
    assert await idle.claim(1, seconds=0.01) == []
    for explorer in (busy, idle):
        await explorer.leave()
    assert await members(parts) == ["busy"]
    assert await busy.answer(claim, samples_of(claim))
    await busy.leave()
    assert await members(parts) == []
    await dispatcher.dispatch(1, parts.version)
    assert await answer(idle) == [1], "it comes back by asking"
    await open_run(parts.client, parts.run_id)
    await idle.leave()


async def test_explorers_that_are_gone_do_not_stay_in_their_group(parts):
    dispatcher = await parts.dispatcher(order="arrival", idle_member=0.0)
    await dispatcher.dispatch(2, parts.version)
    key, group = RunKeys.of(parts.run_id).rollouts, f"explorers-{parts.publisher.epoch}"
    for number in range(20):
        name = f"short-lived-{number}"
        # Redis 7.0 makes no member of a client that found nothing.
        await parts.client.xgroup_createconsumer(key, group, name)
        await parts.explorer(name).claim(1, seconds=0.01)
    assert len(await members(parts)) == 20
    await answer(parts.explorer("short-lived-1"))
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    assert await members(parts) == ["short-lived-0"], "it still holds a claim"


async def test_an_answer_has_the_samples_that_were_asked_for(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    explorer = parts.explorer()
    first, second = await explorer.claim(2, seconds=PATIENCE)
    with raises(SamplesDiffer, samples=2, foreign=None):
        await explorer.answer(first, samples_of(first)[:1])
    with raises(SamplesDiffer, samples=2, foreign=0):
        await explorer.answer(first, samples_of(second))


async def test_a_claim_returns_nothing_while_nothing_is_asked_for(parts):
    assert await parts.explorer().claim(1, seconds=0.01) == [], "no dispatcher has started"
    await parts.dispatcher()
    assert await parts.explorer().claim(1, seconds=0.01) == []


async def test_what_is_no_request_is_skipped(parts):
    dispatcher = await parts.dispatcher()
    await parts.client.xadd(RunKeys.of(parts.run_id).rollouts, {"e": b"nonsense"}, id="1-0")
    assert await parts.explorer().claim(1, seconds=0.01) == []
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer()) == [0]


async def open_anew(parts, **how):
    """Open the next epoch of the run, in which other parts work."""
    epoch = await open_run(parts.client, parts.run_id, **how)
    publisher = AsyncPublisher(parts.publisher.log, epoch, new_producer("trainer"))
    return type(parts)(parts.client, publisher, parts.run_id)


async def test_a_new_epoch_withdraws_requests_and_answers(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(3, parts.version)
    explorer = parts.explorer()
    await answer(explorer)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    newer = await open_anew(parts)
    await newer.dispatcher()
    keys = RunKeys.of(parts.run_id)
    assert await parts.client.xlen(keys.rollouts) == await parts.client.xlen(keys.experiences) == 0
    for late in (
        lambda: explorer.answer(claim, samples_of(claim)),
        lambda: explorer.fail(claim, "reason"),
        lambda: explorer.renew([claim]),
        lambda: explorer.claim(1, seconds=PATIENCE),
        lambda: dispatcher.dispatch(1, parts.version),
        lambda: dispatcher.take(1, deadline=PATIENCE),
    ):
        with pytest.raises(StaleEpoch):
            await late()


async def test_a_new_epoch_ends_an_explorer_that_waits_or_renews(parts):
    await (await parts.dispatcher()).dispatch(1, parts.version)
    explorer = parts.explorer(lease=0.1)
    claims = await explorer.claim(1, seconds=PATIENCE)
    ended: list[str] = []
    async with anyio.create_task_group() as tasks:

        async def wait():
            with pytest.raises(StaleEpoch):
                await parts.explorer("waiting").claim(1, seconds=PATIENCE)
            ended.append("waiting")

        async def work():
            with pytest.raises(StaleEpoch):
                async with explorer.renewing(claims):
                    await anyio.sleep(PATIENCE)
            ended.append("working")

        tasks.start_soon(wait)
        tasks.start_soon(work)
        newer = await open_anew(parts)
        await newer.dispatcher()
        await until(lambda: len(ended) == 2)


async def test_kept_answers_are_used_by_the_next_epoch(parts):
    dispatcher = await parts.dispatcher(keep_answers="checkpoint")
    await dispatcher.dispatch(3, parts.version)
    await answer(parts.explorer(), 2)
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    newer = await open_anew(parts, resume_from=parts.version)
    again = await newer.dispatcher(keep_answers="checkpoint")
    await again.dispatch(3, newer.version)
    assert await answer(newer.explorer(), 8) == [2]
    groups = await again.take(3, deadline=PATIENCE)
    assert [group.experiences[0].epoch for group in groups] == [1, 1, 2]
    await again.trained(1, groups)
    await again.checkpointed(1)
    assert await parts.client.xlen(RunKeys.of(parts.run_id).experiences) == 0


async def answered_by_versions(parts, *steps):
    """A kept answer of each ordinal, by the version of a step each."""
    dispatcher = await parts.dispatcher(keep_answers="checkpoint")
    for step in steps:
        await dispatcher.dispatch(1, StepRef(parts.publisher.epoch, step))
    await answer(parts.explorer(), len(steps))


async def kept(parts, stands=None, **changes):
    """Versions whose answers a new epoch uses."""
    options = settings(parts.run_id, parts.publisher.epoch, keep_answers="checkpoint", **changes)
    ledger = Ledger(fingerprint=FINGERPRINT)
    dispatcher = RolloutDispatcher(parts.client, parts.publisher, options, ledger)
    await dispatcher.start(stands)
    await dispatcher.dispatch(options.window, parts.version)
    samples = await parts.client.xlen(RunKeys.of(parts.run_id).experiences)
    count = samples // options.samples
    if not count:
        return []
    groups = await dispatcher.take(count, deadline=PATIENCE, usable=lambda _: True)
    assert {group.experiences[0].epoch for group in groups} == {1}, "the others were freed"
    return [group.experiences[0].oldest_version.step for group in groups]


@pytest.mark.parametrize(("resumed", "used"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
async def test_answers_of_versions_that_do_not_stand_are_freed(parts, resumed, used):
    await answered_by_versions(parts, 0, 1, 2)
    newer = await open_anew(parts, resume_from=StepRef(1, resumed))
    assert await kept(newer) == used


async def test_a_run_that_is_begun_anew_uses_no_answer_of_before(parts):
    await answered_by_versions(parts, 0, 1)
    assert await kept(await open_anew(parts)) == []


async def test_answers_of_earlier_epochs_are_discarded_where_rewards_changed(parts):
    await answered_by_versions(parts, 0, 1)
    newer = await open_anew(parts, resume_from=StepRef(1, 1))
    assert await kept(newer, discards_earlier=True) == []


async def test_a_trainer_may_say_which_versions_stand(parts):
    await answered_by_versions(parts, 0, 1)
    newer = await open_anew(parts)
    assert await kept(newer, lambda version: version == StepRef(1, 0)) == [0]


async def test_answers_of_another_task_set_are_freed(parts):
    await answered_by_versions(parts, 0)
    newer = await open_anew(parts, resume_from=parts.version)
    assert await kept(newer, fingerprint="sha256:" + "2" * 64) == []
