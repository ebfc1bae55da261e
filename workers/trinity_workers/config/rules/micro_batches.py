"""Rules of micro-batches: one bound, above the longest answer."""

from __future__ import annotations

from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_micro_batches(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield what contradicts the sizes of micro-batches."""
    rows, tokens = named("trainer.micro_batch_rows"), named("trainer.micro_batch_tokens")
    bound, answer = config.trainer.micro_batch_tokens, config.rollouts.max_new_tokens
    if bound is None:
        return
    if config.trainer.micro_batch_rows is not None:
        yield (
            ("trainer.micro_batch_rows", "trainer.micro_batch_tokens"),
            f"{rows} and {tokens} both divide a step's rows: leave one of them out",
        )
    if bound <= answer:
        limit = named("rollouts.max_new_tokens")
        yield (
            ("trainer.micro_batch_tokens", "rollouts.max_new_tokens"),
            f"{tokens} is {bound}, and a row has up to {answer} tokens of an answer ({limit}) "
            "beside its prompt: choose more than both",
        )
