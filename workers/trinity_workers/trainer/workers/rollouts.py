"""Generation on the ranks of a trainer, with the weights that their policy has."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch

from trinity_schemas import StepRef

from ...config.train_config import RunConfig
from ...engines.buffers import saved_buffers
from ...learning.policy import load_policy
from ...rollout_engines.base import (
    AdaptersNotSupported,
    EngineOptions,
    Generation,
    GenerationRequest,
)
from ...rollout_engines.loading import check_installed
from ...rollout_engines.replicas import Replica, generate_shared
from ...rollout_engines.turns import OpenTurn
from ...runtime.collectives import rank_and_world


class RankRollouts(Protocol):
    """Rollouts of one rank. All ranks make one together, and call it together."""

    def generate(self, prompts: Sequence[GenerationRequest], version: StepRef) -> list[Generation]:
        """Generate one turn for each request of this rank, in order. Collective.

        Args:
            prompts: Requests of this rank.
            version: Version that the policy's present weights are.
        """
        ...


def rank_rollouts(config: RunConfig, device: torch.device, policy: Any) -> RankRollouts:
    """Return the rollouts of this rank. Collective.

    Args:
        config: The run.
        device: Device of this rank.
        policy: Engine of the policy.

    Raises:
        LayoutRefused: if the policy cannot be divided as the rollout layout asks.
    """
    kind: Any = MegatronRollouts if config.trainer.on_megatron else FSDPRollouts
    if config.explorer.engine == "vllm":
        kind = VLLMRollouts
    rollouts: RankRollouts = kind(config, device, policy)
    return rollouts


class MegatronRollouts:
    """Rollouts in a layout of their own, to which the weights change for each call."""

    def __init__(self, config: RunConfig, device: torch.device, policy: Any) -> None:
        from ...engines.megatron import HybridEngine
        from ...engines.megatron.model import has_experts
        from ...rollout_engines.megatron import MegatronRolloutEngine

        del device  # it is the policy's
        tensor = 1 if has_experts(policy.config) else policy.layout.tensor
        hybrid = HybridEngine(
            policy,
            config.trainer.rollout_tensor_parallel or tensor,
            seed=config.seed,
            timeout=timedelta(seconds=config.sync.timeout),
        )
        self._engine = MegatronRolloutEngine(hybrid, deterministic=config.explorer.deterministic)

    def generate(self, prompts: Sequence[GenerationRequest], version: StepRef) -> list[Generation]:
        """Generate with the training weights of now. Collective.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
        """
        with self._engine.serving(version):
            return self._engine.generate_here(prompts)


class VLLMRollouts:
    """Rollouts of vLLM in the processes of the ranks, which takes each gathered tensor.

    Raises RolloutEngineError if vLLM is not installed, or does not start.
    """

    def __init__(self, config: RunConfig, device: torch.device, policy: Any) -> None:
        check_installed("vllm")
        from ...rollout_engines.vllm.colocated import ColocatedVLLM

        options = EngineOptions(
            model_folder=config.model_folder,
            dtype=config.served_dtype,
            device=str(device),
            proof=config.proof,
            seed=config.seed,
            options=config.explorer.engine_options,
        )
        tensor = policy.layout.tensor if config.trainer.on_megatron else 1
        self._engine = ColocatedVLLM(
            options,
            policy.get_per_tensor_param,
            tensor_parallel=config.trainer.rollout_tensor_parallel or tensor,
        )

    def generate(self, prompts: Sequence[GenerationRequest], version: StepRef) -> list[Generation]:
        """Generate with the present weights. Collective.

        Raises:
            NotAsPublished: vLLM does not compute with them.
            PeerFailed: on the ranks that did not fail themselves.
        """
        with self._engine.serving(version):
            return self._engine.generate_here(prompts)


class FSDPRollouts:
    """Rollouts of a copy of the whole policy on each rank, gathered when its weights have changed.

    All ranks share the requests: those that share layers or sequences get the same ones.

    Raises RolloutEngineError for a policy of adapters.
    """

    def __init__(self, config: RunConfig, device: torch.device, policy: Any) -> None:
        from ...rollout_engines.huggingface import HuggingFaceEngine

        if config.model.lora.rank:
            raise AdaptersNotSupported()
        model, tokenizer = load_policy(config.model_folder, config.model.dtype)
        move: Any = model.to  # its annotations lack strings
        self._model: Any = move(device)
        self._policy = policy
        self._gathered: int | None = None
        """Changes of the policy's weights when they were gathered; None if they are not whole."""
        self._engine = HuggingFaceEngine(
            self._model, tokenizer, deterministic=config.explorer.deterministic
        )

    def generate(self, prompts: Sequence[GenerationRequest], version: StepRef) -> list[Generation]:
        """Generate with the present weights, gathered if they have changed. Collective.

        Raises as :func:`~...rollout_engines.replicas.generate_shared`.
        """
        # Not by version: a load may bring other weights at the same step.
        changes: int = self._policy.weight_changes.count
        if self._gathered != changes:
            # Until all are copied: a failure half-way leaves a mixture of two versions.
            self._gathered = None
            own = dict(chain(self._model.named_parameters(), saved_buffers(self._model)))
            with torch.no_grad():
                for name, tensor in self._policy.get_per_tensor_param():
                    # In place: the model generates with these very tensors.
                    own[name].copy_(tensor)
            self._gathered = changes
        engine = self._engine
        engine.serves = version

        def generate(turns: Sequence[OpenTurn]) -> list[Generation]:
            generations: list[Generation] = engine.generate_here([turn.request for turn in turns])
            return generations

        return generate_shared(
            prompts,
            Replica(None, *rank_and_world(), is_first=True),
            engine.context_length,
            generate,
            by_prompt=engine.deterministic,
        )
