"""Group Relative Policy Optimization as pure functions on tensors: no I/O, no process group.

The objective is GRPO's clipped surrogate (DeepSeekMath, arXiv 2402.03300) without its KL term, as a
mean over all response tokens of the batch (as in DAPO, arXiv 2503.14476) and not per response,
whose 1/|o| favours long wrong answers (Dr. GRPO, arXiv 2503.20783).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from trinity_schemas import Experience

# Beyond e^20 a ratio tells nothing more, and times a negative advantage it would overflow the loss.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Batch:
    """B responses: P columns of prompt, padded on the left, and R of response, on the right.

    input_ids: [B, P + R] int64.
    attention_mask: [B, P + R] int64, 1 on real tokens. It is made from lengths, since a policy may
        sample the padding token itself.
    position_ids: [B, P + R] int64, 0 at each row's first real token (and on the padding before it).
    response_mask: [B, R] bool, true on tokens that the policy sampled. Tokens of the environment
        are among the R columns, and are not trained on.
    advantages: [B] float32, one for all tokens of a response.
    old_logprobs: [B, R] float32, under the policy that sampled, 0 on padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor

    @property
    def token_count(self) -> int:
        """Number of response tokens; its sum over all ranks divides the loss sum."""
        return int(self.response_mask.sum())

    def __len__(self) -> int:
        """Return B, the number of responses."""
        return self.input_ids.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """Return responses start to stop, as views: a rank's share, or a micro-batch.

        Advantages stay those that were taken within the whole groups.
        """
        return Batch(**{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def group_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return (reward - mean) / deviation within each group; 0 if all its rewards are equal.

    The deviation is the population's (divided by S). Equality is tested on the rewards: the
    deviation of equal ones may come out a rounding error above zero, and blow noise up to ones.
    """
    return [_standardised(group) for group in rewards]


def _standardised(rewards: Sequence[float]) -> list[float]:
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, not {list(rewards)}")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation for reward in rewards]


@dataclass(frozen=True, slots=True)
class _Row:
    """One response: tokens of prompt and response, and the loss mask of the response."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]
    logprobs: list[float]


def collate(groups: Sequence[Sequence[Experience]], pad_token_id: int) -> Batch:
    """Collate all samples on the CPU, in order, with advantages taken within each group.

    Raises ValueError for no samples, and for one without a sampled token.
    """
    rows = [_row_of(index, one) for index, group in enumerate(groups) for one in group]
    rewards = [[one.reward for one in group] for group in groups]
    if not rows:
        raise ValueError("no responses to make a batch of")
    prompt_width = max(len(row.prompt) for row in rows)
    response_width = max(len(row.response) for row in rows)

    input_ids: list[list[int]] = []
    attention_mask: list[list[int]] = []
    response_mask: list[list[bool]] = []
    old_logprobs: list[list[float]] = []
    for row in rows:
        before = prompt_width - len(row.prompt)
        after = response_width - len(row.response)
        tokens = row.prompt + row.response
        input_ids.append([pad_token_id] * before + tokens + [pad_token_id] * after)
        attention_mask.append([0] * before + [1] * len(tokens) + [0] * after)
        response_mask.append(row.mask + [False] * after)
        old_logprobs.append(row.logprobs + [0.0] * after)

    mask = torch.tensor(attention_mask)
    advantages = [one for group in group_advantages(rewards) for one in group]
    return Batch(
        input_ids=torch.tensor(input_ids),
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=-1) - 1).clamp_(min=0),
        response_mask=torch.tensor(response_mask),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
    )


def _row_of(index: int, experience: Experience) -> _Row:
    """Return an episode as a row, in which only the policy's tokens are trained on."""
    prompt, *turns = experience.turns
    row = _Row(list(prompt.tokens), [], [], [])
    for turn in turns:
        sampled = turn.role == "policy"
        row.response.extend(turn.tokens)
        row.mask.extend([sampled] * len(turn.tokens))
        row.logprobs.extend(turn.logprobs if sampled else [0.0] * len(turn.tokens))
    if not any(row.mask):
        raise ValueError(f"sample {experience.sample} of group {index} has no sampled token")
    return row


def response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of the response tokens: [B, R] float32, 0 on padding.

    They carry the gradient. `temperature` must be the one that sampled, or the policy that is
    trained is not the one that acted.
    """
    width = batch.response_mask.shape[1]
    # The column before a token predicts it, so R + 1 columns; the head is spared the prompt's.
    output: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=width + 1,
        use_cache=False,
    )
    logits = output.logits[:, :-1].float() / temperature
    tokens = batch.input_ids[:, -width:]
    logprobs: Tensor = logits.log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)
    return logprobs.masked_fill(~batch.response_mask, 0.0)


def grpo_loss(
    logprobs: Tensor, batch: Batch, *, clip: float = 0.2
) -> tuple[Tensor, dict[str, float]]:
    """Return the clipped surrogate, negated and summed over response tokens, and metrics.

    A sum, so that the parts of a batch, however split, add up to the whole: divide it by the token
    count of all parts. FSDP and DDP average gradients over ranks, so there each rank's loss is
    `loss_sum * world_size / tokens`, with `tokens` the all-reduced sum of `batch.token_count`.

    Metrics are means over this part's tokens (weigh them by `tokens` when adding parts up):
    `ratio` of new to old probability; `clip_fraction`, where clipping took the gradient away;
    `approx_kl`, the estimate ratio - 1 - log ratio of KL(old || new) in nats
    (http://joschu.net/blog/kl-approx.html).
    """
    mask = batch.response_mask
    log_ratio = (logprobs - batch.old_logprobs).masked_fill(~mask, 0.0)
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = batch.advantages[:, None]
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantages
    loss_sum = -(torch.minimum(unclipped, clipped) * mask).sum()

    with torch.no_grad():
        tokens = batch.token_count
        sums = torch.stack(
            [
                (ratio * mask).sum(),
                ((clipped < unclipped) & mask).sum(),
                ((ratio - 1.0 - log_ratio) * mask).sum(),
            ]
        ).tolist()
    ratio_mean, clip_fraction, approx_kl = (value / max(tokens, 1) for value in sums)
    return loss_sum, {
        "tokens": float(tokens),
        "ratio": ratio_mean,
        "clip_fraction": clip_fraction,
        "approx_kl": approx_kl,
    }
