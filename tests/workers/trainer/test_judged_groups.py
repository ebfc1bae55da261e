"""Claims about the groups that the trainer takes or drops."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from tests.support.errors import raises

pytest.importorskip("torch")

from tests.support.experiences import group
from tests.support.rollout_parts import Parts, samples_of
from tests.support.waits import PATIENCE
from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.rollouts import AnswerGroup
from trinity_schemas import RolloutsDispatched, decode_envelope
from trinity_workers.algorithms.settings import AlgorithmConfig, FiltersConfig
from trinity_workers.config.sections.rollouts import RolloutsConfig
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import RunConfig
from trinity_workers.trainer.rollouts.supply import GroupsFiltered, RolloutSupply, judged

DYNAMIC = FiltersConfig(zero_variance="resample")


def sampled(rewards):
    tokens = [[7]] * len(rewards)
    samples = group([5], tokens, [[-1.0]] * len(rewards), rewards)
    return AnswerGroup(ordinal=0, attempt=1, experiences=samples, entry_ids=["1-0"])


@pytest.mark.parametrize(
    ("rewards", "filters", "verdict"),
    [
        ([1.0, 0.0], DYNAMIC, True),
        ([1.0, 1.0], DYNAMIC, "filtered"),
        ([1.0, 1.0], FiltersConfig(), True),
        ([1.0, 1.0], FiltersConfig(zero_variance="mask"), True),
    ],
)
def test_a_group_is_taken_or_dropped(rewards, filters, verdict):
    assert judged(sampled(rewards), filters) == verdict


async def test_a_step_that_got_groups_of_equal_rewards_alone_fails_with_their_number(
    client, publisher, log, redis_url, run_id, tmp_path
):
    parts = Parts(client, publisher, run_id)
    dispatcher = await parts.dispatcher(window=64)
    config = RunConfig(
        run_id=run_id,
        epoch=publisher.epoch,
        redis_url=redis_url,
        weights_url=redis_url,
        checkpoint_folder=tmp_path,
        model_folder=tmp_path,
        steps=1,
        rollouts=RolloutsConfig(prompts_per_step=2),
        algorithm=AlgorithmConfig(filters=DYNAMIC),
        sync=SyncConfig(timeout=1.0),
    )
    supply = RolloutSupply(config, dispatcher, NO_REPORTS)
    answered = []

    async def explore():
        explorer = parts.explorer()
        for _ in range(3):
            for claim in await explorer.claim(2, seconds=PATIENCE):
                equal = [
                    msgspec.structs.replace(sample, reward=0.5) for sample in samples_of(claim)
                ]
                await explorer.answer(claim, equal)
                answered.append(claim.request.ordinal)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(explore)
        await supply.request(0)
        with raises(GroupsFiltered, run_id=run_id, step=1) as caught:
            await supply.take(1)
        tasks.cancel_scope.cancel()
    assert caught.value.filtered == len(answered)
    events = [decode_envelope(entry.payload).event for entry in await log.read(limit=1000)]
    dropped = [
        event.dropped for event in events if isinstance(event, RolloutsDispatched) if event.dropped
    ]
    assert dropped == [{"filtered": ((0, len(answered) - 1),)}]
