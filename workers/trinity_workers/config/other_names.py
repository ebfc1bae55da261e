"""Names of settings: those of other projects, and those of earlier versions of this one.

1. A name without a note means the same as the setting here: it is an alias, whose use is reported
   with a warning. A name with a note has another unit, other values, or another effect: it is
   refused with the setting here.
2. A former name has the meaning of the current one; its values are the same, or are in
   :data:`VALUES`. Configurations in the log are read with former names, without a warning: their
   reader cannot change them.
3. A configuration has one name of a setting; several are refused, even with the same value.

Names of TRL are of ``GRPOConfig``, ``TrainingArguments``, ``ModelConfig`` and ``GRPOTrainer``;
those of veRL are of ``ppo_trainer.yaml`` and the recipe of DAPO; those of Trinity-RFT are of its
``Config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .errors import BadSettings, format_origin

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_OVERLONG = "reward_model.overlong_buffer"


class OtherName(NamedTuple):
    """Name of a setting elsewhere."""

    project: str
    """The other project; empty for an earlier version of this one."""
    name: str
    note: str = ""
    """Difference of its unit, its values or its effect."""


def _former(name: str) -> OtherName:
    return OtherName("", name)


def _trl(name: str, note: str = "") -> OtherName:
    return OtherName("TRL", name, note)


def _verl(name: str, note: str = "") -> OtherName:
    return OtherName("veRL", name, note)


def _trinity(name: str, note: str = "") -> OtherName:
    return OtherName("Trinity-RFT", name, note)


# Each was compared by meaning, unit, values and effect (decisions 39 and 46).
OTHER_NAMES: dict[str, tuple[OtherName, ...]] = {
    "name": (_trl("run_name"), _verl("trainer.experiment_name"), _trinity("name")),
    "steps": (
        _trl("max_steps", "updates of the optimizer, not batches"),
        _verl("trainer.total_training_steps"),
        _trinity("buffer.total_steps"),
    ),
    "seed": (_trl("seed"),),
    "model.path": (
        _trl("model_name_or_path", "may be a name on the hub, here a folder"),
        _verl(f"{_MODEL}.path", "may be a name on the hub, here a folder"),
        _trinity("model.model_path", "may be a name on the hub, here a folder"),
    ),
    "model.lora.rank": (_trl("lora_r"), _verl(f"{_MODEL}.lora_rank")),
    "model.lora.alpha": (_trl("lora_alpha"), _verl(f"{_MODEL}.lora_alpha")),
    "model.lora.dropout": (_trl("lora_dropout"),),
    "model.lora.target_modules": (_trl("lora_target_modules"), _verl(f"{_MODEL}.target_modules")),
    "task.questions": (_trl("dataset_name", "here datasets:NAME"), _verl("data.train_files")),
    "task.prompt": (_verl("data.prompt_key"),),
    "task.sets.NAME.questions": (
        _trl("datasets", "a list, here sets by name"),
        _trinity("buffer.explorer_input.tasksets", "a list, here sets by name"),
    ),
    "rewards.function": (
        _former("task.reward"),
        _trl("reward_funcs", "of another signature"),
        _verl("custom_reward_function.path", "with a name, here ./file.py:name"),
    ),
    "trainer.engine": (
        _verl(f"{_ACTOR}.strategy", "fsdp, fsdp2 or megatron"),
        _trinity("trainer.trainer_type"),
    ),
    "trainer.ranks": (_verl("trainer.n_gpus_per_node", "times trainer.nnodes"),),
    "trainer.colocated": (_verl("actor_rollout_ref.hybrid_engine", "always true there"),),
    "trainer.recompute": (
        _trl("gradient_checkpointing"),
        _verl(f"{_MODEL}.enable_gradient_checkpointing"),
    ),
    "trainer.packing": (_verl(f"{_MODEL}.use_remove_padding"),),
    "trainer.fused_loss": (
        _trl("use_liger_kernel", "another kernel"),
        _verl(f"{_MODEL}.use_fused_kernels", "another kernel"),
    ),
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
        _trl("vllm_tensor_parallel_size", "of vLLM"),
        _verl(f"{_ROLLOUT}.tensor_model_parallel_size", "of the rollout engine"),
    ),
    "trainer.micro_batch_rows": (
        _trl("per_device_train_batch_size", "decides the size of a step too"),
        _verl(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    ),
    "trainer.micro_batch_tokens": (_verl(f"{_ACTOR}.ppo_max_token_len_per_gpu"),),
    "trainer.learning_rate": (_trl("learning_rate"), _verl(f"{_ACTOR}.optim.lr")),
    "trainer.warmup_steps": (
        _former("trainer.ramp_steps"),
        _trl("warmup_steps"),
        _verl(f"{_ACTOR}.optim.lr_warmup_steps"),
    ),
    "trainer.schedule": (
        _trl("lr_scheduler_type", "constant has no warm-up there"),
        _verl(f"{_ACTOR}.optim.warmup_style"),
        _verl(f"{_ACTOR}.optim.lr_scheduler_type"),
    ),
    "trainer.weight_decay": (_trl("weight_decay"), _verl(f"{_ACTOR}.optim.weight_decay")),
    "trainer.adam_beta1": (_trl("adam_beta1"), _verl(f"{_ACTOR}.optim.betas", "the first")),
    "trainer.adam_beta2": (_trl("adam_beta2"), _verl(f"{_ACTOR}.optim.betas", "the second")),
    "trainer.adam_epsilon": (_trl("adam_epsilon"),),
    "trainer.max_grad_norm": (
        _former("trainer.gradient_norm"),
        _trl("max_grad_norm"),
        _verl(f"{_ACTOR}.grad_clip"),
        _verl(f"{_ACTOR}.optim.clip_grad"),
    ),
    "trainer.profile_steps": (_verl("global_profiler.steps"),),
    "algorithm.preset": (_trinity("algorithm.algorithm_type", "names may differ"),),
    "algorithm.advantage": (_verl("algorithm.adv_estimator"),),
    "algorithm.scale": (
        _trl("scale_rewards", "true is group"),
        _verl("algorithm.norm_adv_by_std_in_grpo", "true is group, false is none"),
    ),
    "algorithm.gamma": (_verl("algorithm.gamma"),),
    "algorithm.gae_lambda": (_verl("algorithm.lam"),),
    "algorithm.loss": (_verl(f"{_ACTOR}.policy_loss.loss_mode", "vanilla is ppo"),),
    "algorithm.normalisation": (
        _trl("loss_type", "grpo is sequence-mean, dr_grpo is constant"),
        _verl(f"{_ACTOR}.loss_agg_mode", "seq-mean-token-mean is sequence-mean"),
    ),
    "algorithm.epochs": (_trl("num_iterations"), _verl(f"{_ACTOR}.ppo_epochs")),
    "algorithm.mini_batches": (
        _verl(f"{_ACTOR}.ppo_mini_batch_size", "the size of one, not their number"),
    ),
    "algorithm.clip_low": (
        _trl("epsilon", "clip_high too, unless epsilon_high is set"),
        _verl(f"{_ACTOR}.clip_ratio_low"),
    ),
    "algorithm.clip_high": (_trl("epsilon_high"), _verl(f"{_ACTOR}.clip_ratio_high")),
    "algorithm.dual_clip": (_trl("delta"), _verl(f"{_ACTOR}.clip_ratio_c")),
    "algorithm.entropy_coefficient": (_verl(f"{_ACTOR}.entropy_coeff"),),
    "algorithm.kl.coefficient": (
        _trl("beta"),
        _verl(f"{_ACTOR}.kl_loss_coef", "counts if use_kl_loss is true"),
        _verl("algorithm.kl_ctrl.kl_coef", "counts if use_kl_in_reward is true"),
    ),
    "algorithm.kl.estimator": (
        _verl(f"{_ACTOR}.kl_loss_type", "kl is k1, mse is k2, low_var_kl is k3"),
        _verl("algorithm.kl_penalty", "kl is k1, mse is k2, low_var_kl is k3"),
    ),
    "algorithm.kl.where": (
        _verl(f"{_ACTOR}.use_kl_loss", "true is loss"),
        _verl("algorithm.use_kl_in_reward", "true is reward"),
    ),
    "algorithm.importance_sampling.weights": (
        _trl("vllm_importance_sampling_mode", "token_truncate is token"),
    ),
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
    # `warmup_steps` is the field's word for the learning rate, and was one for two things here.
    "algorithm.critic.critic_warmup_steps": (
        _former("algorithm.critic.warmup_steps"),
        _verl("trainer.critic_warmup"),
    ),
    "rewards.deadline": (_former("task.reward_deadline"),),
    "rewards.reward_model_weight": (_former("reward.weight"),),
    "rewards.reward_model": (
        _former("reward.model"),
        _verl("reward_model.model.path", "may be a name on the hub, here a folder"),
    ),
    "explorer.engine": (
        _trl("use_vllm", "true or false, here the engine's name, vllm"),
        _verl(f"{_ROLLOUT}.name", "hf is huggingface here, and there is no sglang"),
    ),
    "explorer.gpus": (
        _verl(f"{_ROLLOUT}.tensor_model_parallel_size", "GPUs of one engine"),
        _trinity("explorer.rollout_model.tensor_parallel_size", "GPUs of one engine"),
    ),
    "explorer.proof": (_former("sync.tensor_digests"),),
    "explorer.dtype": (_verl(f"{_ROLLOUT}.dtype"),),
    "rollouts.pause_mode": (_former("rollouts.on_update"),),
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
    "rollouts.top_p": (_trl("top_p"), _verl(f"{_ROLLOUT}.top_p")),
    "rollouts.top_k": (
        _trl("top_k"),
        _verl(f"{_ROLLOUT}.top_k", "-1 samples from all, here 0"),
    ),
    "rollouts.min_p": (_trl("min_p"),),
    "rollouts.repetition_penalty": (
        _trl("repetition_penalty"),
        _verl(f"{_ROLLOUT}.repetition_penalty"),
    ),
    "rollouts.chat_template_kwargs": (
        _trl("chat_template_kwargs"),
        _verl("data.apply_chat_template_kwargs"),
    ),
    "rollouts.max_prompt_tokens": (
        _trl("max_prompt_length", "longer prompts are cut off there, and dropped here"),
        _verl(
            "data.max_prompt_length",
            "longer prompts are filtered (filter_overlong_prompts), cut off or an error there",
        ),
        _trinity("model.max_prompt_tokens", "longer prompts are cut off there, and dropped here"),
    ),
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
        _trinity("checkpoints.max_checkpoints_to_keep"),
    ),
    "checkpoints.save_hf_checkpoint": (_trinity("trainer.save_hf_checkpoint"),),
    "checkpoints.strategy": (_trinity("trainer.save_strategy"),),
    "checkpoints.root": (
        _trl("output_dir", "of one run, here of all"),
        _verl("trainer.default_local_dir", "of one run, here of all"),
        _trinity("checkpoint_root_dir"),
    ),
    "tracking.trackers": (
        _trl("report_to"),
        _verl("trainer.logger", "console is always on here"),
        _trinity("monitor.monitor_type", "here a list"),
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
"""Other names of each setting that has one, by its path."""

VALUES: dict[str, dict[Any, Any]] = {
    # sync.tensor_digests was true or false.
    "explorer.proof": {True: "served", False: "names"},
    "sync.method": {"online": "nccl", "offline": "checkpoint"},
    "sync.style": {
        "dynamic_by_trainer": "trainer_driven",
        "dynamic_by_explorer": "explorer_driven",
    },
    # rollouts.on_update had names of this project alone.
    "rollouts.pause_mode": {"finish": "wait", "keep_cache": "keep", "recompute_cache": "retract"},
    "algorithm.advantage": {
        "reinforce_plus_plus": "reinforce++",
        "reinforce_plus_plus_baseline": "reinforce++-baseline",
    },
}
"""Names that values of settings have under another name of the setting, and the values."""

WITHOUT_EQUIVALENT: dict[str, str] = {
    **dict.fromkeys(
        ("num_train_epochs", "trainer.total_epochs", "buffer.total_epochs"),
        "set steps: questions are drawn again after a pass over them",
    ),
    "gradient_accumulation_steps": "set trainer.micro_batch_rows: gradients add up over the passes",
    **dict.fromkeys(("bf16", "torch_dtype", "dtype"), "set model.dtype bfloat16"),
    "fp16": "set model.dtype bfloat16: float16 has too few exponents for gradients",
    # Of datasets.interleave_datasets, which recipes of TRL mix data sets by.
    "probabilities": "set the weight of each set, task.sets.NAME.weight",
    "stopping_strategy": "a set of task.sets that ends before the others begins its next pass",
    **dict.fromkeys(
        ("logging_steps", "log_completions"), "every step is logged: see trinity-events status"
    ),
    **dict.fromkeys(
        (
            "resume_from_checkpoint",
            "trainer.resume_mode",
            "trainer.resume_from_path",
            "continue_from_checkpoint",
        ),
        "a run that is started again under its name is resumed",
    ),
    **dict.fromkeys(
        ("trainer.nnodes", "cluster.node_num", "cluster.gpu_per_node"),
        "set trainer.ranks, and RAY_ADDRESS to join a cluster of several hosts",
    ),
    "trainer.default_hdfs_dir": "set checkpoints.mirror to the URL of an object storage",
    f"{_ACTOR}.use_dynamic_bsz": "set trainer.micro_batch_tokens",
    f"{_ACTOR}.clip_ratio": "set algorithm.clip_low and algorithm.clip_high",
    "explorer.runner_per_model": "set explorer.count",
    "mode": "train --parts trainer and the command explorer start one side of a run",
}
"""Settings of other projects that none has the meaning of, and what to do instead."""

ABSENT_VALUES: dict[str, dict[str, str]] = {
    "trainer.engine": {
        "tinker": "Tinker's service holds model and optimizer itself, so there are no weights to "
        "publish: publish the steps of such a loop by trinity_events.training_run",
        "verl_legacy": "veRL before 0.8 is not driven: install veRL 0.8 or later, and write verl",
        "monkey_patch": "no function of veRL is replaced: write verl, which goes through veRL's "
        "own extension points",
        "verl_megatron": "write verl-megatron for veRL's Megatron engine, which needs GPUs",
    },
}
"""Values of other projects that a setting does not have here: the reason, and the way out."""

SEVERAL_VALUES = {
    "task.questions": "name each of several sources below task.sets, with its weight",
}
"""Settings that hold one value here and several in other projects, and where several go."""

SECTIONS = {
    **dict.fromkeys(
        (
            "actor_rollout_ref",
            "data",
            "critic",
            "reward_model",
            "custom_reward_function",
            "global_profiler",
        ),
        "veRL",
    ),
    **dict.fromkeys(("synchronizer", "buffer", "monitor", "cluster", "stages"), "Trinity-RFT"),
}
"""Sections that only another project has, and the project."""

_TOO_MANY = 3
"""Settings from which on a short name, such as ``path`` or ``n``, says too little for a hint."""
FORMER_NAMES = {
    other.name: path
    for path, others in OTHER_NAMES.items()
    for other in others
    if not other.project
}
"""Former paths of settings, and the current ones."""
ALIASES = {
    other.name: (path, other)
    for path, others in OTHER_NAMES.items()
    for other in others
    # The name of a user's section stands in a path that has NAME: no other name gives it.
    if not other.note and "NAME" not in path and other.name != path
}
"""Names that are read in the place of a setting's own, with its path."""
_OTHERS = [
    *(other.name for others in OTHER_NAMES.values() for other in others),
    *WITHOUT_EQUIVALENT,
]


class SettingNamedTwice(BadSettings):
    """A configuration has a setting by two names.

    Attributes:
        path: Current path of the setting.
        names: Both names.
        origin: File or option that has them; empty for the log.
    """

    path: str
    names: tuple[str, str]
    origin: str = ""
    text = "{_origin}{names[0]} and {names[1]} are two names of one setting: write {path} alone"

    @property
    def _origin(self) -> str:
        return format_origin(self.origin)


def to_path(name: str) -> str:
    """Return the path of a setting that is given by any of its names."""
    return ALIASES[name][0] if name in ALIASES else name


def format_alias(name: str) -> str | None:
    """Return a sentence with the setting's own name, for a warning; None for a name that is it."""
    if name not in ALIASES:
        return None
    path, other = ALIASES[name]
    if other.project:
        return f"{other.project}'s {name} is {path} here"
    return f"{name} is called {path} now: write the new name"


def is_section(name: str) -> bool:
    """Return True for a section of another project, or one whose fields have former names."""
    return name.partition(".")[0] in SECTIONS or any(
        other.startswith(f"{name}.") for other in _OTHERS
    )


def format_hint(name: str) -> str | None:
    """Return a sentence about a setting of another project; None if none is known to have it."""
    matches = list(find_settings(name))
    if matches and len({path for path, _ in matches}) < _TOO_MANY:
        return " and ".join(
            f"{other.project}'s {other.name} is {path} here"
            + (f" ({other.note})" if other.note else "")
            for path, other in matches
        )
    # After the settings: a name that some setting has is answered with that.
    if name in WITHOUT_EQUIVALENT:
        return WITHOUT_EQUIVALENT[name]
    if project := SECTIONS.get(name.partition(".")[0]):
        return (
            f"it is in a section of {project}, and the page of the configuration lists the names "
            "that are known here"
        )
    return None


def format_absent_value(path: str, value: Any) -> str:
    """Return the reason and the way out for a value that is not here; else empty text."""
    if isinstance(value, list | dict) and path in SEVERAL_VALUES:
        return SEVERAL_VALUES[path]
    if not isinstance(value, str):
        return ""
    # A module's path names it too, such as trinity.trainer.verl.monkey_patch.
    parts = value.lower().split(".")
    absent = ABSENT_VALUES.get(path, {})
    return next((reason for name, reason in absent.items() if name in parts), "")


def find_settings(name: str) -> Iterator[tuple[str, OtherName]]:
    """Yield the settings that another project calls so, each with its name there.

    Args:
        name: The whole name, or its last parts, such as ``adv_estimator``.
    """
    for path, others in OTHER_NAMES.items():
        for other in others:
            if other.project and (other.name == name or other.name.endswith(f".{name}")):
                yield path, other


def to_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the log, sections in one another, with the current names.

    Raises:
        SettingNamedTwice: One setting has both of its names.
    """
    current = dict(values)
    for former, path in FORMER_NAMES.items():
        # Copied section by section: the caller's values are those of a log entry, and stay.
        *former_keys, former_name = former.split(".")
        *keys, name = path.split(".")
        section = _copy_section(current, former_keys)
        if section is None or former_name not in section:
            continue
        value = section.pop(former_name)
        if not section:  # A section that has moved as a whole is unknown now.
            _remove_section(current, former_keys)
        section = _copy_section(current, keys, create=True)
        if section is None or name in section:
            raise SettingNamedTwice(path, (former, path))
        section[name] = to_current_value(path, value)
    return current


def to_current_value(path: str, value: Any) -> Any:
    """Return the value of a setting for one that has another name."""
    # A list or a mapping is no key, and has no other name.
    return VALUES.get(path, {}).get(value, value) if isinstance(value, str | bool) else value


def _copy_section(
    values: dict[str, Any], keys: list[str], *, create: bool = False
) -> dict[str, Any] | None:
    """Replace nested sections by copies, and return the last; None if one is absent."""
    for key in keys:
        section = values.get(key, {} if create else None)
        if not isinstance(section, dict):
            return None
        values[key] = dict(section)
        values = values[key]
    return values


def _remove_section(values: dict[str, Any], keys: list[str]) -> None:
    *parents, last = keys
    for key in parents:
        values = values[key]
    del values[last]
