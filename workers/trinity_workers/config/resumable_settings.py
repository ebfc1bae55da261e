"""Settings that may change when a run is resumed, and those that may not.

1. Every setting of :class:`TrainConfig` is in exactly one table: :data:`APPLIED`,
   :data:`QUESTIONS` or :data:`REFUSED`.
2. An applied setting takes effect from the resumed step on, also where the checkpoint holds
   another value, such as the learning rate in the optimizer's state.
3. Settings of the questions may change as long as the questions and their order are the same: the
   ledger counts ordinals in them. The fingerprint in the ledger decides.
4. A refused setting is part of what the checkpoint holds, or of what makes the run this run.
5. A setting that is in no table is refused.
6. Rewards of earlier answers are not computed again. If a setting of the rewards changed, these
   answers are discarded, and their prompts are answered again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from trinity_events.errors import TrinityError
from trinity_events.system.error_text import shorten
from trinity_schemas import SettingChange

from ..rules import NAME
from .errors import LoggedSettingsUnreadable
from .fields import expand_paths, general_path
from .other_names import to_current_names
from .setting_values import get_settings, to_values
from .train_config import TrainConfig

REFUSED: dict[str, str] = {
    "seed": "earlier steps were sampled with it",
    "model.path": "the checkpoint is of this model",
    "model.dtype": "the checkpoint's steps were computed in it",
    "model.lora.rank": "the checkpoint's adapters have it",
    "model.lora.alpha": "the checkpoint's adapters have it",
    "model.lora.dropout": "the checkpoint's adapters have it",
    "model.lora.target_modules": "the checkpoint's adapters are of these modules",
    "trainer.engine": "another engine does not read the checkpoint",
    "trainer.distributed_optimizer": "the checkpoint has the state of the other optimizer",
    "trainer.colocated": "the answers of earlier steps are of another place",
    "algorithm.advantage": "it is another algorithm",
    "algorithm.loss": "it is another algorithm",
    # The schedule of the learning rate counts updates, and the optimizer's state has their number.
    "algorithm.epochs": "the learning rate counts a step's updates",
    "algorithm.mini_batches": "the learning rate counts a step's updates",
    "algorithm.kl.where": "it is another algorithm",
    "algorithm.critic.use": "the checkpoint has a critic, or lacks one",
    "algorithm.critic.critic_warmup_steps": "the policy's learning rate counts steps after it",
    "algorithm.teacher.path": "it is another teacher",
    "rewards.reward_model": "it is another reward model",
}
"""Settings that do not change at a resume, each with the reason."""

QUESTIONS = expand_paths(
    {
        "task": "name questions prompt answer options",
        f"task.sets.{NAME}": "questions weight prompt answer source",
    }
)
"""Settings of the questions, which may be named otherwise while they are the same."""

# Without those of the reward model: the ranks score the answers of each step as they train.
REWARDS = frozenset(
    (
        *("task.name", "rewards.function", "rewards.deadline", "task.options"),
        *("task.environment", f"task.sets.{NAME}.source"),
        *("rewards.service", "rewards.judge", "rewards.judge_model", "rewards.judge_prompt"),
        *("rewards.best_grade", "rewards.code_tests", "rewards.code_memory_mb"),
        *("rewards.code_file_mb", "rewards.code_files"),
    )
)
"""Settings on which the reward of an answer depends."""

_APPLIED = {
    "": "name steps",
    "task": "environment environment_deadline",
    "rewards": """
        function deadline reward_model_weight on_error error_score service judge judge_model
        judge_prompt token_variable best_grade attempts calls code_tests code_memory_mb
        code_file_mb code_files
        """,
    "trainer": """
        ranks cpus gpus tensor_parallel pipeline_parallel virtual_pipeline expert_parallel
        context_parallel sequence_parallel rollout_tensor_parallel recompute cpu_offload packing
        learning_rate warmup_steps schedule micro_batch_rows micro_batch_tokens fused_loss
        profile_steps profile_ranks weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        max_skipped_steps
        """,
    "trainer.policy_offload": "param_offload grad_offload optimizer_offload",
    "trainer.critic_offload": "param_offload grad_offload optimizer_offload",
    "trainer.reference_offload": "param_offload",
    "algorithm": """
        preset scale deviation deviation_epsilon gamma gae_lambda normalisation normalisation_length
        clip_low clip_high dual_clip entropy_coefficient options
        """,
    "algorithm.kl": "estimator coefficient weighted",
    "algorithm.importance_sampling": "ratio_to weights cap mask mask_low mask_high",
    "algorithm.filters": "zero_variance part",
    "algorithm.overlong": "mask buffer penalty limit",
    "algorithm.critic": "clip learning_rate",
    "algorithm.teacher": "divergence mixture",
    "explorer": """
        count engine engine_options proof min_proof proof_layers probe_tolerance dtype
        deterministic groups_per_claim cpus gpus device wait_for_run
        """,
    "rollouts": """
        prompts_per_step samples_per_prompt max_new_tokens temperature top_p top_k min_p
        repetition_penalty stop include_stop_str_in_output max_prompt_tokens chat_template_kwargs
        max_turns order window max_bytes claim_lease request_deadline max_attempts
        max_consecutive_failures outage_timeout pause_mode keep_answers
        """,
    "sync": """
        style interval offset max_staleness when_stale method transport publish dtype full_every
        probes timeout
        """,
    "evaluation": "timeout",
    f"evaluation.sets.{NAME}": """
        questions count samples temperature top_p top_k min_p repetition_penalty max_new_tokens
        pass_at correct_from interval versions at_start at_end
        """,
    "record": "rollouts groups_per_step max_bytes max_steps redact",
    "checkpoints": """
        interval keep save_hf_checkpoint strategy verify on_damage notice root mirror
        """,
    "checkpoints.keep_best": "set metric mode",
    "tracking": "trackers folder project",
    "alarms": """
        stalled_step equal_rewards truncated_answers empty_answers repeated_answers
        entropy_collapse reward_parts_apart infra_failed_rate transfer_rate
        """,
    "notify": "webhook command events deadline",
}
APPLIED = expand_paths(_APPLIED)
"""Settings that take effect when a run is resumed."""

_REFUSED_BY_ENGINE = {
    ("verl", "trainer.ranks"): "veRL's FSDP engine reads its shards at their number of ranks",
}
"""Applied settings that one engine cannot change, each with the reason."""
_FOLDERS = frozenset(("model.path", "algorithm.teacher.path", "rewards.reward_model"))
"""Settings that name a folder. One that moved is the same, if a link is at its earlier place."""
_LONGEST_VALUE = 1000
"""Characters of a value in the event; prompts of judges may be pages long."""
_LONGEST_SHOWN = 60
"""Characters of a value in an error."""


class SettingsNotResumable(TrinityError):
    """Raised if a run is resumed with another value of a setting that cannot change.

    Attributes:
        run_id: The run.
        changes: The refused changes, in the order of the configuration.
        reasons: Reason of each.
    """

    is_lasting = True

    run_id: str
    changes: tuple[SettingChange, ...]
    reasons: tuple[str, ...]
    text = (
        "run {run_id} cannot be resumed with other settings: {_listed}: set them back, start "
        "another run with --run, or begin this one again with --fresh"
    )

    @property
    def _listed(self) -> str:
        return "; ".join(
            f"{change.name} was {_format_shown(change.before)} and is now "
            f"{_format_shown(change.after)} ({reason})"
            for change, reason in zip(self.changes, self.reasons, strict=True)
        )


def _is_same(path: str, before: object, after: object) -> bool:
    """Return True if two values are equal, or name one folder through links."""
    if before == after:
        return True
    # A folder that moved is the same where a link is left at its earlier place (decision 37).
    is_folder = path in _FOLDERS and isinstance(before, str) and isinstance(after, str)
    return is_folder and os.path.realpath(str(before)) == os.path.realpath(str(after))


def compare_settings(run_id: str, logged: str, config: TrainConfig) -> tuple[SettingChange, ...]:
    """Return the settings that differ from those in the log, all of which may change.

    Settings of the questions may be among them: :func:`check_questions` compares their content.

    Args:
        run_id: The run, for messages.
        logged: Configuration in the event that opened the earlier epoch, as JSON. It may be of
            another version: what it lacks has the default, and its former names are read.
        config: The new configuration.

    Raises:
        SettingsNotResumable: One of them may not change.
        LoggedSettingsUnreadable: The configuration in the log cannot be read.
    """
    try:
        values = to_current_names(msgspec.json.decode(logged, type=dict))
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoggedSettingsUnreadable(str(error), run_id) from None
    before = {setting.keys: setting for setting in get_settings(values)}
    after = {setting.keys: setting for setting in get_settings(to_values(config))}
    changes: list[SettingChange] = []
    refused: list[tuple[SettingChange, str]] = []
    # Of both: a set of questions may have come or gone.
    for keys, setting in (before | after).items():
        old, new = before.get(keys), after.get(keys)
        if old is not None and new is not None and _is_same(setting.path, old.value, new.value):
            continue
        change = SettingChange(
            name=setting.name,
            before=None if old is None else _format_value(old.value),
            after=None if new is None else _format_value(new.value),
        )
        reason = _find_reason(setting.path, config.trainer.engine)
        if reason is None:
            changes.append(change)
        else:
            refused.append((change, reason))
    if refused:
        raise SettingsNotResumable(run_id, *zip(*refused, strict=True))
    return tuple(changes)


def check_questions(
    run_id: str, before: str, after: str, changes: Iterable[SettingChange] = ()
) -> None:
    """Raise SettingsNotResumable if the questions, or their order, are not those of the ledger.

    Args:
        run_id: The run, for messages.
        before: Fingerprint of the questions in the ledger.
        after: Fingerprint of the questions now.
        changes: Settings that changed.
    """
    if before == after:
        return
    reason = "the ledger counts prompts in the earlier questions, whose content differs"
    # If no setting changed, the file did in its place.
    changed = [change for change in changes if general_path(change.name) in QUESTIONS]
    changed = changed or [SettingChange(name="task.questions", before=before, after=after)]
    raise SettingsNotResumable(run_id, tuple(changed), (reason,) * len(changed))


def changes_rewards(changes: Iterable[SettingChange]) -> bool:
    """Return True if the rewards of earlier answers are not those of the new settings."""
    return any(general_path(change.name) in REWARDS for change in changes)


def _find_reason(path: str, engine: str) -> str | None:
    """Return the reason for which a setting may not change; None if it may."""
    if path in APPLIED:
        return _REFUSED_BY_ENGINE.get((engine, path))
    if path in QUESTIONS:
        return None
    return REFUSED.get(path, "no rule says that it may change")


def _format_value(value: object) -> str:
    return shorten(msgspec.json.encode(value).decode(), _LONGEST_VALUE)


def _format_shown(value: str | None) -> str:
    return "absent" if value is None else shorten(value, _LONGEST_SHOWN)
