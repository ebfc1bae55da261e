"""Each setting takes effect in every run, or is refused where it has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

from trinity_workers.algorithms.built_in import ADVANTAGES, POLICY_LOSSES
from trinity_workers.config.fields import expand_paths, fields
from trinity_workers.config.files import read_config
from trinity_workers.config.rules.table import (
    RULES,
    SET_RULES,
    find_conditions,
    find_contradictions,
    make_values,
)
from trinity_workers.config.setting_values import to_values
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.rules import NAME, OnlyWhen, Requires, SettingCondition

ALWAYS = expand_paths(
    {
        "": "name steps seed",
        "model": "path dtype",
        "model.lora": "rank",
        "task": "environment",
        "rewards": "function on_error service judge code_tests reward_model",
        "record": "rollouts",
        "trainer": """
            engine ranks cpus gpus recompute learning_rate warmup_steps schedule micro_batch_rows
            micro_batch_tokens profile_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
            max_grad_norm max_skipped_steps
            """,
        "algorithm": """
            preset advantage scale loss normalisation epochs mini_batches entropy_coefficient
            """,
        "algorithm.kl": "coefficient",
        "algorithm.importance_sampling": "ratio_to",
        "algorithm.filters": "zero_variance",
        "algorithm.overlong": "mask buffer",
        "algorithm.critic": "use",
        "explorer": "deterministic groups_per_claim",
        "rollouts": """
            prompts_per_step samples_per_prompt max_new_tokens temperature top_p top_k min_p
            repetition_penalty stop max_prompt_tokens chat_template_kwargs window max_bytes
            claim_lease request_deadline max_attempts max_consecutive_failures outage_timeout
            pause_mode
            """,
        "sync": "style interval max_staleness method timeout",
        f"task.sets.{NAME}": "questions",
        f"evaluation.sets.{NAME}": """
            questions count samples temperature repetition_penalty max_new_tokens pass_at
            correct_from interval versions at_start at_end
            """,
        # A resume without checkpoints of its own loads those of the earlier epoch.
        "checkpoints": "interval root verify on_damage",
        "tracking": "trackers",
        "alarms": """
            stalled_step equal_rewards truncated_answers empty_answers repeated_answers
            entropy_collapse reward_parts_apart infra_failed_rate
            """,
        "notify": "webhook command",
    }
)
"""Settings that every run reads. Those that it refuses by another rule are among them."""
CONDITIONAL = [
    (rule, path)
    for rule in (*RULES, *SET_RULES)
    if isinstance(rule, OnlyWhen)
    for path in rule.paths
]
SET = "a"

COLOCATED = "trainer: {colocated: true}\nsync: {max_staleness: 0, VALUE}"
IGNORED = {
    "trainer.colocated": [
        *(
            (
                f"explorer.{value.partition(':')[0]}",
                f"{COLOCATED.replace(', VALUE', '')}\nexplorer: {{{value}}}",
            )
            for value in (
                "engine: 'x:y'",
                "count: 2",
                "proof: served",
                "engine_options: {a: 1}",
                "cpus: 2",
                "gpus: 1.0",
            )
        ),
        *(
            (f"sync.{value.partition(':')[0]}", COLOCATED.replace("VALUE", value))
            for value in (
                *("transport: shm", "publish: full", "full_every: 2"),
                "dtype: bfloat16",
            )
        ),
    ],
    "sync.method: nccl": [
        ("sync.publish", "sync: {method: nccl, publish: full}"),
    ],
    "checkpoints.interval: 0": [
        ("checkpoints.keep", "checkpoints: {interval: 0, keep: 3}"),
        ("checkpoints.strategy", "checkpoints: {interval: 0, strategy: single_node}"),
        ("checkpoints.mirror", "checkpoints: {interval: 0, mirror: 's3://bucket/path'}"),
        (
            "rollouts.keep_answers",
            "{checkpoints: {interval: 0}, rollouts: {keep_answers: checkpoint}}",
        ),
    ],
    "no critic": [
        ("algorithm.critic.clip", "algorithm: {critic: {clip: 0.5}}"),
        ("algorithm.critic.learning_rate", "algorithm: {critic: {learning_rate: 1.0e-3}}"),
        ("algorithm.critic.critic_warmup_steps", "algorithm: {critic: {critic_warmup_steps: 5}}"),
        (
            "trainer.critic_offload.param_offload",
            "trainer: {critic_offload: {param_offload: true}}",
        ),
    ],
    "no reference": [
        (
            "trainer.reference_offload.param_offload",
            "trainer: {reference_offload: {param_offload: true}}",
        ),
        ("algorithm.kl.estimator", "algorithm: {kl: {estimator: k1}}"),
        ("algorithm.kl.where", "algorithm: {kl: {where: reward}}"),
    ],
    "no reward model or judge": [
        ("rewards.reward_model_weight", "rewards: {reward_model_weight: 2.0}"),
        ("rewards.judge_model", "rewards: {judge_model: m}"),
        ("rewards.best_grade", "rewards: {best_grade: 5}"),
        ("rewards.attempts", "rewards: {attempts: 5}"),
        ("rewards.code_files", "rewards: {code_files: 64}"),
        ("rewards.token_variable", "rewards: {token_variable: TOKEN}"),
    ],
    "other advantages than GAE": [
        ("algorithm.gamma", "algorithm: {gamma: 0.9}"),
        ("algorithm.gae_lambda", "algorithm: {gae_lambda: 0.9}"),
    ],
    "losses without clipping": [
        ("algorithm.clip_low", "algorithm: {loss: reinforce, clip_low: 0.1}"),
        ("algorithm.clip_high", "algorithm: {loss: reinforce, clip_high: 0.1}"),
        ("algorithm.dual_clip", "algorithm: {loss: reinforce, dual_clip: 3.0}"),
    ],
    "built-in losses and tasks": [
        ("algorithm.options", "algorithm: {options: {strength: 1}}"),
        ("task.options", "task: {options: {chat: true}}"),
        ("task.options", "{model: {path: m}, task: {questions: q.jsonl, options: {chatt: true}}}"),
    ],
    "importance sampling off": [
        ("algorithm.importance_sampling.cap", "algorithm: {importance_sampling: {cap: 3.0}}"),
        (
            "algorithm.importance_sampling.mask_low",
            "algorithm: {importance_sampling: {mask_low: 0.1}}",
        ),
        (
            "algorithm.importance_sampling.mask_high",
            "algorithm: {importance_sampling: {mask_high: 3}}",
        ),
    ],
    "no overlong buffer": [
        ("algorithm.overlong.penalty", "algorithm: {overlong: {penalty: 2.0}}"),
        ("algorithm.overlong.limit", "algorithm: {overlong: {limit: 5}}"),
    ],
    "token mean": [
        ("algorithm.normalisation_length", "algorithm: {normalisation_length: 5}"),
        ("algorithm.deviation", "algorithm: {scale: none, deviation: sample}"),
    ],
    "teacher": [
        (
            "algorithm.teacher.mixture",
            "algorithm: {loss: divergence, advantage: none, teacher: {path: /t, mixture: 0.3}}",
        ),
        (
            "algorithm.teacher.divergence",
            "algorithm: {advantage: teacher, teacher: {path: /t, divergence: forward}}",
        ),
    ],
    "no environment, no questions": [
        ("task.environment_deadline", "task: {environment_deadline: 5}"),
        ("task.prompt", "task: {prompt: question}"),
        ("task.answer", "task: {answer: solution}"),
    ],
    "sets of questions": [
        ("task.questions", "task: {questions: q.jsonl, sets: {a: {questions: a.jsonl}}}"),
        ("task.name", "task: {name: sort-digits, sets: {a: {questions: a.jsonl}}}"),
        ("task.sets.a.weight", "task: {sets: {a: {questions: a.jsonl, weight: 2.0}}}"),
        (
            "task.sets.a.answer",
            "task: {sets: {a: {questions: 'reasoning-gym:x', answer: b}, b: {questions: 'm:x'}}}",
        ),
        ("task.sets.a.source", "task: {sets: {a: {questions: a.jsonl, source: {split: x}}}}"),
    ],
    "others": [
        ("explorer.engine_options", "explorer: {engine_options: {a: 1}}"),
        ("tracking.project", "tracking: {project: mine}"),
        ("rollouts.include_stop_str_in_output", "rollouts: {include_stop_str_in_output: true}"),
        (
            "evaluation.sets.a.min_p",
            "evaluation: {sets: {a: {samples: 1, temperature: 0, min_p: 0.1}}}",
        ),
        (
            "evaluation.sets.a.top_p",
            "evaluation: {sets: {a: {samples: 1, temperature: 0, top_p: 0.9}}}",
        ),
        ("sync.when_stale", "sync: {style: fixed, when_stale: drop}"),
        ("rollouts.order", "{sync: {style: fixed}, rollouts: {order: arrival}}"),
        ("trainer.virtual_pipeline", "trainer: {engine: megatron, virtual_pipeline: 2}"),
        ("model.lora.alpha", "model: {lora: {alpha: 8}}"),
        ("algorithm.filters.part", "algorithm: {filters: {part: right}}"),
        ("trainer.profile_ranks", "trainer: {profile_ranks: [0]}"),
    ],
}
"""Combinations that were tried on an earlier version, which accepted most of them in silence."""
COMBINATIONS = [
    pytest.param(setting, text, id=f"{where}-{setting}-{number}")
    for where, combinations in IGNORED.items()
    for number, (setting, text) in enumerate(combinations)
]


@pytest.mark.parametrize(("setting", "text"), COMBINATIONS)
def test_a_setting_without_effect_is_refused_with_the_reason_and_the_way_out(
    tmp_path, setting, text
):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    problems = read_config(path).problems
    about = [problem for problem in problems if str(problem).startswith(f"{path}: {setting} ")]
    assert len(about) == 1, problems
    assert about[0].settings[0] == setting
    assert ": " in about[0].sentence and "\n" not in about[0].sentence


def test_every_setting_takes_effect_in_every_run_or_has_a_condition():
    conditional = {path for _, path in CONDITIONAL}
    assert sorted(set(fields()) - ALWAYS - conditional) == [], (
        "enter these in ALWAYS if every run reads them, else give them an OnlyWhen in config/rules"
    )
    assert sorted(ALWAYS & conditional) == [], "they have an OnlyWhen: take them out of ALWAYS"
    assert sorted((ALWAYS | conditional) - set(fields())) == [], "these are no settings"
    assert all(find_conditions(path) for path in conditional)


def test_every_sentence_has_a_way_out():
    for rule in (*RULES, *SET_RULES):
        match rule:
            case OnlyWhen():
                assert rule.condition.advice, rule
            case Requires(way_out=None):
                assert rule.needed.advice and rule.condition.opposite_advice, rule


@pytest.mark.parametrize(("rule", "path"), CONDITIONAL, ids=lambda value: str(value)[:60])
def test_a_condition_decides_whether_the_setting_is_refused(rule, path):
    actual = path.replace(NAME, SET)
    default, *others = get_candidates(path)
    value = next(value for value in others if value != default)
    unmet = make_config(find_assignment(rule.condition, met=False) | {path: value})
    refusals = {
        conflict.sentence
        for conflict in find_contradictions(unmet, str)
        if conflict.paths[0] == actual
    }
    [conflict] = rule.find(make_values(unmet, str, SET))
    assert conflict.sentence.startswith(f"{actual} is ") and ": " in conflict.sentence
    assert refusals, "another rule may have refused it before"
    met = make_config(find_assignment(rule.condition, met=True) | {path: value})
    assert list(rule.find(make_values(met, str, SET))) == []


def find_assignment(condition: SettingCondition, *, met: bool) -> dict[str, Any]:
    """Return values of the condition's settings with which it is met, or not."""
    for values in product(*(get_candidates(path) for path in condition.paths)):
        assignment = dict(zip(condition.paths, values, strict=True))
        if condition.is_met(make_values(make_config(assignment), str, SET)) == met:
            return assignment
    raise AssertionError(f"nothing {'meets' if met else 'fails'} {condition.text}")


def get_candidates(path: str) -> list[Any]:
    """Return values of a setting, its default first."""
    if path == "evaluation.sets":
        return [{SET: {}}, {}]
    if path == "task.sets":
        return [{}, {SET: {}, "b": {}}]
    field = fields()[path]
    candidates: list[Any] = [field.default]
    candidates += field.choices or list(_get_others(path, field.kind))
    return [msgspec.json.decode(msgspec.json.encode(value)) for value in candidates]


def _get_others(path: str, kind: types.Type) -> Iterator[Any]:
    match kind:
        case types.BoolType():
            yield from (True, False)
        case types.IntType():
            yield from (64, 2)
            yield from (0,) if not kind.ge else ()
        case types.FloatType():
            yield from (0.75, 2.0) if kind.gt != 1 else (3.0,)
            yield from (0.0,) if kind.ge == 0 else ()
        case types.VarTupleType():
            match kind.item_type:
                case types.IntType():
                    yield [1]
                case types.LiteralType(values=values):
                    yield [values[0]]
                case _:
                    yield ["jsonl"]
        case types.DictType():
            yield {"a": 1}
        case _:
            names = {"algorithm.advantage": ADVANTAGES, "algorithm.loss": POLICY_LOSSES}
            names |= {f"task.sets.{NAME}.questions": ["datasets:x"]}
            yield from names.get(path, ())
            yield "./own.py:f"


def make_config(assignment: dict[str, Any]) -> TrainConfig:
    """Return the defaults with other values, of which a set has those of its sections."""
    values = to_values(TrainConfig())
    values["evaluation"]["sets"] = {SET: {}}
    for path, value in sorted(assignment.items()):
        *keys, last = path.replace(NAME, SET).split(".")
        section = values
        for key in keys:
            section = section.setdefault(key, {})
        section[last] = value
    return msgspec.convert(values, TrainConfig)
