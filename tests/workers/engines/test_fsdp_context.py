"""Ranks that share sequences on FSDP: each computes its columns, and unfit models are refused."""

from __future__ import annotations

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.workers.engines.test_fsdp_options import shapes_of_inputs  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.fsdp_context import (  # noqa: E402
    ContextRanks,
    ContextRefused,
    check_shared,
    share_sequences,
)
from trinity_workers.engines.fsdp_options import FSDPOptions  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shared(rank: Rank, config) -> None:
    """Share the sequences of a random model, and check it."""
    del rank
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    share_sequences(model, dist.group.WORLD)
    check_shared(model, dist.group.WORLD, CPU)


def test_models_with_plain_causal_attention_are_shared(rank_group):
    ranks = rank_group(2)
    ranks(shared, LlamaConfig(**SIZES))
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    ranks(shared, Qwen3MoeConfig(**SIZES, **experts, head_dim=8))


@pytest.mark.parametrize(
    ("config", "attributes"),
    [
        (MistralConfig(**SIZES, sliding_window=8), {"option": "sliding_window"}),
        (GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4), {"fault": "class"}),
    ],
    ids=["window", "own attention"],
)
def test_a_model_with_other_attention_is_refused_on_every_rank(rank_group, config, attributes):
    for answer in rank_group(2).answers(shared, config):
        with raises(ContextRefused, **attributes):
            raise answer


def altered(rank: Rank) -> None:
    """Share a model whose layers lose what they are told of the group."""
    del rank
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, inputs: (args, inputs | {"sequence_group": None}), with_kwargs=True
        )
    share_sequences(model, dist.group.WORLD)
    check_shared(model, dist.group.WORLD, CPU)


def test_a_model_that_attends_to_its_own_columns_alone_is_refused(rank_group):
    for answer in rank_group(2).answers(altered):
        with raises(ContextRefused, fault="logits", model="LlamaForCausalLM"):
            raise answer


def columns(rank: Rank, folder):
    """Return log-probabilities of one batch, and the shape that the layers computed."""
    context = ContextRanks.of(2, CPU)
    engine = FSDPEngine(
        folder, device=CPU, learning_rate=None, options=FSDPOptions(context=context)
    )
    shapes, batch = shapes_of_inputs(engine.module), collate(make_groups("r", 1), 0)
    with torch.no_grad():
        logprobs = response_logprobs(engine.module, batch, group=context.group)
    return shapes, tuple(batch.input_ids.shape), logprobs


def test_a_rank_computes_its_columns_alone_and_knows_all_log_probabilities(
    rank_group, policy_folder
):
    first, second = rank_group(2)(columns, policy_folder)
    for shapes, (rows, width), logprobs in (first, second):
        assert shapes == [(rows, -(-width // 4) * 2)], "half of the columns, padded to chunks"
        torch.testing.assert_close(logprobs, first[2], rtol=0, atol=0)
