"""Rules between the algorithm and the trainer that runs it."""

from __future__ import annotations

from ...algorithms.rules import RULES as ALGORITHM_RULES
from ...rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    SettingCondition,
    Values,
    is_any,
    is_at_least,
    is_set,
)

_COMPARING = ("grpo", "rloo", "reinforce++-baseline")
"""Advantages that compare the samples of a prompt."""
_PATH = "algorithm.teacher.path"
_ASKS_TEACHER = SettingCondition(
    ("algorithm.advantage", "algorithm.loss"),
    lambda values: bool(values["algorithm"].needs_teacher),
    "{algorithm.advantage} is teacher or {algorithm.loss} is divergence",
    "set {algorithm.advantage} teacher, or {algorithm.loss} divergence",
)
_HAS_SEVERAL_SAMPLES = is_at_least("rollouts.samples_per_prompt", 2)


def _find_no_step_of_the_policy(values: Values) -> Contradictions:
    warmup = "algorithm.critic.critic_warmup_steps"
    if values["algorithm.critic.use"] and values[warmup] >= values["steps"]:
        yield (
            (warmup, "steps"),
            f"{{{warmup}}} is {values[warmup]}, and of {values['steps']} {{steps}} none would "
            "train the policy: choose fewer",
        )


def _find_more_batches_than_rows(values: Values) -> Contradictions:
    parts, rollouts = values["algorithm.mini_batches"], values["rollouts"]
    rows = rollouts.prompts_per_step * rollouts.samples_per_prompt
    if parts > rows:
        yield (
            ("algorithm.mini_batches", "rollouts.prompts_per_step", "rollouts.samples_per_prompt"),
            f"{{algorithm.mini_batches}} is {parts}, and a step has {rows} answers: choose at most "
            f"{rows}",
        )


RULES: tuple[Rule, ...] = (
    Requires(
        _ASKS_TEACHER,
        is_set(_PATH),
        "{=algorithm.advantage} with {=algorithm.loss} compares the policy with a teacher",
        f"set {{{_PATH}}} to its Hugging Face folder",
    ),
    OnlyWhen(_PATH, _ASKS_TEACHER, "nothing asks a teacher"),
    Requires(
        is_set("rewards.reward_model"),
        ~is_any("algorithm.filters.zero_variance", "resample"),
        "{algorithm.filters.zero_variance} resample drops groups by the rewards of the task, "
        "before the model of {rewards.reward_model} has scored them",
        "set it mask",
    ),
    Computed(_find_no_step_of_the_policy),
    Computed(_find_more_batches_than_rows),
    Requires(
        is_any("algorithm.advantage", *_COMPARING),
        _HAS_SEVERAL_SAMPLES,
        "{=algorithm.advantage} compares the samples of a prompt, and there is one",
    ),
    Requires(
        ~is_any("algorithm.filters.zero_variance", "keep"),
        _HAS_SEVERAL_SAMPLES,
        "{=algorithm.filters.zero_variance} leaves out every group of one sample",
        "set {rollouts.samples_per_prompt} 2 or more, or {algorithm.filters.zero_variance} keep",
    ),
    Requires(
        is_any("algorithm.loss", "divergence"),
        ~is_any("trainer.fused_loss", True),
        "{algorithm.loss} divergence compares whole logits, which {trainer.fused_loss} never has",
    ),
    Requires(
        is_any("algorithm.loss", "divergence"),
        ~is_any("trainer.engine", "megatron"),
        "{trainer.engine} megatron splits the vocabulary, and {algorithm.loss} divergence compares "
        "all of it",
        "set {algorithm.advantage} teacher with another {algorithm.loss}, or {trainer.engine} fsdp",
    ),
    Requires(
        is_any("algorithm.loss", "divergence"),
        ~is_any("trainer.engine", "verl", "verl-megatron"),
        "{algorithm.loss} divergence needs logits, which veRL's engine does not give",
        "set {trainer.engine} fsdp",
    ),
    *ALGORITHM_RULES,
)
