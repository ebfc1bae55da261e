"""A rollout layout beside the training layout: the same weights, and generation, on real ranks."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.support.errors import assert_attributes

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_schemas import Sampling, StepRef  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    HybridEngine,
    LayoutRefused,
    OptimizerOptions,
    ParallelLayout,
)
from trinity_workers.engines.megatron import resharding as module  # noqa: E402
from trinity_workers.engines.megatron.parameter_slices import parameter_slices  # noqa: E402
from trinity_workers.engines.megatron.resharding import Resharding  # noqa: E402
from trinity_workers.engines.offload import Offload  # noqa: E402
from trinity_workers.rollout_engines.base import GenerationRequest, NotServing  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402
from trinity_workers.rollout_engines.megatron import MegatronRolloutEngine  # noqa: E402
from trinity_workers.runtime.collective_errors import CollectiveBroken, PeerFailed  # noqa: E402

pytestmark = pytest.mark.megatron

EVERYTHING = Offload(param_offload=True, grad_offload=True, optimizer_offload=True)
RATE = OptimizerOptions(learning_rate=1e-2)
SPLIT = ParallelLayout(tensor=2)
VERSION = StepRef(epoch=1, step=3)
SMALL_BUCKET = 1024

CASES = [
    pytest.param("qwen2", 2, SPLIT, 1, marks=pytest.mark.nightly),
    ("qwen2", 2, ParallelLayout(), 2),
    pytest.param("qwen2", 2, ParallelLayout(pipeline=2), 2, marks=pytest.mark.nightly),
    ("qwen3-moe", 2, ParallelLayout(expert=2), 1),
    ("llama", 4, SPLIT, 4),
    ("qwen2", 4, ParallelLayout(tensor=2, context=2, sequence_parallel=True), 2),
    ("moonlight", 2, ParallelLayout(tensor=2, sequence_parallel=True), 1),
    pytest.param("deepseek", 2, ParallelLayout(pipeline=2), 1, marks=pytest.mark.nightly),
    pytest.param("qwen2", 2, ParallelLayout(context=2), 1, marks=pytest.mark.nightly),
    pytest.param(
        *("qwen3-moe", 4),
        ParallelLayout(tensor=2, expert=2, context=2, sequence_parallel=True),
        1,
        marks=pytest.mark.nightly,
    ),
]


def requests_of(rank: int) -> list[GenerationRequest]:
    """Prompts of several lengths, greedy and sampled, with a sample more on later ranks."""
    return [
        GenerationRequest(
            tokens=[(7 * ordinal + place) % 97 for place in range(1 + ordinal % 3)],
            sampling=Sampling(
                seed=5, max_new_tokens=4 + ordinal, temperature=0.0 if ordinal % 2 else 0.8
            ),
            ordinal=ordinal,
            sample=sample,
        )
        for ordinal in range(4)
        for sample in range(1 + rank)
    ]


def make_hybrid(rank, tensor: int) -> None:
    rank.objects.hybrid = HybridEngine(rank.objects.engine, tensor)


def there_and_back(rank):
    """Reshard, generate, and reshard back into training weights that were overwritten."""
    engine, hybrid = rank.objects.engine, rank.objects.hybrid
    rollouts = MegatronRolloutEngine(hybrid)
    with rollouts.serving(VERSION):
        there = {name: tensor.clone() for name, tensor in hybrid.full_tensors()}
        answers = rollouts.generate_here(requests_of(rank.number))
        slices = list(parameter_slices(hybrid.model, engine.config.vocab_size))
        for parameter in engine._parameters():
            parameter.data.fill_(7.0)
        Resharding(slices, engine.parameter_slices(), hybrid.group).run()
    rows = hybrid.model.embedding.word_embeddings.weight.shape[0]
    with pytest.raises(NotServing):
        rollouts.generate_here(requests_of(rank.number))
    return there, answers, at.full_weights(rank), rows


def huggingface_answers(folder, requests):
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = HuggingFaceEngine(model, tokenizer, serves=VERSION, deterministic=True)
    return engine.generate_here(requests)


@pytest.mark.parametrize(("name", "world", "layout", "tensor"), CASES)
def test_weights_are_bit_exact_there_and_back_and_generate_what_hugging_face_does(
    engine_ranks, megatron_folder, name, world, layout, tensor
):
    ranks = engine_ranks(name, world, layout)
    ranks(make_hybrid, tensor)
    weights = at.in_folder(megatron_folder(name))
    for rank, (there, answers, back, rows) in enumerate(ranks(there_and_back)):
        at.assert_same(there, weights)
        at.assert_same(back, weights)
        assert rows < 98 or tensor == 1, "it is a shard"
        expected = huggingface_answers(megatron_folder(name), requests_of(rank))
        for mine, theirs in zip(answers, expected, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            assert (mine.versions, mine.finished) == (theirs.versions, theirs.finished)


def memory(rank) -> tuple[bool, ...]:
    engine, hybrid = rank.objects.engine, rank.objects.hybrid
    state = [
        tensor
        for chained in engine.optimizer.chained_optimizers
        for values in chained.optimizer.state.values()
        for tensor in values.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
    ]
    gradients = [buffer.grad_data for chunk in engine.module for buffer in chunk.buffers]
    return tuple(
        any(tensor.untyped_storage().nbytes() for tensor in tensors)
        for tensors in (hybrid.model.parameters(), engine._parameters(), gradients, state)
    )


def train_around_generation(rank, batches, with_generation: bool):
    """Train, generate, and train on; return losses, sizes, draws and the weights."""
    torch.manual_seed(rank.number)
    losses = at.train(rank, batches)
    draws, memories = [], []
    rollouts = MegatronRolloutEngine(rank.objects.hybrid) if with_generation else None
    for _ in range(2 if with_generation else 0):
        with rollouts.serving(VERSION):
            memories.append(memory(rank))
            draws.append(torch.rand(3))
        memories.append(memory(rank))
    drawn = torch.rand(3)
    return losses + at.train(rank, batches), memories, draws, drawn, at.full_weights(rank)


def test_memory_changes_hands_and_training_goes_on_as_if_nothing_was_generated(engine_ranks):
    batches = [at.padded_batch(0)]
    ranks = engine_ranks("qwen2", 2, SPLIT, RATE)
    expected = ranks(train_around_generation, batches, with_generation=False)
    ranks = engine_ranks("qwen2", 2, SPLIT, RATE, {"offload": EVERYTHING})
    ranks(make_hybrid, 1)
    results = ranks(train_around_generation, batches, with_generation=True)
    for (losses, memories, draws, drawn, weights), alone in zip(results, expected, strict=True):
        assert losses == alone[0]
        assert memories == [(True, False, False, False), (False, False, False, False)] * 2
        assert identical(drawn, alone[3]), "training's generator"
        assert not identical(draws[0], draws[1]), "generation's own goes on"
        assert not identical(draws[0], drawn)
        at.assert_same(weights, alone[4])
    assert not identical(results[0][2][0], results[1][2][0]), "replicas draw differently"


def save_model(rank, folder):
    rank.objects.engine.checkpoint_manager.checkpoint_save_contents = ["model"]
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank, folder):
    rank.objects.engine.load_checkpoint(str(folder))


def generate_once(rank):
    """Return answers, and the weights that they were generated with."""
    hybrid = rank.objects.hybrid
    rollouts = MegatronRolloutEngine(hybrid, deterministic=True)
    with rollouts.serving(VERSION):
        weights = {name: value.clone() for name, value in hybrid.full_tensors()}
        return rollouts.generate_here(requests_of(0)), weights


def test_answers_after_a_load_are_of_the_loaded_weights(engine_ranks, megatron_folder, tmp_path):
    ranks = engine_ranks("qwen2", 2, SPLIT, RATE, {"offload": EVERYTHING})
    ranks(make_hybrid, 1)
    ranks(save_model, tmp_path)
    ranks(at.train, [at.padded_batch(0)])
    trained, _ = ranks(generate_once)[0]
    ranks(load, tmp_path)
    for answers, weights in ranks(generate_once):
        at.assert_same(weights, at.in_folder(megatron_folder("qwen2")))
        assert answers != trained
        expected = huggingface_answers(megatron_folder("qwen2"), requests_of(0))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def reshard_with(rank, fault, culprit: int):
    """Reshard in small buckets; one rank meets the fault in its second one."""
    calls = 0

    def faulty(resharding, bucket):
        nonlocal calls
        calls += 1
        if calls == 2 and rank.number == culprit:
            fault(resharding)
        return run(resharding, bucket)

    run = Resharding._run
    before = [parameter.clone() for parameter in rank.objects.engine._parameters()]
    small = patch.object(module.buckets, "__defaults__", (SMALL_BUCKET,))
    with small, patch.object(Resharding, "_run", faulty):
        try:
            with rank.objects.hybrid.resharded():
                error = None
        except Exception as caught:
            error = caught
    same = all(map(identical, before, rank.objects.engine._parameters()))
    return error, same, memory_of_rollout(rank)


def memory_of_rollout(rank) -> bool:
    return any(
        parameter.untyped_storage().nbytes() for parameter in rank.objects.hybrid.model.parameters()
    )


def cannot_copy(resharding) -> None:
    resharding._target = lambda copy: torch.empty(1)[5]


def die(resharding) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def undo(rank) -> None:
    vars(rank.objects.hybrid._resharding).pop("_target", None)


def test_a_fault_in_the_middle_leaves_the_training_weights_and_names_the_rank(
    engine_ranks, rank_processes
):
    ranks = engine_ranks("qwen2", 2, SPLIT)
    ranks(make_hybrid, 1)
    [mine, theirs] = ranks(reshard_with, cannot_copy, 1)
    assert isinstance(mine[0], PeerFailed)
    assert "rank 1 failed: IndexError" in str(mine[0])
    assert isinstance(theirs[0], IndexError)
    assert [mine[1:], theirs[1:]] == [(True, False)] * 2
    ranks(undo)
    assert [result[0] for result in ranks(reshard_with, die, -1)] == [None, None], "it works again"
    try:
        survivor, dead = ranks.answers(reshard_with, die, 1)
        assert isinstance(dead, ProcessLookupError)
        assert isinstance(survivor[0], CollectiveBroken)
        assert "because rank 1 died or was too slow" in str(survivor[0])
        assert survivor[1:] == (True, False)
    finally:
        rank_processes.end()


def test_a_rollout_layout_that_cannot_be_is_refused_on_every_rank(engine_ranks):
    ranks = engine_ranks("llama-one-group", 2, ParallelLayout())
    for answer in ranks.answers(make_hybrid, 2):
        assert isinstance(answer, LayoutRefused)
        assert_attributes(answer, fault="parts", what="key-value heads", count=1, parts=2)
    for answer in ranks.answers(make_hybrid, 3):
        assert isinstance(answer, LayoutRefused)
