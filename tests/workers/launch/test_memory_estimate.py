"""Estimates of memory by --check for ranks and explorers, against sums made by hand."""

import json

import pytest
from msgspec import structs

from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.memory_estimate import (
    ModelShape,
    estimate_explorer,
    estimate_generation,
    estimate_loading,
    estimate_rank,
    format_estimates,
)

SHAPE = ModelShape(
    parameters=7_000_000_000, hidden=4096, layers=32, vocabulary=32_000, key_values=2048
)


def configured(**sections):
    """Return a configuration with other values of some sections."""
    config = TrainConfig()
    changed = {
        name: structs.replace(getattr(config, name), **values) for name, values in sections.items()
    }
    return structs.replace(config, **changed)


SHORT = {"max_new_tokens": 16, "prompts_per_step": 8, "samples_per_prompt": 8}
LONG = {"max_new_tokens": 1024, "prompts_per_step": 8, "samples_per_prompt": 8}


def test_the_state_is_sixteen_bytes_a_parameter_over_all_ranks():
    config = configured(trainer={"ranks": 8}, rollouts=LONG)
    assert estimate_rank(config, SHAPE).parts["state"] == 16 * SHAPE.parameters // 8


@pytest.mark.parametrize(
    ("trainer", "part"),
    [
        ({"micro_batch_rows": 1}, "activations"),
        ({"micro_batch_rows": 1}, "logits"),
        ({"recompute": True}, "activations"),
        ({"fused_loss": True}, "logits"),
        ({"ranks": 16}, "state"),
    ],
)
def test_each_setting_of_the_page_on_memory_takes_its_part_down(trainer, part):
    before = estimate_rank(configured(trainer={"ranks": 8}, rollouts=LONG), SHAPE)
    after = estimate_rank(configured(trainer={"ranks": 8} | trainer, rollouts=LONG), SHAPE)
    assert after.parts[part] < before.parts[part]
    assert after.total < before.total


def test_a_distributed_optimizer_divides_its_twelve_bytes_by_the_replicas():
    layout = {"engine": "megatron", "ranks": 8, "tensor_parallel": 2}
    whole = estimate_rank(configured(trainer=layout), SHAPE).parts["state"]
    shared = estimate_rank(configured(trainer=layout | {"distributed_optimizer": True}), SHAPE)
    assert whole - shared.parts["state"] == 12 * SHAPE.parameters // 2 * 3 // 4


@pytest.mark.parametrize("layout", [{}, {"engine": "megatron"}, {"sequence_parallel": True}])
def test_ranks_that_share_layers_divide_state_and_what_layers_compute(layout):
    whole = estimate_rank(configured(trainer={"ranks": 8}, rollouts=LONG), SHAPE).parts
    trainer = {"ranks": 8, "tensor_parallel": 4} | layout
    shared = estimate_rank(configured(trainer=trainer, rollouts=LONG), SHAPE).parts
    # Groups of four ranks have the rows that each of them had: four times as many tokens.
    layers = 34 if "sequence_parallel" in layout else 24 + 4 * 10
    assert shared["activations"] == whole["activations"] * layers // 34
    if "engine" not in layout:
        assert shared["state"] == whole["state"]
        assert shared["gathered layers"] == whole["gathered layers"] / 4
        assert shared["logits"] == 4 * whole["logits"], "they are gathered"


def test_a_rank_that_generates_has_the_whole_policy_on_fsdp_and_its_part_on_megatron():
    trainer = {"ranks": 4, "tensor_parallel": 2, "colocated": True}
    fsdp = configured(trainer=trainer, rollouts=LONG)
    megatron = configured(trainer=trainer | {"engine": "megatron"}, rollouts=LONG)
    weights = 4 * SHAPE.parameters
    assert estimate_rank(fsdp, SHAPE).parts["served weights"] == weights
    assert estimate_rank(megatron, SHAPE).parts["served weights"] == 0
    assert estimate_generation(megatron, SHAPE).parts["served weights"] == weights // 2
    parts = estimate_generation(fsdp, SHAPE).parts
    assert parts["served weights"] == weights
    assert parts["keys and values"] == 8 * 8 * 1024 * 32 * 2048 * 4 // 4


def test_a_rank_of_fsdp_loads_the_whole_model_however_many_share_it(tmp_path):
    write_sizes(tmp_path)
    config = configured(trainer={"ranks": 64, "tensor_parallel": 8}, rollouts=SHORT)
    assert estimate_loading(config, SHAPE).parts["whole model"] == 4 * SHAPE.parameters
    _, loading, *_ = format_estimates(config, tmp_path, SHAPE.parameters)
    assert loading.startswith("memory of each rank that loads: about 26.1 GiB")


def test_an_explorer_has_two_versions_and_the_keys_and_values_of_a_claim():
    explorer = {"dtype": "bfloat16", "count": 4}
    config = configured(explorer=explorer, rollouts=LONG)
    parts = estimate_explorer(config, SHAPE).parts
    assert parts["served weights"] == parts["next version"] == 2 * SHAPE.parameters
    assert parts["keys and values"] == 2 * 8 * 1024 * 32 * 2048 * 2


def write_sizes(folder):
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    (folder / "config.json").write_text(json.dumps(sizes | {"vocab_size": 32_000}))


def test_lines_name_the_processes_and_what_the_host_has(tmp_path):
    write_sizes(tmp_path)
    config = configured(trainer={"ranks": 2}, explorer={"count": 3})
    rank, explorer, devices = format_estimates(config, tmp_path, SHAPE.parameters)
    assert rank.startswith("memory of each of 2 ranks, rank: about ")
    assert explorer.startswith("memory of each of 3 explorers, explorer: about ")
    assert "this host" in devices
    rank, generating, devices = format_estimates(
        configured(trainer={"ranks": 2, "colocated": True}), tmp_path, SHAPE.parameters
    )
    assert generating.startswith("memory of each rank that generates: about ")


def test_a_model_of_unknown_sizes_has_no_estimate(tmp_path):
    assert format_estimates(TrainConfig(), tmp_path, 1000) == []
