"""Every preset raises the reward of the smallest policy that there is: one table of logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from trinity_workers.algorithms.batch import Batch  # noqa: E402
from trinity_workers.algorithms.distillation import token_divergence  # noqa: E402
from trinity_workers.algorithms.logits import token_statistics  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.presets import PRESETS  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.update import policy_update, value_update  # noqa: E402

WIDTH, VOCABULARY, WANTED = 3, 6, 2
GROUPS, SAMPLES, STEPS = 4, 8, 30
SETTINGS = {
    **{name: {"preset": name} for name in PRESETS},
    "kl": {"preset": "grpo", "kl": {"coefficient": 0.01}},
    "entropy": {"preset": "grpo", "entropy_coefficient": 0.01},
    "decoupled": {
        "preset": "grpo",
        "importance_sampling": {"ratio_to": "proximal", "weights": "token", "mask": "geometric"},
    },
    "divergence": {"advantage": "none", "loss": "divergence"},
}


def sampled(table, lot):
    """Episodes of the policy; the reward is the share of wanted tokens."""
    rows = GROUPS * SAMPLES
    tokens = torch.multinomial(
        table.detach().softmax(-1).repeat(rows, 1), 1, replacement=True, generator=lot
    ).view(rows, WIDTH)
    ids = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), tokens], dim=1)
    return Batch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=torch.arange(WIDTH + 1).expand_as(ids),
        response_mask=torch.ones(rows, WIDTH, dtype=torch.bool),
        groups=torch.arange(rows) // SAMPLES,
        rewards=(tokens == WANTED).float().mean(-1),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def logprobs_of(table, tokens, **more):
    return token_statistics(table.expand(len(tokens), -1, -1), tokens, **more)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_reward_rises(name):
    # Of gspo the published clip is for responses of thousands of tokens.
    clips = {"clip_low": 0.1, "clip_high": 0.1} if name == "gspo" else {}
    config = read_settings(SETTINGS[name] | clips).with_limit(WIDTH + 2)
    lot = torch.Generator().manual_seed(0)
    table = torch.zeros(WIDTH, VOCABULARY, requires_grad=True)
    critic = torch.zeros(WIDTH, requires_grad=True)
    wise = torch.zeros(WIDTH, VOCABULARY)
    wise[:, WANTED] = 4.0
    optimizer = torch.optim.Adam([table, critic], lr=0.1)
    rewards = []
    for _ in range(STEPS):
        batch = sampled(wise if name == "supervised" else table, lot)
        rewards.append(float(sampled(table, lot).rewards.mean()))
        old = logprobs_of(table.detach(), batch.responses).logprobs
        noise = 0.02 * torch.randn(old.shape, generator=lot)  # the engine's, which sampled
        batch = replace(
            batch,
            behaviour_logprobs=old + noise,
            proximal_logprobs=old,
            reference_logprobs=logprobs_of(torch.zeros_like(table), batch.responses).logprobs,
            teacher_logprobs=logprobs_of(wise, batch.responses).logprobs,
            values=critic.detach().expand_as(old).clone() if config.critic.use else None,
        )
        prepared, _ = prepare(batch, config)
        for _ in range(2):  # two updates a step, so that ratios differ from one
            current = logprobs_of(table, batch.responses, entropy=True)
            divergence = token_divergence(table, wise).expand_as(old)
            update = policy_update(
                prepared, current.logprobs, config, entropy=current.entropy, divergence=divergence
            )
            loss = update.loss(update.denominator)
            if config.critic.use:
                valued = value_update(prepared, critic.expand_as(old), config)
                loss = loss + valued.loss(valued.denominator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 > 0.6
    if config.critic.use:
        assert critic.detach().mean() > 0.2
