"""Roles take and return veRL's `DataProto`, with the numbers of the batch that it is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.support.batches import make_batch
from tests.support.errors import raises
from tests.support.experiences import make_groups
from tests.support.tensors import assert_equal, identical
from tests.support.worker_ranks import LocalActor
from trinity_workers.algorithms.collate import collate
from trinity_workers.algorithms.errors import DataProtoIncomplete
from trinity_workers.algorithms.presets import preset_values
from trinity_workers.algorithms.verl_data import from_data_proto, to_data_proto
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.learning.policy import create_policy
from trinity_workers.roles import ActorRolloutRefWorker
from trinity_workers.roles.group import RoleGroup

pytestmark = [
    pytest.mark.usefixtures("imported_verl"),
    pytest.mark.filterwarnings("default"),  # veRL's and tensordict's
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = {
        "algorithm": {
            **preset_values("grpo"),
            "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"},
        },
        "trainer": {"ranks": 1, "warmup_steps": 0},
    }
    placed = msgspec.convert(settings, TrainConfig).placed(
        run_id="roles",
        epoch=1,
        redis_url="redis://127.0.0.1:1/0",
        weights_url="redis://127.0.0.1:1/0",
        checkpoint_folder=tmp_path_factory.mktemp("roles"),
    )
    folder = tmp_path_factory.mktemp("policy")
    create_policy(folder, 0)
    return msgspec.structs.replace(placed, model_folder=folder)


@pytest.fixture(scope="module")
def actor(config):
    """An actor with rollouts and reference on one rank, and the group that calls it."""
    worker = ActorRolloutRefWorker(config, 0)
    threads = torch.get_num_threads()
    worker.join(*worker.address())
    try:
        worker.init_model()
        yield worker, RoleGroup(ActorRolloutRefWorker, [LocalActor(worker)], config=config)
    finally:
        worker.leave()
        torch.set_num_threads(threads)


def test_passes_answer_by_verls_names_with_the_numbers_of_batches(actor):
    worker, group = actor
    batch = collate(make_groups("roles", 1), 0)
    data = to_data_proto(batch)
    for method, ours, theirs in [
        ("compute_log_prob", "proximal_logprobs", "old_log_probs"),
        ("compute_ref_log_prob", "reference_logprobs", "ref_log_prob"),
    ]:
        answer = getattr(group, method)(data)
        assert [*answer.batch.keys()] == [theirs]
        assert identical(answer.batch[theirs], getattr(worker, method)(batch)[ours])


def test_a_pass_needs_no_groups_and_an_update_does(actor):
    _, group = actor
    data = to_data_proto(collate(make_groups("roles", 1), 0))
    del data.non_tensor_batch["uid"]
    assert len(group.compute_log_prob(data)) == len(data)
    with raises(DataProtoIncomplete, missing=("uid",)):
        group.update_actor(data)


def test_an_update_trains_and_its_metrics_are_in_meta_info(actor):
    _, group = actor
    batch = make_batch([3, 1, 4, 2], groups=[1, 1, 2, 2])
    data = to_data_proto(batch)
    before = group.compute_log_prob(data).batch["old_log_probs"]
    answer = group.update_actor(data)
    assert answer.batch is None
    assert answer.meta_info["metrics"].keys() >= {"actor/pg_loss", "actor/grad_norm", "actor/lr"}
    assert not identical(group.compute_log_prob(data).batch["old_log_probs"], before)


def prompts(rows, *, raw=False, **meta):
    from verl import DataProto

    width = max(map(len, rows))
    tensors = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }
    names = {"uid": np.array([f"question {row}" for row in range(len(rows))], dtype=object)}
    if raw:
        names["raw_prompt_ids"] = np.array([*rows, None], dtype=object)[:-1]
    return DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info=meta)


@pytest.mark.parametrize("raw", [False, True])
def test_prompts_are_answered_and_the_rows_train(actor, raw):
    _, group = actor
    rows = [[5, 6, 7], [8, 9], [5, 6, 7]]
    answer = group.generate_sequences(prompts(rows, raw=raw, do_sample=False))
    batch = from_data_proto(answer)
    assert batch.groups.tolist() == [0, 1, 2]
    for row, prompt in enumerate(rows):
        mask = batch.attention_mask[row, : batch.prompt_width].bool()
        assert batch.input_ids[row, : batch.prompt_width][mask].tolist() == prompt
    assert identical(batch.responses[0], batch.responses[2]), "the most likely tokens"
    again = group.compute_log_prob(answer).batch["old_log_probs"]
    torch.testing.assert_close(again, batch.behaviour_logprobs, atol=1e-4, rtol=0)


def test_a_prompt_that_comes_again_is_sampled_with_other_random_numbers(actor):
    _, group = actor
    first, later = (
        group.generate_sequences(prompts([[5, 6, 7]])).batch["responses"] for _ in range(2)
    )
    assert not identical(first, later)


def test_rows_without_prompts_are_refused(actor):
    _, group = actor
    data = prompts([[5]])
    data.batch.pop("attention_mask")
    with raises(DataProtoIncomplete, missing=()):
        group.generate_sequences(data)


def test_the_role_rollout_loads_what_an_actor_on_verls_engine_has_saved(actor, config, tmp_path):
    trainer = msgspec.structs.replace(config.trainer, engine="verl")
    on_verl = msgspec.structs.replace(config, trainer=trainer)
    trained = ActorRolloutRefWorker(on_verl, 0, role="actor")
    rollout = ActorRolloutRefWorker(on_verl, 0, role="rollout")
    for role in (trained, rollout):
        role.init_model()
    trained.update_actor(make_batch([3, 1, 4, 2], groups=[1, 1, 2, 2]))
    trained.save_checkpoint(str(tmp_path))
    engine, policy = trained._step.models.policy, rollout._step.models.policy
    before = policy.module.model.norm.weight.full_tensor().clone()
    rollout.load_checkpoint(str(tmp_path))
    assert policy.optimizer is None and policy.steps == engine.steps == 1
    # As they are trained: veRL 0.8.0 publishes bfloat16, whatever the model's dtype (docs/verl.md).
    loaded, saved = dict(policy.master_params()), dict(engine.master_params())
    assert_equal(dict(sorted(loaded.items())), dict(sorted(saved.items())))
    assert not identical(loaded["model.norm.weight"], before)
