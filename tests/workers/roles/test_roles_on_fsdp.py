"""Roles compute what a training step computes, call by call."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.errors import raises  # noqa: E402
from tests.support.experiences import group, make_groups  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_schemas import Sampling  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.presets import preset_values  # noqa: E402
from trinity_workers.config.train_config import TrainConfig  # noqa: E402
from trinity_workers.engines.sharded import NotTrained  # noqa: E402
from trinity_workers.engines.state_files import read_state, write_state  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.roles import (  # noqa: E402
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RewardWorker,
    RoleRefused,
)
from trinity_workers.roles.actor import Role  # noqa: E402
from trinity_workers.rollout_engines.base import (  # noqa: E402
    AdaptersNotSupported,
    GenerationRequest,
)
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402
from trinity_workers.trainer.models.fsdp import make_step  # noqa: E402
from trinity_workers.trainer.workers.rollouts import rank_rollouts  # noqa: E402
from trinity_workers.worker_group.dispatch import Dispatch  # noqa: E402
from trinity_workers.worker_group.registered import registered_methods  # noqa: E402


@pytest.fixture(scope="module")
def config(policy_folder, tmp_path_factory):
    settings = {
        "algorithm": {
            **preset_values("ppo"),
            "critic": {"use": True},
            "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"},
            "importance_sampling": {"ratio_to": "proximal"},
        },
        "trainer": {"ranks": 1, "micro_batch_rows": 8, "warmup_steps": 0},
    }
    placed = msgspec.convert(settings, TrainConfig).placed(
        run_id="roles",
        epoch=1,
        redis_url="redis://127.0.0.1:1/0",
        weights_url="redis://127.0.0.1:1/0",
        checkpoint_folder=tmp_path_factory.mktemp("roles"),
    )
    return msgspec.structs.replace(placed, model_folder=policy_folder)


@pytest.fixture
def roles(config):
    """An actor with its reference, and a critic, in one process group of this process."""
    actor, critic = ActorRolloutRefWorker(config, 0), CriticWorker(config, 0)
    threads = torch.get_num_threads()
    actor.join(*actor.address())
    try:
        actor.init_model()
        critic.init_model()
        yield actor, critic
    finally:
        actor.leave()
        torch.set_num_threads(threads)


def test_roles_train_as_a_training_step_does_and_generate_with_the_new_weights(roles, config):
    actor, critic = roles
    pad = actor._step.models.policy.tokenizer.pad_token_id
    batch = collate(make_groups("roles", 1), pad)
    whole = make_step(config, torch.device("cpu"))
    expected = whole.learn(batch)

    outputs = [actor.compute_log_prob(batch), actor.compute_ref_log_prob(batch)]
    outputs.append(critic.compute_values(batch))
    fields = {name: value for output in outputs for name, value in output.items()}
    assert fields.keys() == {"proximal_logprobs", "reference_logprobs", "values"}
    assert identical(fields["proximal_logprobs"], fields["reference_logprobs"])
    prepared, _ = prepare(replace(batch, **fields), config.algorithm_of_step)
    metrics = critic.update_critic(prepared) | actor.update_actor(prepared)
    for mine, theirs in {
        "actor/pg_loss": "pg_loss",
        "actor/ppo_kl": "ppo_kl",
        "actor/grad_norm": "gradient_norm",
        "actor/lr": "learning_rate",
        "critic/vf_loss": "critic/vf_loss",
        "critic/grad_norm": "critic/grad_norm",
        "critic/vf_explained_var": "critic/vf_explained_var",
    }.items():
        assert metrics[mine] == pytest.approx(expected[theirs], abs=1e-6), mine
    for name in ("policy", "critic"):
        role = actor if name == "policy" else critic
        trained = dict(getattr(role._step.models, name).get_per_tensor_param())
        for key, value in getattr(whole.models, name).get_per_tensor_param():
            torch.testing.assert_close(trained[key], value, atol=1e-6, rtol=0)

    prompts = [[5, 6, 7], [8, 9]]
    requests = [
        GenerationRequest(
            tokens=prompt, sampling=Sampling(max_new_tokens=5, seed=3), ordinal=index, sample=0
        )
        for index, prompt in enumerate(prompts)
    ]
    answers = actor.generate_sequences(requests)
    assert {version.step for answer in answers for version, _ in answer.versions} == {1}
    for prompt, answer in zip(prompts, answers, strict=True):
        sampled = collate([group(prompt, [answer.tokens], [answer.logprobs], [1.0])], pad)
        again = actor.compute_log_prob(sampled)["proximal_logprobs"]
        torch.testing.assert_close(again[0], torch.tensor(answer.logprobs), atol=1e-4, rtol=0)


@pytest.fixture
def generate(roles):
    """Generates turns with the actor, and checks that the present weights sampled them."""
    actor, _ = roles
    pad = actor._step.models.policy.tokenizer.pad_token_id
    prompt = [5, 6, 7]
    request = GenerationRequest(
        tokens=prompt, sampling=Sampling(max_new_tokens=5, seed=3), ordinal=0, sample=0
    )

    def generated():
        [answer] = actor.generate_sequences([request])
        sampled = collate([group(prompt, [answer.tokens], [answer.logprobs], [1.0])], pad)
        present = actor.compute_log_prob(sampled)["proximal_logprobs"]
        torch.testing.assert_close(present[0], torch.tensor(answer.logprobs), atol=1e-4, rtol=0)
        return answer.logprobs

    return generated


def doubled(state):
    return {name: 2 * value for name, value in state.items()}


def load_checkpoint_of_others(actor, folder):
    [path] = folder.glob("policy/model_world_size_1_rank_0.pt")
    write_state(path, doubled(read_state(path)))
    path.with_name(MANIFEST).unlink()  # of the files that were saved before
    actor.load_checkpoint(str(folder))


def load_state_of_others(actor, folder):
    module = actor._step.models.policy.module
    module.load_state_dict(doubled(module.state_dict()))


@pytest.mark.parametrize("load", [load_checkpoint_of_others, load_state_of_others])
def test_answers_after_a_load_are_of_the_loaded_weights_at_an_equal_step(
    roles, generate, tmp_path, load
):
    actor, _ = roles
    policy = actor._step.models.policy
    actor.save_checkpoint(str(tmp_path))
    before, steps = generate(), policy.steps
    load(actor, tmp_path)
    assert policy.steps == steps
    assert generate() != before


def test_weights_that_were_gathered_by_half_are_gathered_again(roles, generate, monkeypatch):
    actor, _ = roles
    policy = actor._step.models.policy
    generate()
    load_state_of_others(actor, None)
    whole = policy.get_per_tensor_param

    def interrupted():
        yield next(whole())
        raise PeerFailed(1, "planted")

    monkeypatch.setattr(policy, "get_per_tensor_param", interrupted)
    with pytest.raises(PeerFailed):
        generate()
    monkeypatch.undo()
    generate()


def test_weights_that_have_not_changed_are_not_gathered_again(roles, generate, monkeypatch):
    actor, _ = roles
    policy = actor._step.models.policy
    before = generate()
    monkeypatch.setattr(policy, "get_per_tensor_param", None)
    assert generate() == before


def test_a_role_that_lacks_a_model_or_has_loaded_none_says_so(config):
    batch = collate(make_groups("roles", 1), 0)
    with raises(RoleRefused, fault="init"):
        CriticWorker(config, 0).compute_values(batch)
    reference = ActorRolloutRefWorker(config, 0, role="ref")
    with raises(RoleRefused, fault="part", method="update_actor", part="actor", role="ref"):
        reference.update_actor(batch)
    with raises(RoleRefused, fault="reward model"):
        RewardWorker(config, 0).init_model()


ALLOWED = {
    "actor": {"compute_log_prob", "update_actor", "setup_weight_sync_group", "sync_weight_nccl"},
    "rollout": {"generate_sequences"},
    "ref": {"compute_ref_log_prob"},
}
"""Methods that need each part of a role."""


@pytest.mark.parametrize("role", get_args(Role))
def test_a_role_has_the_methods_of_its_parts_alone(config, role):
    worker = ActorRolloutRefWorker(config, 0, role=role)
    allowed = set().union(*(ALLOWED[part] for part in role.split("_")))
    for method in set().union(*ALLOWED.values()):
        rows = {"generate_sequences": [], "setup_weight_sync_group": 1, "sync_weight_nccl": 1}.get(
            method, collate(make_groups("roles", 1), 0)
        )
        # Those of its parts get as far as the missing models.
        lacks = {"fault": "part", "method": method, "role": role}
        with raises(RoleRefused, **({"fault": "init"} if method in allowed else lacks)):
            getattr(worker, method)(rows)


def test_a_role_that_trains_nothing_neither_saves_nor_hides_that_it_does_not(
    config, roles, tmp_path
):
    actor, _ = roles
    actor.save_checkpoint(str(tmp_path))
    rollout = ActorRolloutRefWorker(config, 0, role="rollout")
    reference = ActorRolloutRefWorker(config, 0, role="ref")
    for role in (rollout, reference):
        role.init_model()
    assert rollout._step.models.policy.optimizer is None
    assert not any(value.requires_grad for value in rollout._step.models.policy.module.parameters())
    for step in (None, 1):
        with raises(RoleRefused, fault="save"):
            rollout.save_checkpoint(str(tmp_path / "rollout"), step)
        with raises(RoleRefused, fault="checkpoint", method="save_checkpoint"):
            reference.save_checkpoint(str(tmp_path / "reference"), step)
    with raises(RoleRefused, fault="checkpoint", method="load_checkpoint", choices=("reference",)):
        reference.load_checkpoint(str(tmp_path))
    with raises(NotTrained, engine="FSDPEngine"):
        rollout._step.models.policy.save_checkpoint(str(tmp_path / "rollout"))
    policy = actor._step.models.policy
    rollout.load_checkpoint(str(tmp_path))
    assert rollout._step.models.policy.steps == policy.steps
    assert_equal(
        dict(rollout._step.models.policy.get_per_tensor_param()),
        dict(policy.get_per_tensor_param()),
    )


@pytest.mark.parametrize("role", ["nonsense", "actor_ref", "rollout_actor", ""])
def test_an_unknown_role_is_refused(config, role):
    with raises(RoleRefused, fault="unknown", role=role):
        ActorRolloutRefWorker(config, 0, role=role)


def test_a_role_of_adapters_does_not_generate_and_says_so(config):
    model = msgspec.structs.replace(config.model, lora=LoraConfig(rank=4))
    adapted = msgspec.structs.replace(config, model=model)
    with raises(AdaptersNotSupported, engine=None):
        rank_rollouts(adapted, torch.device("cpu"), None)


def test_methods_have_the_dispatch_modes_of_verls_workers():
    actor = registered_methods(ActorRolloutRefWorker)
    assert actor["init_model"].dispatch_mode is Dispatch.ONE_TO_ALL
    assert actor["generate_sequences"].dispatch_mode is Dispatch.MEGATRON_PP_AS_DP_PROTO
    for name in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
        assert actor[name].dispatch_mode is Dispatch.MEGATRON_COMPUTE_PROTO
    critic = registered_methods(CriticWorker)
    for name in ("compute_values", "update_critic"):
        assert critic[name].dispatch_mode is Dispatch.MEGATRON_COMPUTE_PROTO
    reward = registered_methods(RewardModelWorker)
    assert reward["compute_rm_score"].dispatch_mode is Dispatch.MEGATRON_COMPUTE_PROTO
