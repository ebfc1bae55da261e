"""Roles on Megatron answer what plain models answer, through the dispatch of their group."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from tests.support.errors import raises  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.rank_processes import results  # noqa: E402
from tests.support.reward_models import make_reward_folder  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.errors import DeadlineExceeded  # noqa: E402
from trinity_schemas import Sampling, StepRef  # noqa: E402
from trinity_workers.algorithms.batch import Batch  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.presets import preset_values  # noqa: E402
from trinity_workers.learning.policy import load_tokenizer  # noqa: E402
from trinity_workers.roles import (  # noqa: E402
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
)
from trinity_workers.rollout_engines.base import GenerationRequest  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402
from trinity_workers.worker_group.dispatch import deal  # noqa: E402
from trinity_workers.worker_group.registered import registered_methods  # noqa: E402

pytestmark = pytest.mark.megatron

KINDS = {"actor": ActorRolloutRefWorker, "critic": CriticWorker, "reward": RewardModelWorker}
MEGATRON = {"engine": "megatron"}
AWAY = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
OFFLOAD = {
    "policy_offload": AWAY,
    "critic_offload": AWAY,
    "reference_offload": {"param_offload": True},
}
TOKENS, RECOMPUTE, FUSED = {"micro_batch_tokens": 60}, {"recompute": True}, {"fused_loss": True}
BOTH = {**MEGATRON, "ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2}
# Of offload, dynamic batches, recomputation and fused losses any two are on together somewhere,
# and either is on without the other.
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2, generates at TP 2": {
        **MEGATRON,
        **{"ranks": 2, "tensor_parallel": 1, "rollout_tensor_parallel": 2},
        **TOKENS,
        **RECOMPUTE,
        **FUSED,
    },
    "TP 2 x PP 2, generates at TP 2": {**BOTH, **OFFLOAD, **RECOMPUTE, **FUSED},
    "PP 2, generates at TP 2": {
        **MEGATRON,
        **{"ranks": 2, "pipeline_parallel": 2, "rollout_tensor_parallel": 2},
        **OFFLOAD,
        **TOKENS,
        **FUSED,
    },
    "TP 2 x PP 2, generates at TP 1": {
        **BOTH,
        **OFFLOAD,
        **TOKENS,
        **RECOMPUTE,
        "rollout_tensor_parallel": 1,
    },
    "CP 2 x TP 2 SP, generates at TP 2": {
        **MEGATRON,
        **{"ranks": 4, "context_parallel": 2, "sequence_parallel": True},
        **OFFLOAD,
        **TOKENS,
        **FUSED,
    },
    "CP 2, generates at TP 1": {
        **MEGATRON,
        **{"ranks": 2, "context_parallel": 2},
        **RECOMPUTE,
    },
    "FSDP": {"ranks": 2},
    "TP 2 on FSDP": {"ranks": 4, "tensor_parallel": 2, **OFFLOAD, **TOKENS, **FUSED},
}


class Told(NamedTuple):
    """Answers of the roles of one layout."""

    fields: dict[str, torch.Tensor]
    metrics: dict[str, float]
    answers: list[list[Any]]
    """Generations before the update and after it."""


def make_roles(rank, config):
    rank.objects.roles = {name: kind(config, rank.number) for name, kind in KINDS.items()}
    return rank.objects.roles["actor"].address() if rank.number == 0 else None


def begin(rank, host, port):
    rank.objects.roles["actor"].join(host, port)
    for role in rank.objects.roles.values():
        role.init_model()
    return rank.objects.roles["actor"].rank_info()


def call(rank, role, method, args):
    return getattr(rank.objects.roles[role], method)(*args)


def end(rank):
    rank.objects.roles["actor"].leave()


class Roles:
    """Roles of so many ranks, called as by a group."""

    def __init__(self, processes, config):
        self._processes, ranks = processes, range(config.trainer.rank_count)
        processes.start(len(ranks))
        place, *_ = processes.call(ranks, make_roles, config)
        self._table = self._answers([(begin, *place)] * len(ranks))

    def call(self, role, method, *args):
        mode = registered_methods(KINDS[role])[method].dispatch_mode
        dealt = deal(mode, self._table, args)
        given = [(call, role, method, dealt.arguments[share]) for share in dealt.ranks]
        return dealt.collect(self._answers(given))

    def end(self):
        self._answers([(end,)] * len(self._table))

    def _answers(self, calls):
        return results([self._processes.ask(rank, *call) for rank, call in enumerate(calls)])


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    return make_reward_folder(tmp_path_factory.mktemp("reward"))


@pytest.fixture
def run_roles(rank_processes, make_config, reward_folder):
    rank_processes.leave()

    def run(batch: Batch, folder=None, **trainer) -> Told:
        config = make_config(
            algorithm={
                **preset_values("ppo"),
                "critic": {"use": True},
                "entropy_coefficient": 0.01,
                "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"},
                "importance_sampling": {"ratio_to": "proximal"},
            },
            rewards={"reward_model": str(reward_folder)},
            trainer={"warmup_steps": 0} | trainer,
            sync={"timeout": PATIENCE},
        )
        if folder is not None:
            config = msgspec.structs.replace(config, model_folder=folder)
        roles = Roles(rank_processes, config)
        try:
            answers = [roles.call("actor", "generate_sequences", requests())]
            before = roles.call("actor", "compute_log_prob", batch)
            fields = before | roles.call("actor", "compute_ref_log_prob", batch)
            fields |= roles.call("critic", "compute_values", batch)
            fields |= roles.call("reward", "compute_rm_score", batch)
            metrics = roles.call("critic", "update_critic", batch)
            metrics |= roles.call("actor", "update_actor", replace(batch, **before))
            fields["after"] = roles.call("actor", "compute_log_prob", batch)["proximal_logprobs"]
            fields["values after"] = roles.call("critic", "compute_values", batch)["values"]
            answers.append(roles.call("actor", "generate_sequences", requests()))
            return Told(fields, metrics, answers)
        finally:
            roles.end()

    return run


def requests() -> list[GenerationRequest]:
    """Greedy requests of several lengths; an odd number, so that shares differ."""
    return [
        GenerationRequest(
            tokens=[(7 * ordinal + place) % 90 + 3 for place in range(1 + ordinal % 3)],
            sampling=Sampling(seed=5, max_new_tokens=3 + ordinal, temperature=0.0),
            ordinal=ordinal,
            sample=0,
        )
        for ordinal in range(5)
    ]


def batch_of_noise() -> Batch:
    batch = collate(make_groups("roles", 1), 0)
    lot = torch.Generator().manual_seed(0)
    noise = torch.randn(batch.response_mask.shape, generator=lot) * batch.response_mask
    return replace(batch, advantages=noise, returns=noise + 1.0, values=noise * 0.0)


def plain_logprobs(folder, batch: Batch) -> torch.Tensor:
    """Log-probabilities by transformers' model, each row by itself and unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs = torch.zeros(batch.response_mask.shape)
    for row in range(len(batch)):
        real = batch.input_ids[row][batch.attention_mask[row].bool()][None]
        count = int(batch.response_mask[row].sum())
        with torch.no_grad():
            logs = model(real).logits[0].log_softmax(-1)[-count - 1 : -1]
        logprobs[row, :count] = logs.gather(-1, real[0, -count:, None])[:, 0]
    return logprobs


def plain_scores(folder, policy_folder, batch: Batch) -> torch.Tensor:
    """Scores by transformers' model, of each row's text in the reward model's own tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    own, policy = load_tokenizer(folder), load_tokenizer(policy_folder)
    scores = []
    for row in range(len(batch)):
        real = batch.input_ids[row][batch.attention_mask[row].bool()]
        text = policy.decode(real.tolist(), skip_special_tokens=True)
        with torch.no_grad():
            scores.append(model(torch.tensor([own.encode(text)])).logits[0, 0])
    return torch.stack(scores)


@pytest.mark.parametrize(
    "layout",
    [
        "TP 2 x PP 2, generates at TP 2",
        *(
            pytest.param(layout, marks=pytest.mark.nightly)
            for layout in LAYOUTS
            if layout != "TP 2 x PP 2, generates at TP 2"
        ),
    ],
)
def test_roles_answer_at_every_layout_what_plain_models_answer(
    run_roles, policy_folder, reward_folder, layout
):
    batch = batch_of_noise()
    expected = run_roles(batch, ranks=1)
    plain = plain_logprobs(policy_folder, batch)
    torch.testing.assert_close(expected.fields["proximal_logprobs"], plain, atol=1e-5, rtol=0)
    scores = plain_scores(reward_folder, policy_folder, batch)
    torch.testing.assert_close(expected.fields["rewards"], scores, atol=1e-5, rtol=0)
    assert scores.std() > 0.01
    assert expected.fields["values after"].std() > 0.001, "the head begins at 0, and has learned"
    engine = HuggingFaceEngine(
        AutoModelForCausalLM.from_pretrained(policy_folder),
        load_tokenizer(policy_folder),
        serves=StepRef(1, 0),
    )
    greedy = [generation.tokens for generation in engine.generate_here(requests())]
    actual = run_roles(batch, **LAYOUTS[layout])
    assert_close(actual, expected)
    assert [generation.tokens for generation in actual.answers[0]] == greedy


def make_actor(rank, config):
    rank.objects.roles = {"actor": ActorRolloutRefWorker(config, rank.number, role="actor")}
    return rank.objects.roles["actor"].address() if rank.number == 0 else None


def test_rank_0_forms_the_group_of_weights_although_no_other_rank_is_in_the_run_yet(
    rank_processes, make_config
):
    rank_processes.leave()
    config = make_config(trainer={**MEGATRON, "ranks": 2}, sync={"method": "nccl"})
    rank_processes.start(2)
    place, _ = rank_processes.call(range(2), make_actor, config)
    rank_processes.call(range(2), begin, *place)
    with raises(DeadlineExceeded, missing=re.compile("explorer")):
        rank_processes.call([0], call, "actor", "setup_weight_sync_group", (1, 0.2))
    rank_processes.call(range(2), end)


def assert_close(actual: Told, expected: Told) -> None:
    assert actual.fields.keys() == expected.fields.keys()
    for name, value in actual.fields.items():
        torch.testing.assert_close(value, expected.fields[name], atol=1e-4, rtol=1e-4)
    assert actual.metrics.keys() == expected.metrics.keys()
    for name, value in actual.metrics.items():
        assert value == pytest.approx(expected.metrics[name], abs=1e-3, rel=1e-3), name
    for step, (answers, others) in enumerate(zip(actual.answers, expected.answers, strict=True)):
        for mine, theirs in zip(answers, others, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            assert mine.versions == [(StepRef(1, step), len(mine.tokens))]
    first, second = actual.answers
    assert [generation.logprobs for generation in first] != [
        generation.logprobs for generation in second
    ]


def test_roles_of_a_mixture_of_experts_answer_where_its_experts_are_spread(
    run_roles, megatron_folder, policy_folder, tmp_path
):
    folder = shutil.copytree(megatron_folder("qwen3-moe"), tmp_path / "moe")
    load_tokenizer(policy_folder).save_pretrained(folder)
    batch = batch_of_noise()
    expected = run_roles(batch, folder, ranks=1)
    spread = {**MEGATRON, "ranks": 2, "expert_parallel": 2, "rollout_tensor_parallel": 1}
    assert_close(run_roles(batch, folder, **spread), expected)
