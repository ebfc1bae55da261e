"""An explorer answers what it claims, gives back what it cannot answer, and ends with the run."""

import json
import re

import anyio
import msgspec
import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.pipeline import events_of, reducer_task, reports_accepted, until  # noqa: E402
from tests.support.rollout_engines import Steps  # noqa: E402
from tests.support.trainer_side import TrainerSide, exploring  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.errors import CorruptVersion, DeadlineExceeded  # noqa: E402
from trinity_events.log import open_run  # noqa: E402
from trinity_events.rollouts import RolloutDispatcher  # noqa: E402
from trinity_events.rollouts.exclusions import MALFORMED_ANSWERS  # noqa: E402
from trinity_events.rollouts.payloads import RedisPayloads  # noqa: E402
from trinity_events.weights import version_reader  # noqa: E402
from trinity_schemas import (  # noqa: E402
    ExplorerStatusChanged,
    GenerationResumed,
    RewardErrorReported,
    RunClosed,
    RunKeys,
    WeightsApplied,
)
from trinity_workers.config.answer_limits import read_answer_limits  # noqa: E402
from trinity_workers.config.sections.task import TaskConfig  # noqa: E402
from trinity_workers.explorer.explorer import MOST_ABORTS, Explorer  # noqa: E402
from trinity_workers.explorer.versions import RunEnded  # noqa: E402
from trinity_workers.learning.policy import encode_prompt, load_tokenizer  # noqa: E402
from trinity_workers.rewards.settings import RewardsConfig  # noqa: E402
from trinity_workers.rollout_engines import EngineEnded  # noqa: E402
from trinity_workers.rollouts.episodes import OtherTaskSet  # noqa: E402
from trinity_workers.rollouts.user_task import task_of  # noqa: E402
from trinity_workers.trainer.trainer import dispatch_settings  # noqa: E402

STEPS = 3


pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture
async def config(make_config, redis_url, run_id):
    """A run of the built-in task, with a reducer."""
    async with reducer_task(redis_url, run_id):
        yield make_config(
            steps=STEPS,
            rollouts={"prompts_per_step": 2, "samples_per_prompt": 3},
            evaluation={"sets": {}},
            sync={"timeout": PATIENCE},
        )


@pytest.fixture
def trainer(client, publisher, log, config):
    return TrainerSide(client, publisher, log, config)


async def test_what_it_claims_is_answered_with_the_version_that_it_serves(config, trainer, log):
    dispatcher, task = await trainer.dispatcher(), task_of(config)
    tokenizer = load_tokenizer(config.model_folder)
    async with exploring(Explorer(config, 4)) as exploration:
        for step in range(STEPS):
            await trainer.publish(step)
            await dispatcher.dispatch(2, trainer.version(step), exact=True)
            groups = await dispatcher.take(2, deadline=PATIENCE)
            assert [group.ordinal for group in groups] == [2 * step, 2 * step + 1]
            for group in groups:
                prompt = encode_prompt(tokenizer, task.question(group.ordinal).prompt)
                assert len(group.experiences) == 3
                for sample in group.experiences:
                    assert sample.explorer == "explorer-4"
                    assert sample.turns[0].tokens == prompt
                    [(version, count)] = sample.turns[1].versions
                    assert (version, count) == (trainer.version(step), len(sample.turns[1].tokens))
                    assert set(sample.reward_parts) == {"score"}
            await dispatcher.trained(step + 1, groups)
        await trainer.publish(STEPS)
    [result] = exploration.results
    assert (result.rank, result.groups, result.discarded) == (4, 2 * STEPS, 0)
    assert result.applied == STEPS + 1, "the last version is served too"
    await reports_accepted(log)
    statuses = [envelope.event.status for envelope in await events_of(log, ExplorerStatusChanged)]
    assert statuses == ["running", "stopped"]


async def test_an_excluded_explorer_answers_nothing_and_takes_weights_to_the_end(config, trainer):
    dispatcher = await trainer.dispatcher(max_attempts=1)
    for _ in range(MALFORMED_ANSWERS):
        dispatcher.exclusions.add_malformed("explorer-0", "its reward is inf")
    async with exploring(Explorer(config, 0), Explorer(config, 1)) as finished:
        for step in range(STEPS):
            await trainer.publish(step)
            await dispatcher.dispatch(4, trainer.version(step))
            groups = await dispatcher.take(4, deadline=PATIENCE)
            assert {group.experiences[0].explorer for group in groups} == {"explorer-1"}
            await dispatcher.trained(step + 1, groups)
        await trainer.publish(STEPS)
    assert [result.groups for result in finished.results] == [0, 4 * STEPS]
    assert dispatcher.ledger.dropped == {}


async def test_a_request_for_a_version_to_come_waits_for_it(config, trainer):
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    async with exploring(Explorer(config, 0)):
        await dispatcher.dispatch(1, trainer.version(1))
        await until(lambda: dispatcher_sees_a_claim(trainer))
        await trainer.publish(1)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
        assert {experience.oldest_version for experience in group.experiences} == {
            trainer.version(1)
        }
        await trainer.publish(STEPS)


async def test_requests_of_several_exact_versions_are_each_served_by_their_own(config, trainer):
    config = config.replaced("explorer", groups_per_claim=4)
    dispatcher = await trainer.dispatcher()
    await dispatcher.dispatch(2, trainer.version(0), exact=True)
    await dispatcher.dispatch(2, trainer.version(1), exact=True)
    await trainer.publish(0)
    async with exploring(Explorer(config, 0)):
        first = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(1)
        second = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    served = [[group.oldest_step for group in groups] for groups in (first, second)]
    assert served == [[0, 0], [1, 1]]
    assert all(group.attempt == 1 for group in (*first, *second))


async def test_an_exact_request_of_an_earlier_version_comes_back_with_the_newest(config, trainer):
    dispatcher = await trainer.dispatcher(max_attempts=1)
    await trainer.publish(0)
    await trainer.publish(1)
    async with exploring(Explorer(config, 0)):
        await until(lambda: trainer.served(1))
        await dispatcher.dispatch(1, trainer.version(0), exact=True)
        await dispatcher.dispatch(0, trainer.version(1), exact=True)
        [group] = await dispatcher.take(1, deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert (group.attempt, group.oldest_step) == (2, 1)


class EndedEngine(Explorer):
    """An explorer whose engine's process has ended."""

    def _make_engine(self):
        engine = super()._make_engine()

        async def generate(requests):
            raise EngineEnded("vLLM", "EngineCore")

        engine.generate = generate
        return engine


async def test_claims_of_an_engine_that_ends_go_to_others_at_once(config, trainer):
    config = config.replaced("rollouts", claim_lease=10 * PATIENCE)
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    with raises(EngineEnded, process="EngineCore"):
        async with exploring(EndedEngine(config, 0)):
            await anyio.sleep_forever()
    async with exploring(Explorer(config, 1)):
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert {group.attempt for group in groups} == {2}


class BlockedEngine(Explorer):
    """An explorer that generates for ever."""

    def _make_engine(self):
        engine = super()._make_engine()

        async def generate(_):
            await anyio.sleep_forever()

        engine.generate = generate
        return engine

    async def prepare_and_explore(self):
        await self.prepare()
        await self.explore()


async def test_an_explorer_that_is_ended_gives_its_claims_back_and_spends_no_attempt(
    config, trainer
):
    config = config.replaced("rollouts", claim_lease=10 * PATIENCE)
    limits, fingerprint = read_answer_limits(config), task_of(config).fingerprint
    dispatcher = RolloutDispatcher(
        trainer.client,
        trainer.publisher,
        msgspec.structs.replace(dispatch_settings(config, fingerprint, limits), max_attempts=1),
        payloads=RedisPayloads(trainer.client, config.run_id),
    )
    await dispatcher.start()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(BlockedEngine(config, 0).prepare_and_explore)
        await until(lambda: dispatcher_sees_a_claim(trainer))
        tasks.cancel_scope.cancel()
    async with exploring(Explorer(config, 1)):
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert [group.attempt for group in groups] == [2, 2]
    assert dispatcher.ledger.dropped == {}


async def dispatcher_sees_a_claim(trainer):
    keys, epoch = RunKeys.of(trainer.config.run_id), trainer.config.epoch
    return (await trainer.client.xpending(keys.rollouts, f"explorers-{epoch}"))["pending"]


async def test_new_weights_are_installed_while_nothing_is_asked_for(config, trainer):
    await trainer.dispatcher()
    await trainer.publish(0)
    async with exploring(Explorer(config, 0)) as exploration:
        for step in range(STEPS):
            if step:
                await trainer.publish(step)
            await until(lambda step=step: trainer.served(step))
        await trainer.publish(STEPS)
    assert (exploration.results[0].applied, exploration.results[0].groups) == (STEPS + 1, 0)


class PullingEngine(Explorer):
    """An explorer that has an engine of this process, whatever the run's engine is named."""

    def _make_engine(self):
        config, self.config = self.config, self.config.replaced("explorer", engine="huggingface")
        try:
            return super()._make_engine()
        finally:
            self.config = config


@pytest.mark.parametrize(("engine", "prefetches"), [("huggingface", True), ("vllm", False)])
async def test_versions_are_prefetched_unless_other_processes_pull_them(
    config, trainer, monkeypatch, engine, prefetches
):
    steps, real = [], Synchronizer.prefetch

    def prefetch(self, epoch, opened, *args):
        steps.append(opened.step)
        return real(self, epoch, opened, *args)

    monkeypatch.setattr(Synchronizer, "prefetch", prefetch)
    async with exploring(PullingEngine(config.replaced("explorer", engine=engine), 0)) as finished:
        for step in range(STEPS + 1):
            await trainer.publish(step)
    [result] = finished.results
    assert result.applied
    assert bool(steps) == prefetches


async def test_explorers_share_the_requests_without_a_share_of_their_own(config, trainer):
    dispatcher = await trainer.dispatcher(window=100)
    config = config.replaced("explorer", groups_per_claim=1)
    await trainer.publish(0)
    async with exploring(*(Explorer(config, rank) for rank in (0, 1, 2))) as exploration:
        await dispatcher.dispatch(12, trainer.version(0))
        groups = await dispatcher.take(12, deadline=PATIENCE)
        await dispatcher.trained(1, groups)
        await trainer.publish(STEPS)
    by = [{experience.explorer for experience in group.experiences} for group in groups]
    assert all(len(explorers) == 1 for explorers in by), "a group is made by one explorer"
    counts = [sum(explorers == {f"explorer-{rank}"} for explorers in by) for rank in (0, 1, 2)]
    assert [result.groups for result in exploration.results] == counts
    assert sum(counts) == 12
    assert dispatcher.ledger.format_sums() == "12 trained, 0 dropped, 0 open"


# --- versions that come amid answers ----------------------------------------------------------


class Stepped(Explorer):
    """Explorer whose engine takes the steps that it is allowed."""

    def _make_engine(self):
        engine = super()._make_engine()
        self.steps = Steps(engine)
        return engine

    async def meets(self, version):
        """Wait until a version is installed, or will be before the next step."""
        engine = self._engine
        await until(lambda: engine._gate._is_closed() or engine.serves == version)
        self.steps.allow(1)
        await until(lambda: engine.serves == version)


def long_answers(config, mode):
    return config.replaced("rollouts", pause_mode=mode, max_new_tokens=40)


def steps_by_token(groups):
    """Steps of the versions of each answer, in order."""
    turns = [experience.turns[1] for group in groups for experience in group.experiences]
    return [[version.step for version, _ in turn.versions] for turn in turns]


@pytest.mark.parametrize("mode", ["keep", "retract"])
async def test_versions_that_come_amid_answers_are_installed_at_once(config, trainer, log, mode):
    trainer.config = config = long_answers(config, mode)
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    explorer = Stepped(config, 0)
    async with exploring(explorer) as exploration:
        await until(lambda: hasattr(explorer, "steps"))
        for step in (1, 2):
            await explorer.steps.take(3)
            await trainer.publish(step)
            await explorer.meets(trainer.version(step))
        explorer.steps.allow(1000)
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    token_steps = steps_by_token(groups)
    assert [0, 1, 2] in token_steps and all(
        steps == [0, 1, 2][: len(steps)] for steps in token_steps
    )
    assert all(
        experience.oldest_version.step == 0 for group in groups for experience in group.experiences
    )
    await reports_accepted(log)
    applied = [envelope.event.version.step for envelope in await events_of(log, WeightsApplied)]
    assert applied == [0, 1, 2, STEPS]
    assert exploration.results[0].applied == STEPS + 1


async def test_answers_that_a_version_aborts_are_claimed_again_and_none_is_lost(
    config, trainer, log
):
    last = MOST_ABORTS + 2
    trainer.config = config = msgspec.structs.replace(long_answers(config, "abort"), steps=last)
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(1, trainer.version(0))
    explorer, groups = Stepped(config, 0), []

    async def take():
        groups.extend(await dispatcher.take(1, deadline=PATIENCE))

    async with exploring(explorer), anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await until(lambda: hasattr(explorer, "steps"))
        for step in range(1, MOST_ABORTS + 1):
            await explorer.steps.take(3)
            await trainer.publish(step)
            await explorer.meets(trainer.version(step))
        # Each request was aborted as often as one may be: the next version waits for its answer.
        await explorer.steps.take(3)
        await trainer.publish(MOST_ABORTS + 1)
        await explorer.steps.take(3)
        explorer.steps.allow(1000)
        await until(lambda: trainer.served(MOST_ABORTS + 1))
        await trainer.publish(last)
    assert {group.attempt for group in groups} == {MOST_ABORTS + 1}
    assert {*map(tuple, steps_by_token(groups))} == {(MOST_ABORTS,)}
    await reports_accepted(log)
    resumed = [envelope.event for envelope in await events_of(log, GenerationResumed)]
    assert [event.version.step for event in resumed][:MOST_ABORTS] == [*range(1, MOST_ABORTS + 1)]
    assert [event.aborted for event in resumed][:MOST_ABORTS] == [resumed[0].aborted] * MOST_ABORTS
    assert resumed[0].aborted == sum(len(group.experiences) for group in groups)


async def test_a_version_that_comes_amid_answers_waits_for_them_by_default(config, trainer):
    trainer.config = config = long_answers(config, "wait")
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    explorer = Stepped(config, 0)
    async with exploring(explorer):
        await until(lambda: hasattr(explorer, "steps"))
        await explorer.steps.take(3)
        await trainer.publish(1)
        await explorer.steps.take(3)
        explorer.steps.allow(1000)
        assert {*map(tuple, steps_by_token(await dispatcher.take(2, deadline=PATIENCE)))} == {(0,)}
        await until(lambda: trainer.served(1))
        await trainer.publish(STEPS)


async def test_no_version_comes_amid_the_answer_to_a_request_for_one_exact_version(config, trainer):
    trainer.config = config = long_answers(config, "keep")
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0), exact=True)
    explorer = Stepped(config, 0)
    async with exploring(explorer):
        await until(lambda: hasattr(explorer, "steps"))
        await explorer.steps.take(3)
        await trainer.publish(1)
        await explorer.steps.take(3)
        explorer.steps.allow(1000)
        assert {*map(tuple, steps_by_token(await dispatcher.take(2, deadline=PATIENCE)))} == {(0,)}
        await trainer.publish(STEPS)


async def test_answers_amid_which_a_version_fails_halfway_are_issued_again(
    config, trainer, monkeypatch
):
    trainer.config = config = long_answers(config, "keep")
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    explorer = Stepped(config, 0)

    def fail(*_args, **_keywords):
        monkeypatch.undo()
        raise CorruptVersion(rank=0)

    async with exploring(explorer):
        await until(lambda: hasattr(explorer, "steps"))
        await explorer.steps.take(3)
        monkeypatch.setattr(version_reader, "check_installed", fail)
        await trainer.publish(1)
        await explorer.meets(None)
        await trainer.publish(2)
        explorer.steps.allow(1000)
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert {group.attempt for group in groups} == {2}
    assert {*map(tuple, steps_by_token(groups))} == {(2,)}


# --- what cannot be answered ------------------------------------------------------------------

REWARD = """
from pathlib import Path

def reward(question, answer):
    seen = Path(__file__).with_name(question.answer)
    if question.answer == "never" or (question.answer == "later" and not seen.exists()):
        seen.touch()
        raise ValueError("no verifier is there")
    return float(len(answer.text))
"""


def own_task(folder, *answers, name="questions.jsonl"):
    """Questions whose answers tell the reward how often to fail."""
    source = folder / name
    lines = [
        {"prompt": f"{'abcdefgh'[at]}>", "answer": answer} for at, answer in enumerate(answers)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "mine.py").write_text(REWARD)
    return {
        "task": TaskConfig(questions=str(source)),
        "rewards": RewardsConfig(function=f"{folder / 'mine.py'}:reward", deadline=PATIENCE),
    }


@pytest.mark.processes
async def test_a_request_whose_reward_fails_is_dropped_once_and_its_error_is_reported(
    config, trainer, tmp_path, log
):
    words = ["first", "later", "second", "never"]
    config = msgspec.structs.replace(config, **own_task(tmp_path, *words))
    trainer.config, task = config, task_of(config)
    dispatcher = await trainer.dispatcher(on_reward_error="drop_group", window=20)
    await trainer.publish(0)
    # One pass over the questions that are not held out, each of which is asked once.
    answers = [task.question(ordinal).answer for ordinal in range(len(task))]
    assert {"later", "never"} <= set(answers), "the hash that holds questions out has changed"
    answerable = [at for at, word in enumerate(answers) if word not in ("later", "never")]
    async with exploring(Explorer(config, 0)) as exploration:
        await dispatcher.dispatch(len(answers), trainer.version(0))
        groups = await dispatcher.take(len(answerable), deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert {group.ordinal: group.attempt for group in groups} == dict.fromkeys(answerable, 1)
    await dispatcher.trained(1, groups)
    assert "dropped (reward-failed 2)" in dispatcher.ledger.format_sums()
    assert exploration.results[0].groups >= len(answerable)
    await reports_accepted(log)
    [reported] = await events_of(log, RewardErrorReported)  # both failed for one cause
    error = reported.event
    assert (reported.producer.role, error.explorer) == ("explorer", "explorer-0")
    assert (error.error_type, error.epoch) == ("ValueError", config.epoch)
    assert "no verifier is there" in error.message and "in reward" in error.traceback
    assert error.prompt and error.response


@pytest.mark.processes
async def test_an_explorer_with_another_task_set_is_refused_and_its_claims_come_back(
    config, trainer, tmp_path
):
    config = msgspec.structs.replace(config, **own_task(tmp_path, "a", "b", "c"))
    trainer.config = config
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    await dispatcher.dispatch(2, trainer.version(0))
    mistaken = msgspec.structs.replace(
        config, **own_task(tmp_path, "a", "b", "d", name="others.jsonl")
    )
    stranger = Explorer(mistaken, 1)
    await stranger.prepare()
    requested, own = task_of(config).fingerprint, task_of(mistaken).fingerprint
    subject = f"run {config.run_id}"
    with raises(OtherTaskSet, subject=subject, requested=requested, own=own, explorer="explorer-1"):
        await stranger.explore()
    async with exploring(Explorer(config, 0)):
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await trainer.publish(STEPS)
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (1, 2)]
    assert {experience.explorer for group in groups for experience in group.experiences} == {
        "explorer-0"
    }


# --- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before-weights", "idle", "waiting-for-weights"])
@pytest.mark.parametrize("how", ["closed", "anew"])
async def test_the_end_of_the_run_ends_it(config, trainer, client, log, moment, how):
    dispatcher = await trainer.dispatcher()
    if moment != "before-weights":
        await trainer.publish(0)

    async def to_the_end():
        async with exploring(Explorer(config, 0)):
            if moment == "before-weights":
                await until(lambda: events_of(log, ExplorerStatusChanged))
            elif moment == "idle":
                await until(lambda: trainer.served(0))
            else:
                await dispatcher.dispatch(1, trainer.version(2))
                await until(lambda: dispatcher_sees_a_claim(trainer))
            if how == "closed":
                await trainer.publisher.publish(RunClosed(reason="interrupted"))
            else:
                await open_run(client, config.run_id)

    ended = {"reason": "interrupted"} if how == "closed" else {"newest": 2}
    with raises(RunEnded, **ended):
        await to_the_end()
    await reports_accepted(log)
    statuses = [envelope.event.status for envelope in await events_of(log, ExplorerStatusChanged)]
    assert statuses[0] == "running"
    if how == "closed":
        assert statuses == ["running", "stopped"]


async def test_a_trainer_that_asks_for_nothing_is_named_after_the_deadline(config, trainer):
    dispatcher = await trainer.dispatcher()
    await trainer.publish(0)
    explorer = Explorer(config, 3)

    async def to_the_end():
        async with exploring(explorer):
            await until(lambda: trainer.served(0))
            # From its next claim on; the present one ends with this request.
            explorer.config = config.replaced("sync", timeout=0.2)
            await dispatcher.dispatch(1, trainer.version(0))
            await dispatcher.take(1, deadline=PATIENCE)

    with raises(DeadlineExceeded, missing=re.compile("^explorer-3: no rollouts"), deadline=0.2):
        await to_the_end()
