"""Models on megatron-core, on real ranks over Gloo: what they compute, and which weights."""

from __future__ import annotations

import pytest

from tests.support.errors import assert_attributes, raises

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    LayoutRefused,
    OptimizerOptions,
    ParallelLayout,
)
from trinity_workers.engines.megatron import layout as megatron_layout  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.heavy]

ONE = ParallelLayout()
TENSOR = ParallelLayout(tensor=2)
PIPELINE = ParallelLayout(pipeline=2)
VIRTUAL = ParallelLayout(pipeline=2, virtual=2)
BOTH = ParallelLayout(tensor=2, pipeline=2)
EXPERTS = ParallelLayout(expert=2)
SEQUENCE = ParallelLayout(tensor=2, sequence_parallel=True)
CONTEXT = ParallelLayout(context=2)

CASES = [
    ("qwen2", 1, ONE),
    ("qwen2-untied", 2, TENSOR),
    ("qwen3-deep", 2, VIRTUAL),
    ("llama", 2, TENSOR),
    ("llama-one-group", 2, PIPELINE),
    ("qwen3-moe", 2, EXPERTS),
    ("qwen2-moe", 2, PIPELINE),
    ("qwen3", 4, BOTH),
    ("qwen3", 2, SEQUENCE),
    ("llama-scaled", 2, CONTEXT),
    ("qwen2-moe", 4, ParallelLayout(tensor=2, context=2, expert=2, sequence_parallel=True)),
    ("deepseek", 2, EXPERTS),
    ("deepseek", 2, SEQUENCE),
    ("moonlight", 2, PIPELINE),
    ("moonlight", 2, SEQUENCE),
]
NIGHTLY_CASES = [
    ("qwen2", 2, TENSOR),
    ("qwen2", 2, PIPELINE),
    ("qwen3", 2, TENSOR),
    ("qwen3", 2, PIPELINE),
    ("llama", 4, BOTH),
    ("llama-scaled", 2, TENSOR),
    ("qwen3-moe", 1, ONE),
    ("qwen3-moe", 2, PIPELINE),
    ("qwen2-moe", 2, EXPERTS),
    ("qwen2-untied", 2, SEQUENCE),
    ("llama-one-group", 2, CONTEXT),
    ("llama-scaled", 4, ParallelLayout(context=2, pipeline=2)),
    ("qwen3-deep", 4, ParallelLayout(pipeline=2, virtual=2, context=2)),
    ("qwen3-moe", 4, ParallelLayout(tensor=2, expert=2, sequence_parallel=True)),
    ("deepseek", 1, ONE),
    ("moonlight", 1, ONE),
    ("moonlight", 2, VIRTUAL),
    ("deepseek", 2, CONTEXT),
    ("moonlight", 4, ParallelLayout(tensor=2, context=2, expert=2, sequence_parallel=True)),
]


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES)],
)
def test_logits_are_hugging_faces_and_the_stream_its_weights_bit_for_bit(
    engine_ranks, megatron_folder, name, world, layout
):
    ranks = engine_ranks(name, world, layout)
    tokens = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(megatron_folder(name))
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    outputs = [output for output in ranks(at.logits, at.unpadded(tokens)) if output is not None]
    assert len(outputs) == world // layout.pipeline, "the last stage's ranks have them"
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)

    weights = at.in_folder(megatron_folder(name))
    for streamed in ranks(at.full_weights):
        assert sorted(streamed) == sorted(weights)
        for key, value in streamed.items():
            assert identical(value, weights[key]), key


@pytest.mark.parametrize(
    ("layout", "trained"),
    [
        (TENSOR, True),
        (PIPELINE, False),
        pytest.param(TENSOR, False, marks=pytest.mark.nightly),
        pytest.param(PIPELINE, True, marks=pytest.mark.nightly),
    ],
)
def test_a_bfloat16_engine_streams_every_tensor_in_bfloat16(
    engine_ranks, megatron_folder, layout, trained
):
    optimizer = OptimizerOptions(learning_rate=1e-3) if trained else None
    options = {"dtype": torch.bfloat16}
    ranks = engine_ranks("qwen3", 2, layout, optimizer=optimizer, options=options)
    weights = {
        key: tensor.bfloat16() for key, tensor in at.in_folder(megatron_folder("qwen3")).items()
    }
    for streamed in ranks(at.full_weights):
        at.assert_same(streamed, weights)
    for shards in ranks(local_shards):
        assert {tensor.dtype for _, tensor, _, _ in shards} == {torch.bfloat16}


def local_shards(rank):
    return [
        (shard.name, shard.tensor.clone(), shard.global_shape, shard.offsets)
        for shard in rank.objects.engine.local_shards()
    ]


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [("qwen2", 1, ONE), ("llama", 4, BOTH), ("qwen2-moe", 2, EXPERTS), ("qwen3-deep", 2, VIRTUAL)],
)
def test_local_shards_lie_where_they_say_and_cover_every_tensor(
    engine_ranks, megatron_folder, name, world, layout
):
    weights = at.in_folder(megatron_folder(name))
    missing = {key: torch.ones_like(value, dtype=torch.bool) for key, value in weights.items()}
    for shards in engine_ranks(name, world, layout)(local_shards):
        for key, tensor, shape, offsets in shards:
            assert shape == weights[key].shape, key
            place = tuple(
                slice(start, start + size)
                for start, size in zip(offsets, tensor.shape, strict=True)
            )
            assert identical(tensor, weights[key][place]), key
            missing[key][place] = False
    assert not any(tensor.any() for tensor in missing.values())


@pytest.mark.parametrize(
    ("name", "layout", "attributes"),
    [
        ("qwen2", ParallelLayout(context=4), {"fault": "ranks", "ranks": 2, "context": 4}),
        ("qwen2", ParallelLayout(context=2, sequence_parallel=True), {"fault": "sequence"}),
        ("qwen2", ParallelLayout(tensor=3), {"fault": "ranks", "ranks": 2, "tensor": 3}),
        ("qwen2", ParallelLayout(pipeline=2, virtual=2), {"fault": "parts", "what": "layers"}),
        ("qwen2", ParallelLayout(virtual=2), {"fault": "virtual"}),
        ("qwen3-moe", ParallelLayout(expert=4), {"fault": "experts", "ranks": 2, "expert": 4}),
        ("qwen2", ParallelLayout(tensor=0), {"fault": "sizes"}),
        ("qwen3-moe", TENSOR, {"fault": "mixture", "tensor": 2}),
    ],
)
def test_a_layout_that_cannot_be_is_refused_on_every_rank(
    rank_group, megatron_folder, name, layout, attributes
):
    for answer in rank_group(2).answers(at.make_engine, megatron_folder(name), layout):
        assert isinstance(answer, LayoutRefused)
        assert_attributes(answer, **attributes)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [(ParallelLayout(tensor=2, expert=2), "tensor"), (ParallelLayout(expert=8), "experts")],
)
def test_a_layout_that_cannot_be_is_refused_beside_transformer_engine_too(
    monkeypatch, layout, fault
):
    monkeypatch.setattr(megatron_layout, "has_transformer_engine", lambda: True)
    with raises(LayoutRefused, fault=fault):
        layout.check(4)


def test_a_second_model_of_one_layout_may_share_sequences(rank_group, megatron_folder):
    ranks = rank_group(2)
    ranks(at.make_engine, megatron_folder("qwen2"), TENSOR)
    ranks(at.join, SEQUENCE)
    for answer in ranks.answers(at.join, CONTEXT):
        assert isinstance(answer, LayoutRefused)
        assert answer.fault == "other"
