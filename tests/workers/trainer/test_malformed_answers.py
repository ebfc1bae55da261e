"""An explorer sends every kind of malformed answer: a trainer's weights stay finite."""

from __future__ import annotations

import json
from functools import partial

import anyio
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.malformed_experiences import FAULTS, malformed  # noqa: E402
from tests.support.rollout_parts import Parts, answer, samples_of, settings  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.rollouts import AnswerLimits, RolloutDispatcher  # noqa: E402
from trinity_events.rollouts.streams import RolloutStreams  # noqa: E402
from trinity_events.server import Deadline  # noqa: E402
from trinity_schemas import encode  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.settings import AlgorithmConfig  # noqa: E402
from trinity_workers.config.answer_limits import read_answer_limits  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.fsdp import FSDPTrainingStep  # noqa: E402


def learn(rank, folder, groups):
    """Take one step on groups; return the loss, and whether all weights are finite."""
    policy = FSDPEngine(
        folder,
        device=torch.device("cpu"),
        learning_rate=1e-3,
        adamw=AdamWOptions(max_grad_norm=1.0),
    )
    step = FSDPTrainingStep(Models(policy), AlgorithmConfig().with_limit(4))
    metrics = step.learn(collate(groups, 0, vocabulary_size=98))
    weights = [weight.detach().full_tensor() for weight in policy.module.parameters()]
    return metrics["loss"], all(bool(weight.isfinite().all()) for weight in weights)


@pytest.fixture
def parts(client, publisher, run_id):
    return Parts(client, publisher, run_id)


async def test_the_weights_stay_finite_whatever_an_explorer_sends(
    parts, make_config, policy_folder, rank_group
):
    kinds = list(FAULTS)
    limits = read_answer_limits(make_config(rollouts={"max_turns": 2}))
    rollout_settings = settings(parts.run_id, 1, limits=limits, window=len(kinds), max_attempts=1)
    dispatcher = RolloutDispatcher(parts.client, parts.publisher, rollout_settings)
    await dispatcher.start()
    dispatcher.add_published(parts.version)
    await dispatcher.dispatch(len(kinds), parts.version)
    streams = RolloutStreams(parts.client, parts.run_id, 1)
    claims = await parts.explorer("bad").claim(len(kinds), seconds=PATIENCE)
    for kind, claim in zip(kinds, claims, strict=True):
        first, second = samples_of(claim, "bad")
        payloads = [malformed(kind, first), encode(second)]
        row = [streams.group, claim.entry_id, len(payloads), "e", *payloads]
        await streams.write(Deadline(PATIENCE, "not sent"), "answer", *row)
    async with anyio.create_task_group() as tasks:

        async def keep_answering():
            while True:
                if not await answer(parts.explorer("sound"), 8):
                    await anyio.sleep(0.01)

        tasks.start_soon(keep_answering)
        groups = await dispatcher.take(len(kinds), deadline=PATIENCE)
        tasks.cancel_scope.cancel()
    assert {group.experiences[0].explorer for group in groups} == {"sound"}
    assert dispatcher.exclusions.names == ("bad",)
    samples = [group.experiences for group in groups]
    train = partial(rank_group(1), learn, policy_folder, samples)
    [(loss, is_finite)] = await anyio.to_thread.run_sync(train)
    assert is_finite
    assert abs(loss) < 100


def test_the_limits_are_those_of_the_model_as_far_as_its_folder_names_them(make_config, tmp_path):
    config = make_config(rollouts={"max_turns": 3})

    def limits(described=None):
        folder = tmp_path / "described"
        folder.mkdir(exist_ok=True)
        if described is not None:
            (folder / "config.json").write_text(described)
        return read_answer_limits(msgspec.structs.replace(config, model_folder=folder))

    assert read_answer_limits(config, reward_part="score") == AnswerLimits(
        vocabulary_size=98,
        max_positions=128,
        max_turns=3,
        reward_part="score",
        question_sets=frozenset({""}),
    )
    unknown = AnswerLimits(max_turns=3, question_sets=frozenset({""}))
    assert limits() == limits("no JSON") == limits("[]") == limits("{}") == unknown
    stretched = {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    assert limits(json.dumps(stretched)).max_positions == 400
    parts = {"vocab_size": 7, "text_config": {"vocab_size": 9, "max_position_embeddings": 5}}
    assert (limits(json.dumps(parts)).vocabulary_size, limits(json.dumps(parts)).max_positions) == (
        9,
        5,
    )
