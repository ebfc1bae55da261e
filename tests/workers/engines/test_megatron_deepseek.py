"""DeepSeek-V3's configurations: what megatron-core builds otherwise is refused."""

from __future__ import annotations

import pytest

from tests.support.errors import raises

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support.megatron_ranks import CONFIGS
from trinity_workers.engines.megatron import (
    LayoutRefused,
    ModelOptions,
    ParallelLayout,
    UnsupportedModel,
)
from trinity_workers.engines.megatron.model import check_model, transformer_config

pytestmark = pytest.mark.megatron


def rotary(**values):
    return {"rope_parameters": CONFIGS["deepseek"]().rope_parameters | values}


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        (rotary(rope_type="linear"), "the rotary embedding 'linear'"),
        (rotary(attention_factor=1.5), "the rotary setting attention_factor"),
        (rotary(truncate=False), "the rotary setting truncate"),
        (rotary(mscale=None), "mscale_all_dim without mscale"),
        ({"rope_interleave": False}, "rotary dimensions that are not interleaved"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"attention_bias": True}, "biases in its linear layers"),
        (
            {"norm_topk_prob": False},
            "weights of experts that are not normalised over several",
        ),
        (
            {"num_experts_per_tok": 1, "topk_group": 1},
            "weights of experts that are not normalised over several",
        ),
        (
            {"num_experts_per_tok": 6},
            "groups of experts that are weighed by two, where each gives a token another number",
        ),
    ],
)
def test_what_megatron_core_builds_otherwise_is_refused(changes, feature):
    config = CONFIGS["deepseek"]()
    for name, value in changes.items():
        setattr(config, name, value)
    with raises(UnsupportedModel, model_type="deepseek_v3", feature=feature):
        check_model(config, ParallelLayout())


def test_latents_that_ranks_cannot_divide_are_refused():
    config = CONFIGS["deepseek"]()
    config.kv_lora_rank = 11
    layout = ParallelLayout(tensor=2, sequence_parallel=True)
    with raises(LayoutRefused, fault="parts", what="dimensions of latents", count=15, parts=2):
        check_model(config, layout)
    check_model(CONFIGS["moonlight"](), layout)


def test_fused_norms_with_another_epsilon_than_that_of_latents_are_refused():
    options = ModelOptions(transformer_engine=True)
    with raises(UnsupportedModel, model_type="deepseek_v3"):
        transformer_config(CONFIGS["moonlight"](), ParallelLayout(), options)
