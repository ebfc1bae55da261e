"""Rollout layout of a model next to its training layout, in the same processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs

from ...runtime.collectives import together
from ..model_memory import Movable
from ..random_states import random_states, set_random_states
from .cpu import adapted
from .engine import MegatronEngine
from .layout import LayoutRefused, ParallelLayout, new_rollout_group, rollout_groups
from .model import build_rollout, has_experts, transformer_config
from .parameter_slices import parameter_slices
from .resharding import Resharding
from .stream import WeightStream
from .weights import mapping

_SEED_OFFSET = 1000
"""Distance of the generators' seeds from those of training."""


class HybridEngine:
    """Model of a training engine in a layout that generates, of another tensor-parallel size.

    It has memory in a block of :meth:`resharded` alone. What the training engine's offload moves
    away is away meanwhile. Making one is collective; so is every block.

    Args:
        engine: The engine that trains.
        tensor: Tensor-parallel ranks of a replica that generates; each ``tensor`` consecutive ranks
            are one.
        seed: Seed of what generation draws from Python's, NumPy's and torch's generators.
        timeout: Maximum time that ranks wait for each other.

    Raises:
        LayoutRefused: if ranks, heads or columns cannot be divided so.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        tensor: int,
        *,
        seed: int = 0,
        timeout: timedelta = timedelta(seconds=300),
    ) -> None:
        self.engine = engine
        if tensor > 1 and has_experts(engine.config):
            # megatron-core divides their tensors with sequence parallelism alone, and a step of
            # generation has one token.
            raise LayoutRefused("rollout", tensor=tensor)
        layout = ParallelLayout(tensor=tensor)
        options = structs.replace(engine.options, recompute=False)
        config = transformer_config(engine.config, layout, options)
        groups = rollout_groups(tensor, timeout)
        self.group = new_rollout_group(timeout)
        """All ranks, for resharding and for their messages about it."""
        with together(self.group):
            self.model = build_rollout(engine.config, config, options, groups)
        self.replica, self.replicas = dist.get_rank() // tensor, dist.get_world_size() // tensor
        self.is_first_of_replica = groups.tp.rank() == 0
        slices = list(parameter_slices(self.model, engine.config.vocab_size))
        self._resharding = Resharding(engine.parameter_slices(), slices, self.group)
        self._stream = WeightStream(
            [self.model],
            mapping(engine.config, config, tensor),
            tied=bool(engine.config.tie_word_embeddings),
            device=engine.device,
        )
        self._memory = Movable(self.model.parameters, keeps_values=False)
        self._memory.leave_if_idle()
        self._random = _seeded(seed + _SEED_OFFSET + self.replica, engine.device)

    @contextmanager
    def resharded(self) -> Iterator[None]:
        """Give the model of the block the training weights of now. Collective.

        The training weights are only read. Random states of generation continue from block to
        block, and those of training continue after it as if there had been none.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow; it names the rank.
        """
        with self._memory_given_to_generation(), self._own_random_states():
            yield

    def reshard(self) -> None:
        """Copy the training weights of now once more, in a block of :meth:`resharded`. Collective.

        Raises as :meth:`resharded`.
        """
        with self.engine.resident():
            self._resharding.run()

    def logits(self, tokens: torch.Tensor, context: Any) -> torch.Tensor:
        """Return logits [B, vocabulary] of the next token, on all ranks of the replica. Collective.

        Args:
            tokens: [B, S]; the prompts at first, then one token a row.
            context: StaticInferenceContext, which holds keys and values of the tokens before.
        """
        first, count = context.sequence_len_offset, tokens.shape[1]
        positions = torch.arange(first, first + count, device=tokens.device).expand_as(tokens)
        with torch.no_grad(), adapted():
            logits: torch.Tensor = self.model(
                tokens, positions, None, inference_context=context, runtime_gather_output=True
            )
        # megatron-core leaves that to its own engine for inference, whose events need CUDA.
        context.sequence_len_offset += count
        # (B, vocabulary). Columns of padding could be sampled otherwise.
        return logits[:, -1, : self.engine.config.vocab_size]

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the model generates with, by Hugging Face name, one at a time. Collective."""
        return iter(self._stream)

    @contextmanager
    def _memory_given_to_generation(self) -> Iterator[None]:
        with ExitStack() as generating:
            # Only for the copies: what training's offload moves makes room for generation
            # afterwards.
            with ExitStack() as training:
                # The device of one rank may have no room, and the resharding needs all ranks.
                with together(self.group):
                    training.enter_context(self.engine.resident())
                    generating.enter_context(self._memory.held())
                self._resharding.run()
            yield

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        device = self.engine.device
        before = random_states(device)
        set_random_states(self._random, device)
        try:
            yield
        finally:
            self._random = random_states(device)
            set_random_states(before, device)


def _seeded(seed: int, device: torch.device) -> dict[str, Any]:
    """Return the states of generators of this seed; those of the process stay as they are."""
    before = random_states(device)
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return random_states(device)
    finally:
        set_random_states(before, device)
