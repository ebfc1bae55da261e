"""Batches of made-up episodes, for the tests of algorithms."""

from __future__ import annotations

import torch

from tests.support.experiences import make_groups
from trinity_workers.algorithms.batch import Batch
from trinity_workers.algorithms.collate import collate

OPTIONAL = (
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
)


def make_batch(
    lengths,
    *,
    groups=None,
    prompts=None,
    seed=0,
    dtype=torch.float32,
    holes=False,
    **given,
) -> Batch:
    """A batch of responses of these lengths, with every field, but for those given as None.

    holes: let some response tokens be the environment's.
    """
    lot = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    prompts = prompts or [2 + row % 3 for row in range(rows)]
    prompt_width, width = max(prompts), max(lengths)
    columns = torch.arange(width)
    tokens = columns[None] < torch.tensor(lengths)[:, None]
    before = torch.arange(prompt_width)[None] >= prompt_width - torch.tensor(prompts)[:, None]
    attention = torch.cat([before, tokens], dim=1).long()
    mask = tokens.clone()
    if holes:
        mask &= torch.rand(rows, width, generator=lot) < 0.7
        mask[:, 0] = tokens[:, 0]
    values = {name: torch.randn(rows, width, generator=lot, dtype=dtype) * 0.5 for name in OPTIONAL}
    for name in OPTIONAL:
        if name.endswith("logprobs"):
            values[name] = values[name] - 2.0
        values[name] = values[name] * mask
    values |= {
        "input_ids": torch.randint(3, 90, (rows, prompt_width + width), generator=lot) * attention,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask,
        "groups": torch.tensor(groups if groups is not None else [r // 2 for r in range(rows)]),
        "rewards": torch.randint(0, 3, (rows,), generator=lot).to(dtype),
        "finished": torch.rand(rows, generator=lot) < 0.8,
    }
    values |= given
    return Batch(**{name: value for name, value in values.items() if value is not None})


def near(actual, expected, tolerance=1e-6):
    """Assert that a tensor has these values, whatever its dtype."""
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64).detach(),
        torch.as_tensor(expected, dtype=torch.float64).detach(),
        atol=tolerance,
        rtol=tolerance,
    )


def batch_of(rank, seed) -> Batch:
    """A rank's share of made-up groups, of one length whatever the share."""
    return collate(make_groups("r", seed)[rank.number :: rank.world], 0).padded(13)
