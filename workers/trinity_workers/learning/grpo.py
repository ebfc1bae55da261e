"""Group Relative Policy Optimization as pure functions on tensors: no I/O, no process group.

The objective is GRPO's clipped surrogate (DeepSeekMath, arXiv 2402.03300) without its KL term, as a
mean over all response tokens of the batch (as in DAPO, arXiv 2503.14476) and not per response,
whose 1/|o| favours long wrong answers (Dr. GRPO, arXiv 2503.20783).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Beyond e^20 a ratio tells nothing more, and times a negative advantage it would overflow the loss.
_MAX_LOG_RATIO = 20.0


class GroupLike(Protocol):
    """One question's S sampled answers: a Rollout, or a group that came over the wire."""

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """Token ids of the prompt, without padding."""
        ...

    @property
    def responses(self) -> Sequence[Sequence[int]]:
        """S lists of token ids, without padding, with the end of sequence if it was produced."""
        ...

    @property
    def logprobs(self) -> Sequence[Sequence[float]]:
        """Of each response token, under the policy that sampled it; shaped like `responses`."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """S rewards."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """B responses: P columns of prompt, padded on the left, and R of response, on the right.

    input_ids: [B, P + R] int64.
    attention_mask: [B, P + R] int64, 1 on real tokens. It is made from lengths, since a policy may
        sample the padding token itself.
    position_ids: [B, P + R] int64, 0 at each row's first real token (and on the padding before it).
    response_mask: [B, R] bool, true on response tokens.
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
        """Response tokens in the batch: what, summed over all ranks, the loss sum is divided by."""
        return int(self.response_mask.sum())

    def __len__(self) -> int:
        """B, the number of responses."""
        return self.input_ids.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """Responses start to stop, as views: a rank's share, or a micro-batch.

        Advantages stay those that were taken within the whole groups.
        """
        return Batch(**{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def group_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """(reward - mean) / deviation within each group; 0 where all rewards of a group are equal.

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


def collate(groups: Sequence[GroupLike], pad_token_id: int) -> Batch:
    """All responses as one batch on the CPU, in order, with advantages taken within each group.

    ValueError where the parts of a group do not fit together.
    """
    _check(groups)
    advantages = group_advantages([group.rewards for group in groups])
    prompt_width = max(len(group.prompt_tokens) for group in groups)
    response_width = max(len(response) for group in groups for response in group.responses)

    input_ids: list[list[int]] = []
    attention_mask: list[list[int]] = []
    response_mask: list[list[bool]] = []
    old_logprobs: list[list[float]] = []
    for group in groups:
        prompt = list(group.prompt_tokens)
        before = prompt_width - len(prompt)
        for response, logprobs in zip(group.responses, group.logprobs, strict=True):
            length = len(response)
            after = response_width - length
            input_ids.append(
                [pad_token_id] * before + prompt + [*response] + [pad_token_id] * after
            )
            attention_mask.append([0] * before + [1] * (len(prompt) + length) + [0] * after)
            response_mask.append([True] * length + [False] * after)
            old_logprobs.append([*logprobs] + [0.0] * after)

    mask = torch.tensor(attention_mask)
    return Batch(
        input_ids=torch.tensor(input_ids),
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=-1) - 1).clamp_(min=0),
        response_mask=torch.tensor(response_mask),
        advantages=torch.tensor([a for group in advantages for a in group], dtype=torch.float32),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
    )


def _check(groups: Sequence[GroupLike]) -> None:
    if not any(group.responses for group in groups):
        raise ValueError("no responses to make a batch of")
    for index, group in enumerate(groups):
        lengths = [len(response) for response in group.responses]
        if not group.prompt_tokens or 0 in lengths:
            raise ValueError(f"group {index} has an empty prompt or response")
        if lengths != [len(logprobs) for logprobs in group.logprobs]:
            raise ValueError(f"group {index} does not have one logprob for each response token")
        if len(lengths) != len(group.rewards):
            raise ValueError(
                f"group {index} has {len(lengths)} responses and {len(group.rewards)} rewards"
            )


def response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response tokens under the model: [B, R] float32, 0 on padding.

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
    """The clipped surrogate, negated and summed over response tokens (0-dimensional), and metrics.

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
