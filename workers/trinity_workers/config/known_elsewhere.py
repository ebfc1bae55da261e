"""Names that settings have in TRL, veRL and Trinity-RFT, for users who come from there.

Names of TRL are of ``GRPOConfig``, ``TrainingArguments``, ``ModelConfig`` and ``GRPOTrainer``;
those of veRL are of ``ppo_trainer.yaml`` and the recipe of DAPO; those of Trinity-RFT are of its
``Config``. A name is listed where its meaning is that of the setting. A note says where its unit or
its values differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_OVERLONG = "reward_model.overlong_buffer"


class Equivalent(NamedTuple):
    """Name of a setting in another project."""

    project: str
    name: str
    note: str = ""
    """Difference of its unit or its values."""


def _trl(name: str, note: str = "") -> Equivalent:
    return Equivalent("TRL", name, note)


def _verl(name: str, note: str = "") -> Equivalent:
    return Equivalent("veRL", name, note)


def _trinity(name: str, note: str = "") -> Equivalent:
    return Equivalent("Trinity-RFT", name, note)


EQUIVALENTS: dict[str, tuple[Equivalent, ...]] = {
    "name": (_trl("run_name"), _verl("trainer.experiment_name"), _trinity("name")),
    "steps": (
        _trl("max_steps"),
        _verl("trainer.total_training_steps"),
        _trinity("buffer.total_steps"),
    ),
    "seed": (_trl("seed"),),
    "model.path": (
        _trl("model_name_or_path"),
        _verl(f"{_MODEL}.path"),
        _trinity("model.model_path"),
    ),
    "model.lora.rank": (_trl("lora_r"), _verl(f"{_MODEL}.lora_rank")),
    "model.lora.alpha": (_trl("lora_alpha"), _verl(f"{_MODEL}.lora_alpha")),
    "model.lora.dropout": (_trl("lora_dropout"),),
    "model.lora.target_modules": (_trl("lora_target_modules"), _verl(f"{_MODEL}.target_modules")),
    "task.questions": (_trl("dataset_name"), _verl("data.train_files")),
    "task.prompt": (_verl("data.prompt_key"),),
    "task.reward": (_trl("reward_funcs"), _verl("custom_reward_function.path")),
    "trainer.engine": (_verl(f"{_ACTOR}.strategy"), _trinity("trainer.trainer_type")),
    "trainer.ranks": (_verl("trainer.n_gpus_per_node", "times trainer.nnodes"),),
    "trainer.colocated": (_verl("actor_rollout_ref.hybrid_engine"),),
    "trainer.recompute": (
        _trl("gradient_checkpointing"),
        _verl(f"{_MODEL}.enable_gradient_checkpointing"),
    ),
    "trainer.packing": (_verl(f"{_MODEL}.use_remove_padding"),),
    "trainer.fused_loss": (_trl("use_liger_kernel"), _verl(f"{_MODEL}.use_fused_kernels")),
    "trainer.cpu_offload": (_verl(f"{_ACTOR}.fsdp_config.offload_policy"),),
    "trainer.policy_offload.param_offload": (_verl(f"{_ACTOR}.fsdp_config.param_offload"),),
    "trainer.policy_offload.optimizer_offload": (_verl(f"{_ACTOR}.fsdp_config.optimizer_offload"),),
    "trainer.critic_offload.param_offload": (_verl("critic.model.fsdp_config.param_offload"),),
    "trainer.critic_offload.optimizer_offload": (
        _verl("critic.model.fsdp_config.optimizer_offload"),
    ),
    "trainer.reference_offload.param_offload": (
        _verl("actor_rollout_ref.ref.fsdp_config.param_offload"),
    ),
    "trainer.tensor_parallel": (_verl(f"{_ACTOR}.megatron.tensor_model_parallel_size"),),
    "trainer.pipeline_parallel": (_verl(f"{_ACTOR}.megatron.pipeline_model_parallel_size"),),
    "trainer.virtual_pipeline": (_verl(f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size"),),
    "trainer.expert_parallel": (_verl(f"{_ACTOR}.megatron.expert_model_parallel_size"),),
    "trainer.context_parallel": (_verl(f"{_ACTOR}.megatron.context_parallel_size"),),
    "trainer.rollout_tensor_parallel": (
        _trl("vllm_tensor_parallel_size"),
        _verl(f"{_ROLLOUT}.tensor_model_parallel_size"),
    ),
    "trainer.micro_batch_rows": (
        _trl("per_device_train_batch_size"),
        _verl(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    ),
    "trainer.micro_batch_tokens": (_verl(f"{_ACTOR}.ppo_max_token_len_per_gpu"),),
    "trainer.learning_rate": (_trl("learning_rate"), _verl(f"{_ACTOR}.optim.lr")),
    "trainer.warmup_steps": (_trl("warmup_steps"), _verl(f"{_ACTOR}.optim.lr_warmup_steps")),
    "trainer.schedule": (_trl("lr_scheduler_type"), _verl(f"{_ACTOR}.optim.warmup_style")),
    "trainer.weight_decay": (_trl("weight_decay"), _verl(f"{_ACTOR}.optim.weight_decay")),
    "trainer.adam_beta1": (_trl("adam_beta1"), _verl(f"{_ACTOR}.optim.betas", "the first")),
    "trainer.adam_beta2": (_trl("adam_beta2"), _verl(f"{_ACTOR}.optim.betas", "the second")),
    "trainer.adam_epsilon": (_trl("adam_epsilon"),),
    "trainer.max_grad_norm": (_trl("max_grad_norm"), _verl(f"{_ACTOR}.grad_clip")),
    "trainer.profile_steps": (_verl("global_profiler.steps"),),
    "algorithm.advantage": (_verl("algorithm.adv_estimator"), _trinity("algorithm.algorithm_type")),
    "algorithm.scale": (
        _trl("scale_rewards"),
        _verl("algorithm.norm_adv_by_std_in_grpo", "true is group, false is none"),
    ),
    "algorithm.gamma": (_verl("algorithm.gamma"),),
    "algorithm.gae_lambda": (_verl("algorithm.lam"),),
    "algorithm.loss": (_verl(f"{_ACTOR}.policy_loss.loss_mode"),),
    "algorithm.normalisation": (_trl("loss_type"), _verl(f"{_ACTOR}.loss_agg_mode")),
    "algorithm.epochs": (_trl("num_iterations"), _verl(f"{_ACTOR}.ppo_epochs")),
    "algorithm.mini_batches": (
        _verl(f"{_ACTOR}.ppo_mini_batch_size", "the size of one, not their number"),
    ),
    "algorithm.clip_low": (_trl("epsilon"), _verl(f"{_ACTOR}.clip_ratio_low")),
    "algorithm.clip_high": (_trl("epsilon_high"), _verl(f"{_ACTOR}.clip_ratio_high")),
    "algorithm.dual_clip": (_trl("delta"), _verl(f"{_ACTOR}.clip_ratio_c")),
    "algorithm.entropy_coefficient": (_verl(f"{_ACTOR}.entropy_coeff"),),
    "algorithm.kl.coefficient": (
        _trl("beta"),
        _verl(f"{_ACTOR}.kl_loss_coef"),
        _verl("algorithm.kl_ctrl.kl_coef"),
    ),
    "algorithm.kl.estimator": (
        _verl(f"{_ACTOR}.kl_loss_type"),
        _verl("algorithm.kl_penalty"),
    ),
    "algorithm.kl.where": (
        _verl(f"{_ACTOR}.use_kl_loss", "true is loss"),
        _verl("algorithm.use_kl_in_reward", "true is reward"),
    ),
    "algorithm.importance_sampling.weights": (_trl("vllm_importance_sampling_mode"),),
    "algorithm.importance_sampling.cap": (_trl("vllm_importance_sampling_cap"),),
    "algorithm.overlong.mask": (_trl("mask_truncated_completions"),),
    "algorithm.overlong.buffer": (_verl(f"{_OVERLONG}.len", "in tokens, not a share"),),
    "algorithm.overlong.penalty": (_verl(f"{_OVERLONG}.penalty_factor"),),
    "algorithm.filters.zero_variance": (
        _verl("algorithm.filter_groups.enable", "true is resample"),
    ),
    "algorithm.critic.use": (_verl("critic.enable"),),
    "algorithm.critic.clip": (_verl("critic.cliprange_value"),),
    "algorithm.critic.learning_rate": (_verl("critic.optim.lr"),),
    "algorithm.critic.critic_warmup_steps": (_verl("trainer.critic_warmup"),),
    "reward.model": (_verl("reward_model.model.path"),),
    "explorer.engine": (_trl("use_vllm"), _verl(f"{_ROLLOUT}.name")),
    "explorer.dtype": (_verl(f"{_ROLLOUT}.dtype"),),
    "rollouts.prompts_per_step": (
        _verl("data.train_batch_size"),
        _trinity("buffer.batch_size"),
        _trl("generation_batch_size", "in answers, not prompts"),
    ),
    "rollouts.samples_per_prompt": (
        _trl("num_generations"),
        _verl(f"{_ROLLOUT}.n"),
        _trinity("algorithm.repeat_times"),
    ),
    "rollouts.max_new_tokens": (
        _trl("max_completion_length"),
        _verl("data.max_response_length"),
        _trinity("model.max_response_tokens"),
    ),
    "rollouts.temperature": (_trl("temperature"), _verl(f"{_ROLLOUT}.temperature")),
    "rollouts.max_turns": (_verl(f"{_ROLLOUT}.multi_turn.max_assistant_turns"),),
    "sync.method": (_trinity("synchronizer.sync_method"),),
    "sync.style": (_trinity("synchronizer.sync_style"),),
    "sync.interval": (_trinity("synchronizer.sync_interval"),),
    "sync.offset": (_trinity("synchronizer.sync_offset"),),
    "sync.timeout": (_trinity("synchronizer.sync_timeout"),),
    "checkpoints.interval": (
        _trl("save_steps"),
        _verl("trainer.save_freq"),
        _trinity("trainer.save_interval"),
    ),
    "checkpoints.keep": (
        _trl("save_total_limit"),
        _verl("trainer.max_actor_ckpt_to_keep"),
        _trinity("trainer.max_checkpoints_to_keep"),
    ),
    "checkpoints.save_hf_checkpoint": (_trinity("trainer.save_hf_checkpoint"),),
    "checkpoints.strategy": (_trinity("trainer.save_strategy"),),
    "checkpoints.root": (
        _trl("output_dir"),
        _verl("trainer.default_local_dir"),
        _trinity("checkpoint_root_dir"),
    ),
    "tracking.trackers": (
        _trl("report_to"),
        _verl("trainer.logger"),
        _trinity("monitor.monitor_type"),
    ),
    "tracking.project": (_verl("trainer.project_name"), _trinity("project")),
    "evaluation.sets.NAME.questions": (_trl("eval_dataset"), _verl("data.val_files")),
    "evaluation.sets.NAME.interval": (
        _trl("eval_steps"),
        _verl("trainer.test_freq"),
        _trinity("explorer.eval_interval"),
    ),
    "evaluation.sets.NAME.samples": (
        _trl("num_generations_eval"),
        _verl(f"{_ROLLOUT}.val_kwargs.n"),
    ),
    "evaluation.sets.NAME.temperature": (_verl(f"{_ROLLOUT}.val_kwargs.temperature"),),
    "evaluation.sets.NAME.top_p": (_verl(f"{_ROLLOUT}.val_kwargs.top_p"),),
    "evaluation.sets.NAME.top_k": (_verl(f"{_ROLLOUT}.val_kwargs.top_k"),),
    "evaluation.sets.NAME.at_start": (
        _trl("eval_on_start"),
        _verl("trainer.val_before_train"),
        _trinity("explorer.eval_on_startup"),
    ),
}
"""Equivalents of each setting that has one."""


_TOO_MANY = 3
"""Settings from which on a short name, such as ``path`` or ``n``, says too little for a hint."""


def format_hint(name: str) -> str | None:
    """Return a sentence with the settings that another project calls so; None without any."""
    matches = list(find_equivalents(name))
    if not matches or len({path for path, _ in matches}) >= _TOO_MANY:
        return None
    return " and ".join(
        f"{theirs.project}'s {theirs.name} is {path} here" for path, theirs in matches
    )


def find_equivalents(name: str) -> Iterator[tuple[str, Equivalent]]:
    """Yield the settings that another project calls so, each with its name there.

    Args:
        name: The whole name, or its last parts, such as ``adv_estimator``.
    """
    for path, equivalents in EQUIVALENTS.items():
        for equivalent in equivalents:
            if equivalent.name == name or equivalent.name.endswith(f".{name}"):
                yield path, equivalent
