"""Engines train with the options of their configuration after they have loaded others."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402

EARLIER = LearningRate(highest=1e-2, warmup_steps=2)
ADAMW = AdamWOptions(weight_decay=0.2, beta1=0.8, beta2=0.95, epsilon=1e-5)
LATER = LearningRate(highest=1e-4, schedule="linear", steps=12)


def make_engine(rank, folder, rate, adamw=AdamWOptions()):  # noqa: B008  # frozen
    torch.manual_seed(0)
    rank.objects.engine = FSDPEngine(
        folder, device=torch.device("cpu"), learning_rate=rate, adamw=adamw
    )


def train(rank, steps):
    """Take steps; return the learning rate of each, and the largest change of an element."""
    engine, steps_taken = rank.objects.engine, []
    tokens = torch.arange(3, 43).reshape(4, 10)
    for _ in range(steps):
        before = [value.detach().full_tensor().clone() for value in engine.module.parameters()]
        rate = engine.learning_rate
        loss = engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.optimizer_step(loss)
        after = [value.detach().full_tensor() for value in engine.module.parameters()]
        moved = max(float((new - old).abs().max()) for old, new in zip(before, after, strict=True))
        steps_taken.append((rate, moved))
    return steps_taken


def save(rank, folder):
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank, folder):
    rank.objects.engine.load_checkpoint(str(folder))


def test_a_resumed_fsdp_engine_moves_its_weights_by_the_new_rate(
    rank_group, policy_folder, tmp_path
):
    ranks = rank_group(1)
    ranks(make_engine, policy_folder, EARLIER)
    ranks(train, 2)
    ranks(save, tmp_path)
    ranks(make_engine, policy_folder, LATER)
    ranks(load, tmp_path)
    steps_taken = ranks(train, 2)[0]
    assert [rate for rate, _ in steps_taken] == [LATER.at(2), LATER.at(3)]
    # AdamW moves an element by about the rate, which was a hundred times higher before.
    assert all(moved < 5 * LATER.highest for _, moved in steps_taken)


def options_of_groups(rank):
    """Return weight decay, both decays and epsilon of each group of parameters."""
    groups = rank.objects.engine.optimizer.param_groups
    return [(group["weight_decay"], *group["betas"], group["eps"]) for group in groups]


def test_an_fsdp_engine_has_the_options_of_its_configuration_also_after_a_load(
    rank_group, policy_folder, tmp_path
):
    ranks = rank_group(1)
    ranks(make_engine, policy_folder, EARLIER)
    assert ranks(options_of_groups) == [[(0.01, 0.9, 0.99, 1e-8)]]
    ranks(train, 1)
    ranks(save, tmp_path)
    ranks(make_engine, policy_folder, EARLIER, ADAMW)
    configured = ranks(options_of_groups)
    assert configured == [[(0.2, 0.8, 0.95, 1e-5)]]
    ranks(load, tmp_path)
    assert ranks(options_of_groups) == configured
