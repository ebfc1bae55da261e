"""Actor, its rollouts, and the reference model as roles, which may share the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from trinity_schemas import StepRef

from ..algorithms.batch import Batch
from ..config.train_config import RunConfig
from ..trainer.step.base import ModelName
from ..trainer.workers.rollouts import RankRollouts, rank_rollouts
from ..worker_group.dispatch import Dispatch
from ..worker_group.registered import register
from .base import RoleRefused, RoleWorker

if TYPE_CHECKING:
    from ..rollout_engines.base import Generation, GenerationRequest

Role = Literal["actor", "ref", "rollout", "actor_rollout", "actor_rollout_ref"]
"""Parts that share the ranks, by veRL's names."""
Part = Literal["actor", "rollout", "ref"]

# The training step's names, and those that veRL's actor reports them under.
_RENAMED = {"gradient_norm": "grad_norm", "learning_rate": "lr"}


class ActorRolloutRefWorker(RoleWorker):
    """Policy, and its reference of the KL penalty, on one rank.

    Args:
        config: The run.
        rank: Which of its trainers.
        role: Parts of the group. `actor` trains, `rollout` generates, `ref` is the reference; a
            method of a part that the role has not is refused.
        own_gpu: Whether every trainer was given a GPU of its own.

    Raises:
        RoleRefused: The role is unknown.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        *,
        role: Role = "actor_rollout_ref",
        own_gpu: bool = False,
    ) -> None:
        super().__init__(config, rank, own_gpu=own_gpu)
        if role not in get_args(Role):
            raise RoleRefused("unknown", type(self).__name__, role, choices=get_args(Role))
        self._role = role
        # "actor_rollout_ref" is its parts with underscores between, as veRL names it.
        self._parts: set[str] = set(role.split("_"))
        self._rollouts: RankRollouts | None = None

    @property
    def models(self) -> Collection[ModelName]:
        """Models of the role."""
        models: set[ModelName] = set()
        if "actor" in self._parts:
            models.add("policy")
        elif "rollout" in self._parts:
            models.add("rollout")  # without an optimizer
        if "ref" in self._parts:
            models.add("reference")
        return models

    def _require(self, part: Part, method: str) -> None:
        """Refuse, on all ranks alike, a method of a part that the role has not."""
        if part not in self._parts:
            raise RoleRefused("part", type(self).__name__, self._role, method, part)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def generate_sequences(self, prompts: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request with the policy's present weights, in order.

        Every rank of FSDP gathers the whole model for it, keeps it until the policy changes, and
        takes its share of all ranks' requests. On Megatron the weights change to the layout of
        ``trainer.rollout_tensor_parallel`` for it. With ``explorer.engine`` vllm, vLLM in the
        ranks' processes takes each tensor instead.

        Raises:
            LayoutRefused: The model cannot be divided so.
            RoleRefused: The role has no rollout.
        """
        self._require("rollout", "generate_sequences")
        policy = self._loaded.models.policy
        if self._rollouts is None:
            # On the first use: an actor that never generates pays for no rollouts.
            self._rollouts = rank_rollouts(self._config, self._device, policy)
        # The version is the number of optimizer steps, so that each turn names its weights.
        return self._rollouts.generate(prompts, StepRef(self._config.epoch, policy.steps))

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, batch: Batch) -> dict[str, Tensor]:
        """Return the policy's log-probabilities as `proximal_logprobs`: [B, R] float32.

        veRL calls them `old_log_probs`.
        """
        self._require("actor", "compute_log_prob")
        return self._compute("policy", "proximal_logprobs", batch)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: Batch) -> dict[str, Tensor]:
        """Return the reference's log-probabilities as `reference_logprobs`: [B, R] float32.

        veRL calls them `ref_log_prob`.
        """
        self._require("ref", "compute_ref_log_prob")
        return self._compute("reference", "reference_logprobs", batch)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of the policy on a batch that `prepare` returned.

        Metrics are `actor/pg_loss`, `actor/grad_norm` and so on, by veRL's names.
        """
        self._require("actor", "update_actor")
        metrics = self._update("policy", batch)
        return {f"actor/{_RENAMED.get(name, name)}": value for name, value in metrics.items()}

    # --- in a run, whose log has an event for each save, upload and broadcast ------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_state_dict(self, local_path: str, global_step: int) -> None:
        """Save the policy for explorers that load files, as the helpers of its engine do."""
        self._require("actor", "save_state_dict")
        self._in_run.save_state_dict(local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def upload_state_dict(self, global_step: int) -> None:
        """Publish the policy's weights in memory, tensor by tensor, for explorers."""
        self._require("actor", "upload_state_dict")
        self._in_run.upload_state_dict(global_step)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def setup_weight_sync_group(
        self, explorers: int, timeout: float | None = None
    ) -> tuple[str, ...]:
        """Wait for explorers to join the collective group; return the names of those that came."""
        self._require("actor", "setup_weight_sync_group")
        return self._in_run.setup_weight_sync_group(explorers, timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, settles=True)
    def sync_weight_nccl(self, global_step: int) -> None:
        """Send the policy's weights to all explorers at once, through the collective group."""
        self._require("actor", "sync_weight_nccl")
        self._in_run.sync_weight_nccl(global_step)

    def _save_in_run(self, local_path: str, global_step: int) -> None:
        self._in_run.save_checkpoint(local_path, global_step)
