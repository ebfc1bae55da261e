"""Steps of Megatron and of plain torch on the same batches, and the largest differences of them."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from tests.support import megatron_ranks as at
from trinity_workers.engines.adamw import AdamWOptions

RATE, LIMIT = 1e-3, 0.01
"""Learning rate, and the norm to which gradients are clipped: less than any norm here."""
ADAMW = AdamWOptions(max_grad_norm=LIMIT)


class Step(NamedTuple):
    """Numbers of a step: [B, R] both, the norm is before clipping."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss: float
    norm: float


def loss_of(logprobs, entropy, mask, rows: int, tokens: int):
    """A loss of whole responses, so that it is no sum over tokens, and of entropies."""
    ratios = (logprobs.sum(dim=1) / 5).exp() * mask.any(dim=1)
    return -ratios.sum() / rows - 0.1 * entropy.sum() / tokens


def take_steps(rank, batches) -> tuple[slice, list[Step | None], dict[str, torch.Tensor]]:
    """Take a step on each batch; return the replica's rows, the numbers and the weights."""
    engine = rank.objects.engine
    share, shares = at.data_rank()
    steps: list[Step | None] = []
    for batch in batches:
        size = len(batch) // shares
        rows = slice(size * share, size * (share + 1))
        count, tokens = len(batch), batch.token_count

        def loss(current, part, count=count, tokens=tokens):
            value = loss_of(current.logprobs, current.entropy, part.response_mask, count, tokens)
            return value * shares, (
                current.logprobs.detach(),
                current.entropy.detach(),
                value.detach(),
            )

        own = batch.rows(rows.start, rows.stop)
        parts, norm = engine.train_batch(own, loss, entropy=True)
        if not parts:  # before the last stage of a pipeline
            steps.append(None)
            continue
        logprobs, entropy, values = zip(*parts, strict=True)
        joined = [torch.cat(tensors)[:size] for tensors in (logprobs, entropy)]
        steps.append(Step(*joined, float(sum(values)), norm))
    return rows, steps, at.full_weights(rank)


def plain_steps(folder, batches) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """The same by Hugging Face's model and torch's AdamW: each row by itself, unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    steps = []
    for batch in batches:
        adamw.zero_grad()
        rows = []
        for row in range(len(batch)):
            real = batch.attention_mask[row].bool()
            count = int(batch.response_mask[row].sum())
            output = model(input_ids=batch.input_ids[row][real][None], use_cache=False)
            logs = output.logits[0].log_softmax(-1)[-count - 1 : -1]
            chosen = logs.gather(-1, batch.responses[row][:count, None])[:, 0]
            padding = (0, batch.response_width - count)
            statistics = (chosen, -(logs.exp() * logs).sum(-1))
            rows.append([torch.nn.functional.pad(numbers, padding) for numbers in statistics])
        logprobs, entropy = (torch.stack(numbers) for numbers in zip(*rows, strict=True))
        loss = loss_of(logprobs, entropy, batch.response_mask, len(batch), batch.token_count)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        adamw.step()
        steps.append(Step(logprobs.detach(), entropy.detach(), loss.item(), float(norm)))
    with TemporaryDirectory() as saved:  # in the names of files: experts are joined in memory
        model.save_pretrained(saved)
        return steps, at.in_folder(Path(saved))


def differences(answers, plain) -> dict[str, float]:
    """The largest difference of each kind, over all ranks and steps."""
    expected, expected_weights = plain
    largest: dict[str, float] = {}

    def compare(key: str, value: float) -> None:
        largest[key] = max(largest.get(key, 0.0), math.inf if math.isnan(value) else value)

    losses: dict[tuple[int, int], float] = {}
    for rows, steps, weights in answers:
        for number, step in enumerate(steps):
            if step is None:
                continue
            for key in ("logprobs", "entropy"):
                mine, theirs = getattr(step, key), getattr(expected[number], key)[rows]
                compare(key, float((mine - theirs).abs().max()))
            compare("norm before clipping", abs(step.norm / expected[number].norm - 1))
            losses[number, rows.start] = step.loss
        for name, value in weights.items():
            if not name.endswith("k_proj.bias"):  # its gradient is 0: AdamW follows the rounding
                compare("weights", float((value - expected_weights[name]).abs().max()))
    for number, step in enumerate(expected):
        total = sum(loss for (at_step, _), loss in losses.items() if at_step == number)
        compare("loss", abs(total - step.loss))
    return largest
