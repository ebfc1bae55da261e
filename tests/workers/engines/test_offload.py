"""Memory that idle models give back, on real ranks: storages of size 0, and the same training."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine, frozen_policy  # noqa: E402
from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout  # noqa: E402
from trinity_workers.engines.model_memory import (  # noqa: E402
    ALL,
    MemoryAway,
    OffloadedModel,
    optimizer_tensors,
)
from trinity_workers.engines.offload import FrozenOffload, Offload  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402

EVERYTHING = Offload(param_offload=True, grad_offload=True, optimizer_offload=True)
RATE = OptimizerOptions(learning_rate=1e-2)
SPLIT = ParallelLayout(tensor=2)


def sizes(tensors) -> set[bool]:
    """Whether storages have memory, of all those that have any tensor in them."""
    return {
        bool(getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes())
        for tensor in tensors
        if tensor.numel()
    }


# --- storages, without an engine ---------------------------------------------------------------


def test_storages_of_size_0_come_back_bit_for_bit_under_every_view():
    whole = torch.randn(64)
    views = [whole[:10], whole[10:].view(9, 6).t()]
    before = [view.clone() for view in views]
    memory = OffloadedModel(FrozenOffload(param_offload=True), lambda: views)
    assert sizes(views) == {False}
    with memory.resident():
        with memory.resident():
            assert sizes(views) == {True}
        assert all(map(identical, views, before)), "an inner block's end moves nothing"
        views[0].mul_(2)
    assert sizes(views) == {False}
    with memory.resident():
        assert identical(views[0], before[0] * 2)
        assert identical(views[1], before[1])


def test_gradients_are_dropped_and_come_back_as_zeros():
    weight, buffer = torch.ones(3), torch.ones(3)
    memory = OffloadedModel(Offload(grad_offload=True), lambda: [weight], lambda: [buffer])
    assert sizes([weight]) == {True}
    assert sizes([buffer]) == {False}
    with memory.resident(*ALL):
        assert buffer.tolist() == [0.0] * 3


def test_what_an_optimizer_shares_with_the_parameters_is_the_parameters():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    memory = OffloadedModel(
        Offload(optimizer_offload=True),
        lambda: [weight],
        tuple,
        lambda: optimizer_tensors(optimizer),
    )
    state = optimizer.state[weight]
    assert sizes([weight]) == {True}
    assert sizes([state["exp_avg"], state["exp_avg_sq"]]) == {False}
    del memory


def test_an_error_in_a_block_moves_the_part_away_again():
    weight = torch.ones(3)
    memory = OffloadedModel(FrozenOffload(param_offload=True), lambda: [weight])
    with pytest.raises(KeyError), memory.resident():
        raise KeyError
    assert sizes([weight]) == {False}


def test_a_module_that_is_called_while_its_parameters_are_away_says_so():
    module = torch.nn.Linear(2, 2)
    memory = OffloadedModel(FrozenOffload(param_offload=True), module.parameters)
    memory.guard(module)
    with memory.resident():
        module(torch.ones(2))
    with pytest.raises(MemoryAway):
        module(torch.ones(2))


# --- Megatron ----------------------------------------------------------------------------------


def storages(rank) -> dict[str, set[bool]]:
    engine = rank.objects.engine
    return {
        "parameters": sizes(engine._parameters()),
        "gradients": sizes(buffer.grad_data for chunk in engine.module for buffer in chunk.buffers),
        "optimizer": sizes(
            tensor
            for chained in engine.optimizer.chained_optimizers
            for state in chained.optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor)
        ),
    }


def shards(rank) -> dict[str, torch.Tensor]:
    """Shards that are kept while the model moves."""
    tensors = {shard.name: shard.tensor for shard in rank.objects.engine.local_shards()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def kept_stream(rank) -> dict[str, torch.Tensor]:
    tensors = dict(rank.objects.engine.get_per_tensor_param())
    return {name: tensor.clone() for name, tensor in tensors.items()}


def checkpoint_beside_training(rank, folder, batches):
    """Begin a checkpoint, train on, write it, and train on from it."""
    engine = rank.objects.engine
    writes = engine.prepare_checkpoint(str(folder))
    losses = at.train(rank, batches)
    for write in writes.values():
        write()
    engine.load_checkpoint(str(folder))
    return losses, at.train(rank, batches)


CASES = {
    "float32": (SPLIT, RATE, {}),
    "bfloat16": (SPLIT, RATE, {"dtype": torch.bfloat16}),
    "one rank's tensors": (ParallelLayout(), RATE, {}),
    "context": (ParallelLayout(context=2), RATE, {}),
    "sequence": (ParallelLayout(tensor=2, sequence_parallel=True), RATE, {}),
    "distributed": (ParallelLayout(), OptimizerOptions(learning_rate=1e-2, distributed=True), {}),
}
LONG = {"float32", "context"}
"""Cases that are left to ``make nightly``."""


@pytest.mark.megatron
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.nightly if case in LONG else ()) for case in CASES],
)
def test_megatron_trains_alike_with_its_idle_memory_away(engine_ranks, case, tmp_path):
    layout, optimizer, options = CASES[case]
    batches = [at.padded_batch(seed) for seed in range(2)]
    results = []
    for offload in (Offload(), EVERYTHING):
        ranks = engine_ranks("qwen2", 2, layout, optimizer, {**options, "offload": offload})
        losses = [ranks(at.train, batches)]
        if offload is EVERYTHING:
            nothing = {"parameters": {False}, "gradients": {False}, "optimizer": {False}}
            assert ranks(storages) == [nothing, nothing]
        reads = [ranks(kept_stream), ranks(shards), ranks(at.logprobs, batches[0])]
        losses += ranks(checkpoint_beside_training, tmp_path, batches)
        results.append((losses, reads, ranks(at.full_weights)))
    (losses, reads, weights), (losses_away, reads_away, weights_away) = results
    assert losses_away == losses
    for mine, theirs in zip(weights_away, weights, strict=True):
        at.assert_same(mine, theirs)
    for kind in (0, 1):
        for mine, theirs in zip(reads_away[kind], reads[kind], strict=True):
            at.assert_same(mine, theirs)
    assert all(map(identical, reads_away[2], reads[2]))


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("offload", "away"),
    [
        (Offload(param_offload=True), "parameters"),
        (Offload(grad_offload=True), "gradients"),
        (Offload(optimizer_offload=True), "optimizer"),
    ],
)
def test_each_part_is_moved_by_itself(rank_group, megatron_folder, offload, away):
    ranks = rank_group(1)
    ranks(at.make_engine, megatron_folder("qwen2"), ParallelLayout(), RATE, {"offload": offload})
    ranks(at.train, [at.padded_batch(0)])
    [stored] = ranks(storages)
    assert stored == {part: {part != away} for part in ALL}


# --- FSDP --------------------------------------------------------------------------------------


def fsdp_steps(rank, folder, offload: Offload, path):
    """Train, save and load, and train on; return log-probabilities and weights."""
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    engine = FSDPEngine(folder, device=cpu, learning_rate=1e-2, offload=offload)
    reference = frozen_policy(
        folder, device=cpu, offload=FrozenOffload(param_offload=offload.param_offload)
    )
    batch = at.padded_batch(rank.number)
    outputs = []

    def train() -> None:
        with engine.resident(*ALL):
            logprobs = response_logprobs(engine.module, batch, 1.0)
            engine.optimizer_step(-logprobs.mean())
        with torch.no_grad(), reference.resident():
            outputs.append(response_logprobs(reference, batch, 1.0))
        outputs.append(logprobs.detach())

    train()
    engine.save_checkpoint(str(path))
    train()
    dist.barrier()
    engine.load_checkpoint(str(path))
    train()
    is_away = (
        sizes(engine.module.parameters()) | sizes(reference.parameters()),
        {parameter.grad is not None for parameter in engine.module.parameters()},
        sizes(optimizer_tensors(engine.optimizer)),
    )
    weights = dict(engine.get_per_tensor_param())
    return outputs, is_away, {name: tensor.clone() for name, tensor in weights.items()}


@pytest.mark.megatron
@pytest.mark.parametrize("world", [1, 2])
def test_fsdp_trains_alike_with_its_idle_memory_away(rank_group, policy_folder, tmp_path, world):
    ranks = rank_group(world)
    here = ranks(fsdp_steps, policy_folder, Offload(), tmp_path / "here")
    away = ranks(fsdp_steps, policy_folder, EVERYTHING, tmp_path / "away")
    for (outputs, is_away, weights), (expected, is_here, expected_weights) in zip(
        away, here, strict=True
    ):
        assert is_away == ({False}, {False}, {False})
        assert is_here == ({True}, {True}, {True})
        assert all(map(identical, outputs, expected))
        at.assert_same(weights, expected_weights)


def accumulate_outside(rank, folder):
    """Accumulate a loss whose model has left the device since."""
    engine = FSDPEngine(folder, device=torch.device("cpu"), learning_rate=1e-2, offload=EVERYTHING)
    with engine.resident(*ALL):
        loss = -response_logprobs(engine.module, at.padded_batch(0), 1.0).mean()
    engine.accumulate(loss, first=True, last=True)


@pytest.mark.megatron
def test_fsdp_refuses_to_differentiate_while_its_memory_is_away(rank_group, policy_folder):
    [error] = rank_group(1).answers(accumulate_outside, policy_folder)
    assert isinstance(error, MemoryAway)
