"""Settings that name code, files, URLs or environment variables, and whose value of them counts.

An explorer that is started by itself reads the run's configuration from the log. Every process that
may append to the run's events can put another one there. So the log decides data alone:

1. Every setting of :class:`TrainConfig` is in exactly one table: :data:`DATA`, or
   :data:`REFERENCES` if its value names code, a path, a URL or an environment variable.
2. Data comes from the log, with or without a file of the explorer's own.
3. With a file, every reference comes from the file. A reference that an explorer uses and that
   differs in the log is refused.
4. Without a file, a reference that an explorer uses has its default, or a value that names nothing
   of the log's choice: a task or an engine that is installed here, or a model below the checkpoint
   root. Everything else is refused.
5. A reference that the trainer alone uses is neither compared nor copied from the log: an explorer
   has that of its file, or the default.
6. A setting that is in no table is treated as in 5. A refusal names every setting that is refused,
   and comes before anything is imported, opened or contacted.

The table of data is not derived from that of resumable settings, which has nearly the same names: a
setting that was entered for a resume would then be taken from the log without being looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec
from msgspec import Struct

from trinity_events.errors import TrinityError

from ..rollout_engines.loading import ENGINES
from ..rollout_engines.loading import GROUP as ENGINE_GROUP
from ..rules import NAME, format_list
from ..tasks.loading import GROUP as TASK_GROUP
from ..tasks.loading import TASKS
from .fields import collections, expand_paths, fields, sections
from .setting_values import Setting, descend, get_settings, to_values
from .train_config import TrainConfig

Kind = Literal["code", "path", "URL", "environment variable"]
Accepted = Literal["default", "installed", "checkpoints"]


class Reference(NamedTuple):
    """Setting whose value names code, a path, a URL or an environment variable."""

    kind: Kind
    role: Literal["explorer", "trainer"] = "explorer"
    """Role whose processes use the setting; the trainer alone, or explorers too."""
    accepted: Accepted = "default"
    """Value that an explorer without a file accepts in addition to the default."""


REFERENCES: dict[str, Reference] = {
    "model.path": Reference("path", accepted="checkpoints"),
    "task.name": Reference("code", accepted="installed"),
    # A file, a module, a data set of the hub, or a family of reasoning-gym. Families are installed,
    # and yet code: countdown and others evaluate an answer, by sympy's parse_expr.
    "task.questions": Reference("code"),
    f"task.sets.{NAME}.questions": Reference("code"),
    f"task.sets.{NAME}.source": Reference("code"),  # arguments of code, as of task.options
    "rewards.function": Reference("code"),
    "task.environment": Reference("code"),
    "task.options": Reference("code"),  # arguments of code, such as {"shell": true}
    "rewards.service": Reference("URL"),
    "rewards.judge": Reference("URL"),
    "rewards.judge_prompt": Reference("code"),  # a template of str.format, which is evaluated
    "rewards.token_variable": Reference("environment variable"),
    # Answers are run as code; weights of the log's choice would write them.
    "rewards.code_tests": Reference("code"),
    "rewards.code_memory_mb": Reference("code"),
    "rewards.code_file_mb": Reference("code"),
    "rewards.code_files": Reference("code"),
    "explorer.engine": Reference("code", accepted="installed"),
    # Arguments of a template, which the model's folder brings.
    "rollouts.chat_template_kwargs": Reference("code"),
    "explorer.engine_options": Reference("code"),
    f"evaluation.sets.{NAME}.questions": Reference("code"),
    "algorithm.advantage": Reference("code", role="trainer"),
    "algorithm.loss": Reference("code", role="trainer"),
    "algorithm.options": Reference("code", role="trainer"),
    "algorithm.teacher.path": Reference("path", role="trainer"),
    "rewards.reward_model": Reference("path", role="trainer"),
    "checkpoints.root": Reference("path", role="trainer"),
    "checkpoints.mirror": Reference("URL", role="trainer"),
    "tracking.trackers": Reference("code", role="trainer"),
    "tracking.folder": Reference("path", role="trainer"),
    "record.redact": Reference("code", role="trainer"),
    "notify.webhook": Reference("URL", role="trainer"),
    "notify.command": Reference("code", role="trainer"),
}
"""Settings that name something outside of the configuration, by path."""

_DATA = {
    "": "name steps seed",
    "model": "dtype",
    "model.lora": "rank alpha dropout target_modules",
    "task": "prompt answer environment_deadline",
    f"task.sets.{NAME}": "weight prompt answer",
    "rewards": """
        deadline reward_model_weight on_error error_score judge_model best_grade attempts calls
        """,
    "trainer": """
        engine ranks cpus gpus tensor_parallel pipeline_parallel virtual_pipeline expert_parallel
        context_parallel sequence_parallel distributed_optimizer colocated rollout_tensor_parallel
        recompute cpu_offload packing learning_rate warmup_steps schedule micro_batch_rows
        micro_batch_tokens fused_loss profile_steps profile_ranks weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm max_skipped_steps
        """,
    "trainer.policy_offload": "param_offload grad_offload optimizer_offload",
    "trainer.critic_offload": "param_offload grad_offload optimizer_offload",
    "trainer.reference_offload": "param_offload",
    "algorithm": """
        preset scale deviation deviation_epsilon gamma gae_lambda normalisation normalisation_length
        epochs mini_batches clip_low clip_high dual_clip entropy_coefficient
        """,
    "algorithm.kl": "estimator coefficient where weighted",
    "algorithm.importance_sampling": "ratio_to weights cap mask mask_low mask_high",
    "algorithm.filters": "zero_variance part",
    "algorithm.overlong": "mask buffer penalty limit",
    "algorithm.critic": "use clip learning_rate critic_warmup_steps",
    "algorithm.teacher": "divergence mixture",
    "explorer": """
        count proof min_proof proof_layers probe_tolerance dtype deterministic groups_per_claim
        cpus gpus device wait_for_run
        """,
    "rollouts": """
        prompts_per_step samples_per_prompt max_new_tokens temperature top_p top_k min_p
        repetition_penalty stop include_stop_str_in_output max_prompt_tokens
        max_turns order window max_bytes claim_lease request_deadline max_attempts
        max_consecutive_failures outage_timeout pause_mode keep_answers
        """,
    "sync": """
        style interval offset max_staleness when_stale method transport publish dtype full_every
        probes timeout
        """,
    "evaluation": "timeout",
    f"evaluation.sets.{NAME}": """
        count samples temperature top_p top_k min_p repetition_penalty max_new_tokens pass_at
        correct_from interval versions at_start at_end
        """,
    "record": "rollouts groups_per_step max_bytes max_steps",
    "checkpoints": "interval keep save_hf_checkpoint strategy verify on_damage notice",
    "checkpoints.keep_best": "set metric mode",
    "tracking": "project",
    "alarms": """
        stalled_step equal_rewards truncated_answers empty_answers repeated_answers
        entropy_collapse reward_parts_apart infra_failed_rate transfer_rate
        """,
    "notify": "events deadline",
}
DATA = expand_paths(_DATA)
"""Settings that name nothing outside of the configuration: numbers, choices, and plain text."""

_SOURCE = "evaluation"
"""Option of a task that names a source of questions."""
_LONGEST_LIST = 10
"""Settings that an error names; the log may hold any number of sets of questions."""


class OwnConfig(Struct, frozen=True, kw_only=True):
    """Configuration that the explorer's own side gives, and its file."""

    file: Path
    config: TrainConfig


class Host(Struct, frozen=True, kw_only=True):
    """Names that an explorer accepts from the log without a configuration of its own."""

    checkpoint_root: Path
    installed: Mapping[str, frozenset[str]]
    """Names of installed code, by the path of the setting."""

    @classmethod
    def local(cls, checkpoint_root: Path) -> Self:
        """Return the names of this host: built-in ones, and entry points."""
        return cls(
            checkpoint_root=checkpoint_root,
            installed={
                "task.name": _get_installed(TASKS, TASK_GROUP),
                "explorer.engine": _get_installed(ENGINES, ENGINE_GROUP),
            },
        )


class SettingsRefused(TrinityError):
    """Base of refusals of a configuration in the log.

    Attributes:
        run_id: The run.
        settings: Paths of the settings that are refused, in the order of the configuration.
    """

    run_id: str
    settings: tuple[str, ...]


class SettingsUntrusted(SettingsRefused):
    """Raised if the log names code, a path, a URL or an environment variable, and no file does.

    Attributes:
        kinds: What each of the settings names.
    """

    kinds: tuple[str, ...]
    text = (
        "the log of run {run_id} sets {_listed}, which an explorer takes from its own "
        "configuration alone: start it with --config FILE, the file that the run is trained with"
    )

    @property
    def _listed(self) -> str:
        pairs = zip(self.settings, self.kinds, strict=True)
        return _format_list([f"{path} ({kind})" for path, kind in pairs])


class SettingsDiffer(SettingsRefused):
    """Raised if the explorer's own file and the log name other code, paths, URLs or variables.

    Attributes:
        file: The explorer's file.
    """

    file: Path
    text = (
        "{file} and the log of run {run_id} differ in {_listed}: start the explorer with the "
        "configuration that the run is trained with, and with the same --set"
    )

    @property
    def _listed(self) -> str:
        return _format_list(self.settings)


def merge(
    run_id: str,
    logged: TrainConfig,
    own: OwnConfig | None,
    host: Host,
    *,
    data: frozenset[str] = DATA,
) -> TrainConfig:
    """Return the configuration of an explorer: data of the log, and references of its own side.

    No file is read and nothing is imported; of a path in the log, only links are resolved.

    Args:
        run_id: The run, for messages.
        logged: Configuration in the event that opened the run.
        own: Configuration of the explorer's own side, if it gives one.
        host: Names that are accepted without one.
        data: Settings that are taken from the log; by default those of the table.

    Raises:
        SettingsUntrusted: There is no configuration of the explorer's own, and the log names
            something that is not accepted.
        SettingsDiffer: Both name something, and not the same.
    """
    settings = [*get_settings(to_values(logged))]
    if own is None:
        untrusted = {
            setting.name: REFERENCES[setting.path]
            for setting in settings
            if _is_used(setting.path) and not _is_accepted(setting, host)
        }
        if untrusted:
            kinds = tuple(reference.kind for reference in untrusted.values())
            raise SettingsUntrusted(run_id, tuple(untrusted), kinds)
    elif different := tuple(_find_differences(settings, own)):
        raise SettingsDiffer(run_id, different, own.file)
    values = to_values(TrainConfig() if own is None else own.config)
    logged_values = to_values(logged)
    for collection in collections():
        default = to_values(sections()[f"{collection}.{NAME}"]())
        *parents, last = keys = collection.split(".")
        section = descend(values, parents)
        # The log says which sets there are, and their data. A reference of a set that the file
        # lacks has its default.
        section[last] = {
            name: section[last].get(name, dict(default)) for name in descend(logged_values, keys)
        }
    for setting in settings:
        # Without a file, the references that are left have been accepted above (4).
        if setting.path in data or (own is None and _is_used(setting.path)):
            *parents, last = setting.keys
            descend(values, parents)[last] = setting.value
    return msgspec.convert(values, TrainConfig)


def _is_used(path: str) -> bool:
    """Return True for a reference that an explorer uses."""
    reference = REFERENCES.get(path)
    return reference is not None and reference.role == "explorer"


def _is_accepted(setting: Setting, host: Host) -> bool:
    """Return True for a value that an explorer without a file accepts from the log."""
    value = setting.value
    # The default is this installation's own, whatever the log means by it.
    if value == fields()[setting.path].default:
        return True
    match REFERENCES[setting.path].accepted:
        case "installed":
            return value in host.installed[setting.path]
        case "checkpoints":
            return _is_below(Path(value), host.checkpoint_root)
    return False


def _is_below(path: Path, root: Path) -> bool:
    """Return True for an absolute path below a folder, with all links followed."""
    try:
        target, root = path.resolve(), root.resolve()
    except (OSError, ValueError, RuntimeError):  # a null byte, or a circle of links
        return False
    return path.is_absolute() and target != root and target.is_relative_to(root)


def _find_differences(settings: Iterable[Setting], own: OwnConfig) -> Iterator[str]:
    """Yield the names of the references that differ in the log and in a file."""
    folder = own.file.parent.resolve()
    logged_settings = {setting.keys: setting for setting in settings}
    own_settings = {setting.keys: setting for setting in get_settings(to_values(own.config))}
    for keys, setting in (logged_settings | own_settings).items():
        if _is_used(setting.path):
            # A set of questions that one side does not have names none.
            default = setting._replace(value=fields()[setting.path].default)
            logged = logged_settings.get(keys, default).value
            if not _is_same(setting.path, logged, own_settings.get(keys, default).value, folder):
                yield setting.name


def _is_same(path: str, logged: Any, own: Any, folder: Path) -> bool:
    """Return True if two values of a setting name the same thing, each on its own host."""
    if path == "task.options":
        logged, own = dict(logged), dict(own)
        # The one option whose path is made absolute when a file is read.
        sources = logged.pop(_SOURCE, None), own.pop(_SOURCE, None)
        return bool(logged == own) and _is_same("", *sources, folder)
    if logged == own or not (isinstance(logged, str) and isinstance(own, str)):
        return bool(logged == own)
    if path == "model.path":
        return _is_same_path(Path(logged), Path(own), folder)
    logged_place, _, logged_attribute = logged.partition(":")  # /folder/file.py:attribute
    place, _, attribute = own.partition(":")
    return logged_attribute == attribute and _is_same_path(Path(logged_place), Path(place), folder)


def _is_same_path(logged: Path, own: Path, folder: Path) -> bool:
    """Return True if two paths end alike: as below the file's folder, else in the last name.

    Relative paths become absolute when a file is read, and hosts may keep the file, or a model, in
    different folders.
    """
    if not own.is_absolute():
        return False  # a module, or a scheme such as datasets
    below = own.relative_to(folder).parts if own.is_relative_to(folder) else ()
    compared = below or own.parts[-1:]
    return logged.parts[-len(compared) :] == compared


def _get_installed(built_in: Iterable[str], group: str) -> frozenset[str]:
    # Names alone: nothing is imported before the choice is made (6).
    return frozenset((*built_in, *(entry.name for entry in entry_points(group=group))))


def _format_list(names: Sequence[str]) -> str:
    more = len(names) - _LONGEST_LIST
    return format_list([*names[:_LONGEST_LIST], f"{more} more"] if more > 0 else names)
