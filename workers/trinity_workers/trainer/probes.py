"""Probes that the trainer's ranks compute of the weights that they are about to publish.

They are computed before the next optimizer step, with the values that are published: parameters of
a wider data type are rounded for the pass and restored, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trinity_events.weights.tensors import is_castable
from trinity_schemas import Experience, Probes, StepRef, Turn, make_probes

from ..algorithms.batch import Batch
from ..algorithms.collate import collate
from ..config.train_config import RunConfig
from ..engines.base import resident
from ..engines.sharded import reshard
from .step.base import TrainingStep

# Any number: the seal of a version carries the sequences themselves.
_SEED = 1
LENGTH = 48
"""Tokens of a probe: the prototype's, whose 4 x 48 saw 17 of 18 planted faults in float32."""


class VersionProber:
    """Computes the probes of versions on one rank. All ranks call it together.

    Args:
        config: The run.
        step: Training step that computes with the policy.
        device: Device of the rank.
        vocabulary_size: Token ids of the model; None if it is not known.
        positions: Positions of the model; None if there is no limit.
    """

    def __init__(
        self,
        config: RunConfig,
        step: TrainingStep,
        device: torch.device,
        *,
        vocabulary_size: int | None,
        positions: int | None,
    ) -> None:
        self._step = step
        self._dtype = config.model.dtype
        # Where the model computes in the dtype that is published, it rounds by itself.
        rounds = config.published_dtype != config.model.dtype
        self._published: torch.dtype | None = (
            getattr(torch, config.published_dtype) if rounds else None
        )
        tokenizer = step.models.policy.tokenizer
        length = LENGTH if positions is None else min(LENGTH, positions)
        self._sequences = fixed_sequences(
            vocabulary_size or len(tokenizer), count=config.probes, length=length
        )
        self._batch = make_batch(self._sequences, tokenizer.pad_token_id).to(device)

    def compute(self) -> Probes:
        """Return the probes of the weights of now, the same on all ranks. Collective."""
        policy = self._step.models.policy
        # Rounded as published, since explorers compute with those values.
        with resident(policy), rounded(policy.module, self._published):
            logprobs = self._step.policy_logprobs(self._batch)  # (probes, tokens - 1)
        # At 0 and above it by the last bit, a probability of 1 is rounded.
        return make_probes(self._sequences, logprobs.clamp(max=0.0).tolist(), self._dtype)


def fixed_sequences(vocabulary_size: int, *, count: int, length: int) -> list[list[int]]:
    """Return token sequences that depend on the arguments alone."""
    draw = random.Random(_SEED)  # noqa: S311  # no secret
    return [[draw.randrange(vocabulary_size) for _ in range(length)] for _ in range(count)]


def make_batch(sequences: Iterable[list[int]], pad_token_id: int) -> Batch:
    """Return sequences as episodes whose first token is the prompt."""
    version = StepRef(1, 0)
    episodes = [
        Experience(
            run_id="probes",
            epoch=1,
            ordinal=ordinal,
            attempt=1,
            sample=0,
            samples=1,
            explorer="trainer",
            turns=[
                Turn(role="prompt", tokens=first),
                Turn(
                    role="policy",
                    tokens=rest,
                    logprobs=[0.0] * len(rest),
                    versions=[(version, len(rest))],
                ),
            ],
            reward=0.0,
        )
        for ordinal, (first, rest) in enumerate(
            (sequence[:1], sequence[1:]) for sequence in sequences
        )
    ]
    return collate([[episode] for episode in episodes], pad_token_id)


@contextmanager
def rounded(module: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Give parameters the values that they have in another floating-point dtype, in the block.

    It takes the memory of a copy of this rank's shards.

    Args:
        module: FSDP's sharded module, or the list of Megatron's chunks.
        dtype: The dtype; None leaves the parameters as they are.
    """
    chunks = module if isinstance(module, list) else [module]
    for chunk in chunks:
        reshard(chunk)
    # After the reshard: gathered parameters are other tensors than those of the optimizer.
    local_shards = [_local(parameter) for chunk in chunks for parameter in chunk.parameters()]
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for shard in local_shards if dtype is not None else ():
            if shard.dtype != dtype and is_castable(shard.dtype):
                originals.append((shard, shard.clone()))
                shard.copy_(shard.to(dtype))
        yield
    finally:
        # Before the restoration: what FSDP gathered for the pass has the rounded values.
        for chunk in chunks:
            reshard(chunk)
        for shard, original in originals:
            shard.copy_(original)


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's elements of a parameter, without gradient."""
    to_local = getattr(parameter, "to_local", None)
    return (parameter if to_local is None else to_local()).detach()
