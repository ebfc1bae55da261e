"""While what answers depend on fails for every request, the dispatch pauses and nothing is lost."""

import anyio
import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import reward_error_of, samples_of
from tests.support.waits import PATIENCE
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.rollouts import DependencyAway, RewardsFailed
from trinity_events.rollouts.breaker import CircuitBreaker, DependencyFailures
from trinity_schemas import FailedDependency, RolloutsDispatched, decode_envelope

SERVICE = "the reward service http://reward:8000"


def fail(failures: DependencyFailures, ordinal: int, now: float, **given) -> list[int]:
    """Report a failed request; return the ordinals whose attempt is spent."""
    suspect = failures.make_suspect(ordinal, "explorer-0", "answered 503")
    given = {"unreachable": False, "is_alone": False} | given
    return [spent.ordinal for spent in failures.add_failure(suspect, SERVICE, now=now, **given)]


@pytest.fixture
def failures() -> DependencyFailures:
    made = DependencyFailures(CircuitBreaker(), "training")
    made.add_answer(0.0)
    return made


def test_three_failures_in_a_row_open_the_circuit_and_spend_nothing(failures):
    assert [fail(failures, ordinal, 1.0) for ordinal in (1, 2)] == [[], []]
    assert failures.outage is None
    assert fail(failures, 3, 2.0) == []
    assert (failures.outage.dependency, failures.outage.began) == (SERVICE, 2.0)
    assert failures.add_answer(40.0) == [], "they were failures of every request"
    assert failures.outage is None


def test_a_failure_among_answers_is_its_own(failures):
    fail(failures, 1, 1.0)
    fail(failures, 2, 1.0)
    assert sorted(spent.ordinal for spent in failures.add_answer(2.0)) == [1, 2]
    assert failures.add_answer(3.0) == [], "once"


def test_one_prompt_that_fails_again_and_again_opens_nothing_unless_nothing_answers(failures):
    for now in range(9):
        assert fail(failures, 7, float(now)) == []
    assert failures.outage is None
    assert fail(failures, 7, 9.0, is_alone=True) == [7]
    assert fail(failures, 7, 9.0, unreachable=True, is_alone=True) == []
    assert failures.outage is not None


def test_a_dependency_that_never_worked_is_not_waited_for():
    failures = DependencyFailures(CircuitBreaker(), "training")
    assert [fail(failures, ordinal, 0.0) for ordinal in (1, 2, 3)] == [[1], [2], [3]]
    assert failures.outage is None


def test_the_dispatchers_of_an_epoch_share_the_circuit():
    breaker = CircuitBreaker()
    training, evaluation = (DependencyFailures(breaker, name) for name in ("t", "e"))
    training.add_answer(0.0)
    fail(evaluation, 0, 1.0)
    for ordinal in range(3):
        fail(training, ordinal, 1.0)
    assert evaluation.outage is training.outage is not None
    assert training.add_answer(9.0) == []
    assert evaluation.add_answer(9.0) == [], "its failure was one of the outage"


def test_probes_go_out_one_at_a_time_at_growing_intervals(failures):
    for ordinal in range(3):
        fail(failures, ordinal, 0.0)
    times, now = [], 0.0
    while now < 130:
        if failures.admit(5, False, now):
            assert failures.admit(5, True, now) == 0, "the probe before is not answered"
            failures.start_probe(0, now)
            times.append(now)
        now += 0.5
    assert times == [1, 3, 7, 15, 31, 61, 91, 121]
    failures.add_answer(130.0)
    assert failures.admit(5, True, 130.0) == 5


async def give_back(explorer, claim, *, unreachable=True):
    error = reward_error_of(claim, explorer.name)
    dependency = FailedDependency(SERVICE, unreachable)
    await explorer.fail(claim, f"{SERVICE} answered 503", error, dependency=dependency)


async def reissued(parts):
    return [
        request.reason
        for entry in await parts.publisher.log.read()
        if isinstance(event := decode_envelope(entry.payload).event, RolloutsDispatched)
        for request in event.reissued
    ]


class Reports:
    """Reported waits; a test waits for one that names a text."""

    def __init__(self):
        self.texts, self.changed = [], anyio.Event()

    def publish(self, event):
        self.texts.append(getattr(event, "what", ""))


async def test_a_service_that_is_away_costs_no_attempt_and_no_prompt(parts):
    """Each of four prompts fails once, one of them probes, and all are trained."""
    dispatcher = await parts.dispatcher(prompts_per_step=1, max_attempts=1)
    explorer, reports = parts.explorer(), Reports()
    dispatcher._waits = WaitReporter(reports, threshold=0.01)
    await dispatcher.dispatch(1, parts.version)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    await explorer.answer(claim, samples_of(claim))
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    await dispatcher.dispatch(4, parts.version)
    trained = []
    async with anyio.create_task_group() as tasks:

        async def answer():
            for claim in await explorer.claim(4, seconds=PATIENCE):
                await give_back(explorer, claim)
            [probe] = await explorer.claim(4, seconds=PATIENCE)
            assert not probe.request.last_attempt
            await give_back(explorer, probe)
            [probe] = await explorer.claim(4, seconds=PATIENCE)
            await explorer.answer(probe, samples_of(probe))
            while True:
                for claim in await explorer.claim(4, seconds=PATIENCE):
                    await explorer.answer(claim, samples_of(claim))

        tasks.start_soon(answer)
        for step in range(2, 6):
            groups = await dispatcher.take(1, deadline=1.5)  # shorter than the outage
            await dispatcher.trained(step, groups)
            trained += [group.ordinal for group in groups]
        tasks.cancel_scope.cancel()
    assert trained == [1, 2, 3, 4]
    assert {*await reissued(parts)} == {"unavailable"}
    assert dispatcher.ledger.dropped == {}
    assert any(SERVICE in text and "answered 503" in text for text in reports.texts)


async def test_a_prompt_for_which_alone_the_service_fails_meets_the_policy(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(3, parts.version)
    explorer, attempts = parts.explorer(), []

    async def explore():
        while True:
            for claim in await explorer.claim(1, seconds=PATIENCE):
                if claim.request.ordinal != 1:
                    await explorer.answer(claim, samples_of(claim))
                    continue
                attempts.append(claim.request.last_attempt)
                if claim.request.last_attempt:
                    await explorer.fail(claim, "answered 500", reward_error_of(claim, "a"))
                else:
                    await give_back(explorer, claim, unreachable=False)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(explore)
        with raises(RewardsFailed, ordinal=1):
            while True:
                groups = await dispatcher.take(1, deadline=PATIENCE)
                await dispatcher.trained(groups[0].ordinal + 1, groups)
        tasks.cancel_scope.cancel()
    assert attempts[-1] and len(attempts) <= dispatcher.settings.max_attempts + 1


async def test_an_outage_that_lasts_too_long_ends_the_run_with_the_name_of_the_service(parts):
    dispatcher = await parts.dispatcher(prompts_per_step=1, outage_timeout=0.5)
    explorer = parts.explorer()
    await dispatcher.dispatch(4, parts.version)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    await explorer.answer(claim, samples_of(claim))
    await dispatcher.take(1, deadline=PATIENCE)
    for claim in await explorer.claim(3, seconds=PATIENCE):
        await give_back(explorer, claim)
    with raises(DependencyAway, dependency=SERVICE, run_id=parts.run_id):
        await dispatcher.take(1, deadline=PATIENCE)
    assert dispatcher.ledger.dropped == {}
