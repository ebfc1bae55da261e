"""A bfloat16 policy on FSDP: it computes and is published so, and is trained in float32."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.tensors import assert_equal  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.helpers.fsdp import fsdp_shards  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402

SMALL = 1e-6
"""A learning rate that is common in RL; a bfloat16 number changes by no less than 0.4%."""
STEPS = 3


def make_engine(rank, folder, dtype="bfloat16"):
    torch.manual_seed(0)
    rank.objects.engine = FSDPEngine(
        folder, device=torch.device("cpu"), learning_rate=SMALL, dtype=dtype
    )


def loss_of(module):
    tokens = torch.arange(3, 43).reshape(4, 10)
    logits = module(input_ids=tokens).logits
    assert logits.dtype is torch.bfloat16, "it computes in bfloat16"
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def train(rank):
    engine = rank.objects.engine
    for _ in range(STEPS):
        assert engine.optimizer_step(loss_of(engine.module)) > 0


def masters(rank):
    return {
        name: parameter.detach().full_tensor().clone()
        for name, parameter in rank.objects.engine.module.named_parameters()
    }


def published(rank):
    engine = rank.objects.engine
    full = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    shards = [
        (shard.name, shard.tensor.dtype)
        for shard in fsdp_shards(engine.module, engine.published_dtypes)
    ]
    return full, shards


def changed(before, after):
    """The share of the elements that changed."""
    differing = sum(int((before[name] != tensor).sum()) for name, tensor in after.items())
    return differing / sum(tensor.numel() for tensor in after.values())


def trained_in_bfloat16_alone(folder):
    """The share of the elements that change where there are no master weights."""
    model, _ = load_policy(folder, "bfloat16")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=SMALL, betas=(0.9, 0.99))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return changed(
        before, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )


def test_a_small_learning_rate_changes_master_weights_where_bfloat16_would_round_it_away(
    rank_group, policy_folder
):
    ranks = rank_group(2)
    ranks(make_engine, policy_folder)
    before = ranks(masters)[0]
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    ranks(train)
    after = ranks(masters)[0]
    assert changed(before, after) > 0.9
    assert trained_in_bfloat16_alone(policy_folder) < 0.1
    # They add up: the steps go one way, and an element moves further than in one of them.
    largest = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    assert largest > 2 * SMALL


def masters_after_a_forward_pass(rank):
    engine = rank.objects.engine
    expected = {name: value.clone() for name, value in engine.master_params()}
    with torch.no_grad():  # so that no backward pass frees what was gathered
        loss_of(engine.module)
    return expected, {name: value.clone() for name, value in engine.master_params()}


def test_masters_are_float32_also_after_a_forward_pass_alone(rank_group, policy_folder):
    ranks = rank_group(2)
    ranks(make_engine, policy_folder)
    ranks(train)
    expected, masters = ranks(masters_after_a_forward_pass)[0]
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert_equal(masters, expected)


def test_it_is_published_in_bfloat16_as_explorers_load_it(rank_group, policy_folder):
    ranks = rank_group(2)
    ranks(make_engine, policy_folder)
    ranks(train)
    expected = {name: tensor.bfloat16() for name, tensor in ranks(masters)[0].items()}
    served = {
        name: parameter.dtype
        for name, parameter in load_policy(policy_folder, "bfloat16")[0].named_parameters()
    }
    for full, shards in ranks(published):
        assert_equal(full, expected)
        assert {name: tensor.dtype for name, tensor in full.items()} == served
        assert all(dtype is torch.bfloat16 for _, dtype in shards)
        assert shards


def save(rank, folder):
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank, folder):
    rank.objects.engine.load_checkpoint(str(folder))


@pytest.mark.parametrize("world", [2, 1])
def test_a_checkpoint_keeps_the_master_weights_to_the_bit(
    rank_group, policy_folder, tmp_path, world
):
    ranks = rank_group(2)
    ranks(make_engine, policy_folder)
    ranks(train)
    ranks(save, tmp_path)
    expected = ranks(masters)[0]

    ranks = rank_group(world)
    ranks(make_engine, policy_folder)
    ranks(load, tmp_path)
    assert_equal(ranks(masters)[0], expected)
