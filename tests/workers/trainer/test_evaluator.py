"""Evaluations are answered by explorers, beside training, each with the version that it names."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.local_training import LocalEngine  # noqa: E402
from tests.support.pipeline import events_of, reducer_task, reports_accepted, until  # noqa: E402
from tests.support.trainer_side import TrainerSide, exploring  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.core.evaluations import evaluated_through  # noqa: E402
from trinity_events.log import open_run  # noqa: E402
from trinity_events.replay import current_state  # noqa: E402
from trinity_events.system.error_text import ungrouped  # noqa: E402
from trinity_schemas import (  # noqa: E402
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    RewardErrorReported,
    StepRef,
    TrainerStatusChanged,
    WeightsApplied,
)
from trinity_workers.evaluation.settings import EvaluationSet  # noqa: E402
from trinity_workers.explorer.explorer import Explorer  # noqa: E402
from trinity_workers.rewards import RewardFault  # noqa: E402
from trinity_workers.rewards.errors import AnswersFailed  # noqa: E402
from trinity_workers.rollouts.held_out_sets import held_out_sets  # noqa: E402
from trinity_workers.rollouts.user_task import task_of  # noqa: E402
from trinity_workers.trainer import Trainer  # noqa: E402
from trinity_workers.trainer.rollouts.evaluator import Evaluator  # noqa: E402

STEPS = 3


pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture
async def config(make_config, redis_url, run_id):
    """A run of the built-in task with two sets of held-out questions, and a reducer."""
    async with reducer_task(redis_url, run_id):
        yield make_config(
            steps=STEPS,
            rollouts={"prompts_per_step": 2, "samples_per_prompt": 3, "claim_lease": 2.0},
            evaluation={
                "sets": {
                    "each": {"count": 5, "samples": 2, "interval": 1},
                    "greedy": {"count": 3, "samples": 1, "temperature": 0.0},
                },
                "timeout": PATIENCE,
            },
            sync={"timeout": PATIENCE},
        )


class EvaluatingTrainer(TrainerSide):
    """Trainer's side with an evaluator, whose loop runs in `evaluating`."""

    async def begin(self) -> None:
        sets = held_out_sets(self.config, task_of(self.config))
        through = evaluated_through(await current_state(self.log))
        self.evaluator = Evaluator(self.config, self.client, self.publisher, sets, through)

    async def publish(self, step: int) -> None:
        await self.evaluator.publishing(step)
        await super().publish(step)

    @asynccontextmanager
    async def evaluating(self, *, last: bool = True):
        """Run the evaluator in the block, and have it end all that is open.

        Training ends after the last block, and the explorers with it.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.evaluator.run)
            yield
            with anyio.fail_after(PATIENCE):
                await self.evaluator.drain()
            if last:
                await self.publisher.publish(TrainerStatusChanged(status="stopped", step=STEPS))
            tasks.cancel_scope.cancel()

    async def evaluations(self, kind):
        events = [envelope.event for envelope in await events_of(self.log, kind)]
        return sorted((event.name, event.version.step) for event in events)


@pytest.fixture
async def trainer(client, publisher, log, config):
    made = EvaluatingTrainer(client, publisher, log, config)
    await made.begin()
    return made


ALL = [("each", 0), ("each", 1), ("each", 2), ("each", 3), ("greedy", 0), ("greedy", 3)]


async def test_every_version_that_is_due_is_evaluated_while_training_goes_on(config, trainer, log):
    dispatcher = await trainer.dispatcher()
    async with (
        exploring(Explorer(config, 0), Explorer(config, 1)) as exploration,
        trainer.evaluating(),
    ):
        for step in range(STEPS):
            await trainer.publish(step)
            await dispatcher.dispatch(2, trainer.version(step), exact=True)
            groups = await dispatcher.take(2, deadline=PATIENCE)
            assert {group.oldest_step for group in groups} == {step}
            await dispatcher.trained(step + 1, groups)
            # As many versions are open as may be, or fewer: the next one is then evaluated too.
            await until(lambda step=step: finished_through(trainer, step))
        await trainer.publish(STEPS)
    assert await trainer.evaluations(EvaluationStarted) == ALL
    assert await trainer.evaluations(EvaluationFinished) == ALL
    for envelope in await events_of(log, EvaluationFinished):
        greedy = envelope.event.name == "greedy"
        assert envelope.event.answers == (3 if greedy else 10)
        assert 0.0 <= envelope.event.metrics["mean"] <= 1.0
        assert ("pass_at_2" in envelope.event.metrics) is not greedy
    assert sum(result.evaluated for result in exploration.results) == 4 * 5 + 2 * 3
    # Neither the ledger nor the staleness of training has seen any of it.
    assert dispatcher.ledger.format_sums() == "6 trained, 0 dropped, 0 open"
    state = await current_state(log)
    assert (state.ledger.trained, state.anomaly_counts) == (6, {})


async def finished_through(trainer, step):
    return ("each", step) in await trainer.evaluations(EvaluationFinished)


async def test_a_late_evaluation_is_of_the_version_that_it_names(config, trainer, log):
    await trainer.dispatcher()
    for step in range(STEPS + 1):
        await trainer.publish(step)
    # The second version is the last that is open beside the last one; the third is passed over.
    expected = [("each", 0), ("each", 1), ("each", 3), ("greedy", 0), ("greedy", 3)]
    assert await trainer.evaluations(EvaluationStarted) == expected
    async with exploring(Explorer(config, 0)), trainer.evaluating():
        pass
    assert await trainer.evaluations(EvaluationFinished) == expected
    await reports_accepted(log)
    served = [envelope.event.version.step for envelope in await events_of(log, WeightsApplied)]
    assert [served[0], *sorted(set(served))] == [STEPS, 0, 1, STEPS]
    assert (await current_state(log)).anomaly_counts == {}


class Hanging(Explorer):
    """Explorer whose judge never ends with a held-out question, until it is told to."""

    async def prepare(self):
        await super().prepare()
        self.released, self.hanging_calls = anyio.Event(), 0
        judge = self._episodes.judge
        questions = {question.prompt for question in self._held_out[0].questions}
        judged = judge.judge

        async def hang(question, answers):
            if question.prompt in questions:
                self.hanging_calls += 1
                await self.released.wait()
            return await judged(question, answers)

        judge.judge = hang


async def test_no_step_of_training_waits_for_an_evaluation(config, trainer):
    dispatcher = await trainer.dispatcher()
    explorer = Hanging(config, 0)
    async with exploring(explorer), trainer.evaluating():
        await trainer.publish(0)
        await until(lambda: is_hanging(explorer))
        for step in range(STEPS):
            if step:
                await trainer.publish(step)
            await dispatcher.dispatch(2, trainer.version(step), exact=True)
            groups = await dispatcher.take(2, deadline=PATIENCE)
            await dispatcher.trained(step + 1, groups)
        assert await trainer.evaluations(EvaluationFinished) == []
        explorer.released.set()
        await trainer.publish(STEPS)
    evaluations = await trainer.evaluations(EvaluationFinished)
    assert {("each", 0), ("each", 3), ("greedy", 0), ("greedy", 3)} <= set(evaluations)


async def explore(explorer):
    await explorer.prepare()
    await explorer.explore()


async def is_hanging(explorer):
    return getattr(explorer, "hanging_calls", 0) > 0


async def test_an_explorer_that_dies_amid_an_evaluation_loses_nothing(config, trainer, log):
    await trainer.dispatcher()
    dying = Hanging(config, 0)
    async with trainer.evaluating():
        await trainer.publish(STEPS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explore, dying)
            await until(lambda: is_hanging(dying))
            tasks.cancel_scope.cancel()  # with claims that are neither answered nor given back
        async with exploring(Explorer(config, 1)):
            with anyio.fail_after(PATIENCE):
                await trainer.evaluator.drain()
            await trainer.publisher.publish(TrainerStatusChanged(status="stopped", step=STEPS))
    assert await trainer.evaluations(EvaluationFinished) == [("each", 3), ("greedy", 3)]
    answers = {
        envelope.event.name: envelope.event.answers
        for envelope in await events_of(log, EvaluationFinished)
    }
    assert answers == {"each": 10, "greedy": 3}


async def test_an_evaluation_that_no_explorer_answers_fails_and_says_so(config, trainer, log):
    trainer.config = config.replaced("evaluation", timeout=0.2)
    await trainer.begin()
    await trainer.publish(STEPS)
    async with trainer.evaluating():
        pass
    assert await trainer.evaluations(EvaluationFailed) == [("each", 3), ("greedy", 3)]
    [reason, _] = [envelope.event.reason for envelope in await events_of(log, EvaluationFailed)]
    assert "did not arrive" in reason and "not claimed" in reason


class Failing(Explorer):
    """Explorer whose judge fails for one answer to each question of a set."""

    async def prepare(self):
        await super().prepare()
        judge = self._episodes.judge
        questions = {question.prompt for question in self._held_out[0].questions}
        judged = judge.judge
        fault = RewardFault(sentence="raised KeyError: 'a'", error_type="KeyError")

        async def fail(question, answers):
            rewards = await judged(question, answers)
            if question.prompt in questions:
                raise AnswersFailed(faults={1: fault}, rewarded={0: rewards[0]})
            return rewards

        judge.judge = fail


async def test_a_reward_that_fails_for_held_out_answers_is_counted_and_named(config, trainer, log):
    await trainer.publish(STEPS)
    async with exploring(Failing(config, 0)), trainer.evaluating():
        pass
    [failed] = [envelope.event for envelope in await events_of(log, EvaluationFailed)]
    assert failed.name == "each"
    assert "the rewards of 5 of 10 answers failed, the first one: raised KeyError" in failed.reason
    assert await trainer.evaluations(EvaluationFinished) == [("greedy", 3)]
    await reports_accepted(log)
    [error] = [envelope.event for envelope in await events_of(log, RewardErrorReported)]
    assert (error.held_out, error.error_type, error.sample) == (True, "KeyError", 1)


async def evaluated_run(config):
    """Train a run of the configuration to its end, with one explorer."""
    trainer, explorer = Trainer(config, LocalEngine(config)), Explorer(config, 0)
    with anyio.fail_after(2 * PATIENCE), ungrouped():
        async with anyio.create_task_group() as tasks:
            await trainer.prepare()
            await explorer.prepare()
            tasks.start_soon(explorer.explore)
            await trainer.train()
        await trainer.shutdown()


async def test_a_run_and_its_resume_evaluate_each_version_once(make_config, client, log, redis_url):
    first = make_config(
        steps=3,
        rollouts={"prompts_per_step": 2, "samples_per_prompt": 2},
        evaluation={"sets": {"two": {"count": 3, "samples": 2, "interval": 2}}},
        checkpoints={"interval": 3},
        sync={"timeout": PATIENCE, "style": "fixed"},
    )
    async with reducer_task(redis_url, first.run_id):
        await evaluated_run(first)
        epoch = await open_run(client, first.run_id, resume_from=StepRef(first.epoch, 3))
        second = msgspec.structs.replace(first, steps=6, epoch=epoch, resumed_step=3)
        await evaluated_run(second)
    versions = [envelope.event.version for envelope in await events_of(log, EvaluationFinished)]
    assert [(version.epoch, version.step) for version in versions] == [
        (1, 0),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 6),
    ]
    assert await events_of(log, EvaluationFailed) == []
    audited = await current_state(log)
    assert (audited.ledger.trained, audited.anomaly_counts) == (12, {})


async def test_results_depend_on_no_explorer_and_no_order(config, trainer, log):
    """The same version gives the same answers, whichever explorers there are."""
    config = config.replaced("explorer", deterministic=True)
    trainer.config = config.replaced(
        "evaluation", sets={"one": EvaluationSet(count=6, samples=3, correct_from=0.1)}
    )
    metrics = []
    for ranks in ((0,), (1, 2)):
        await trainer.begin()
        trainer.evaluator._last_steps.clear()  # the same version once more
        await trainer.publish(STEPS)
        async with anyio.create_task_group() as tasks:
            for rank in ranks:
                tasks.start_soon(explore, Explorer(trainer.config, rank))
            async with trainer.evaluating(last=False):
                pass
            tasks.cancel_scope.cancel()
        metrics.append((await events_of(log, EvaluationFinished))[-1].event.metrics)
    assert metrics[0] == metrics[1]
