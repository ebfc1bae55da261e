"""A configuration file is read whole, and each mistake in it is one sentence."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.support.errors import assert_attributes, raises
from trinity_workers.algorithms.settings import OverlongConfig
from trinity_workers.config.cli_options import OPTIONS, SHIPPED_FILE, overlaid
from trinity_workers.config.errors import (
    BadSettings,
    BaseRefused,
    CommandRefused,
    ConfigUnreadable,
    NoSection,
    PresetRefused,
    SettingsContradict,
    SeveralMistakes,
    UnknownSetting,
    WrongValue,
)
from trinity_workers.config.fields import fields, sections
from trinity_workers.config.files import read_config, to_yaml, typed_setting, write_copy
from trinity_workers.config.other_names import (
    ALIASES,
    OTHER_NAMES,
    WITHOUT_EQUIVALENT,
    SettingNamedTwice,
    format_hint,
)
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.documents import schema_files

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "train").glob("*.yaml"))
BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}

UNKNOWN = [
    ("step: 3", "step", "steps"),
    ("sync: {intervall: 3}", "sync.intervall", "sync.interval"),
    ("samples_per_prompt: 3", "samples_per_prompt", "rollouts.samples_per_prompt"),
    ("algorithm: {kl: {coeficient: 1}}", "algorithm.kl.coeficient", "algorithm.kl.coefficient"),
    ("kl: {coefficient: 1}", "kl", "algorithm.kl"),
]
"""Text, name of the setting, and the nearest one."""
WRONG_VALUES = [
    ("steps: -1", "steps", "an integer of at least 0"),
    ("steps: many", "steps", "an integer of at least 0"),
    ("steps: true", "steps", "an integer of at least 0"),
    ("steps: null", "steps", "an integer of at least 0"),
    ("seed: -1", "seed", "an integer from 0 to 4294967295"),
    ("algorithm: {clip_high: 0}", "algorithm.clip_high", "a number above 0"),
    (
        "algorithm: {overlong: {buffer: 1}}",
        "algorithm.overlong.buffer",
        "a number from 0 to below 1",
    ),
    ("algorithm: {kl: {estimator: k4}}", "algorithm.kl.estimator", "one of k1, k2, k3"),
    (
        "trainer: {micro_batch_tokens: 0}",
        "trainer.micro_batch_tokens",
        "an integer of at least 1 or null",
    ),
    ("trainer: {schedule: step}", "trainer.schedule", "one of constant, linear, cosine"),
    ("sync: {timeout: .inf}", "sync.timeout", "a number above 0"),
    ("explorer: {proof: both}", "explorer.proof", "one of names, served, probes, all or null"),
    ("sync: {transport: nccl}", "sync.transport", "one of auto, shm, ray, redis, cuda-ipc"),
    ("sync: {method: disk}", "sync.method", "one of memory, nccl, checkpoint"),
    ("sync: {method: [nccl]}", "sync.method", "one of memory, nccl, checkpoint"),
    (
        "checkpoints: {strategy: none}",
        "checkpoints.strategy",
        "one of unrestricted, single_thread, single_process, single_node",
    ),
    ("task: {options: 3}", "task.options", "a mapping of names to values"),
    (
        "trainer: {virtual_pipeline: 1}",
        "trainer.virtual_pipeline",
        "an integer of at least 2 or null",
    ),
    ("model: {lora: {rank: 8, dropout: 1.0}}", "model.lora.dropout", "a number from 0 to below 1"),
    (
        "checkpoints: {save_hf_checkpoint: first}",
        "checkpoints.save_hf_checkpoint",
        "one of never, last, always",
    ),
    (
        "trainer: {profile_steps: 2}",
        "trainer.profile_steps",
        "a list, each an integer of at least 1",
    ),
    (
        "trainer: {profile_steps: [0]}",
        "trainer.profile_steps",
        "a list, each an integer of at least 1",
    ),
    ("explorer: {dtype: float8}", "explorer.dtype", "one of float32, bfloat16 or null"),
    (
        "sync: {style: random}",
        "sync.style",
        "one of fixed, trainer_driven, explorer_driven, fully_async",
    ),
    (
        "rollouts: {pause_mode: restart}",
        "rollouts.pause_mode",
        "one of wait, keep, retract, abort",
    ),
]
"""Text, name of the setting, and what it takes."""
CONTRADICTIONS: list[tuple[str, dict[str, object]]] = [
    ("algorithm: {loss: pppo}", {"algorithm.loss": "pppo"}),
    (
        "algorithm: {loss: gspo}",
        {"algorithm.loss": "gspo", "algorithm.normalisation": "token-mean"},
    ),
    (
        "rollouts: {samples_per_prompt: 1}",
        {"algorithm.advantage": "grpo", "rollouts.samples_per_prompt": 1},
    ),
    (
        "{rollouts: {samples_per_prompt: 1}, algorithm: {advantage: reinforce++, "
        "filters: {zero_variance: mask}}}",
        {"algorithm.filters.zero_variance": "mask", "rollouts.samples_per_prompt": 1},
    ),
    (
        "{trainer: {engine: megatron}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        {"algorithm.loss": "divergence", "trainer.engine": "megatron"},
    ),
    ("algorithm: {advantage: gae}", {"algorithm.advantage": "gae", "algorithm.critic.use": False}),
    (
        "algorithm: {preset: distillation}",
        {"algorithm.advantage": "teacher", "algorithm.loss": "ppo", "algorithm.teacher.path": None},
    ),
    (
        "algorithm: {teacher: {path: /t}}",
        {"algorithm.teacher.path": "/t", "algorithm.advantage": "grpo", "algorithm.loss": "ppo"},
    ),
    (
        "{steps: 3, algorithm: {preset: ppo, critic: {critic_warmup_steps: 3}}}",
        {"algorithm.critic.critic_warmup_steps": 3, "steps": 3},
    ),
    (
        "{rollouts: {prompts_per_step: 2, samples_per_prompt: 2}, algorithm: {mini_batches: 5}}",
        {
            "algorithm.mini_batches": 5,
            "rollouts.prompts_per_step": 2,
            "rollouts.samples_per_prompt": 2,
        },
    ),
    (
        "trainer: {micro_batch_rows: 4, micro_batch_tokens: 400}",
        {"trainer.micro_batch_rows": 4, "trainer.micro_batch_tokens": 400},
    ),
    (
        "rollouts: {max_bytes: 100000}",
        {
            "rollouts.max_bytes": 100_000,
            "rollouts.prompts_per_step": 16,
            "rollouts.max_new_tokens": 7,
        },
    ),
    (
        "{trainer: {micro_batch_tokens: 7}, rollouts: {max_new_tokens: 7}}",
        {"trainer.micro_batch_tokens": 7, "rollouts.max_new_tokens": 7},
    ),
    (
        "{trainer: {fused_loss: true}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        {"algorithm.loss": "divergence", "trainer.fused_loss": True},
    ),
    (
        "trainer: {engine: verl, tensor_parallel: 2}",
        {"trainer.tensor_parallel": 2, "trainer.engine": "verl"},
    ),
    (
        "trainer: {tensor_parallel: 2, ranks: 3}",
        {"trainer.tensor_parallel": 2, "trainer.ranks": 3},
    ),
    *(
        (
            f"{{trainer: {{tensor_parallel: 2, ranks: 2, {trainer}}}, {other}}}",
            {path: value, "trainer.tensor_parallel": 2, "trainer.engine": "fsdp"},
        )
        for trainer, other, path, value in (
            ("context_parallel: 2", "seed: 0", "trainer.context_parallel", 2),
            ("cpu_offload: true", "seed: 0", "trainer.cpu_offload", True),
            ("cpus: 1", "model: {lora: {rank: 4}}", "model.lora.rank", 4),
        )
    ),
    (
        "trainer: {engine: megatron, tensor_parallel: 3}",
        {
            "trainer.engine": "megatron",
            "trainer.tensor_parallel": 3,
            "trainer.pipeline_parallel": 1,
            "trainer.ranks": None,
        },
    ),
    (
        "trainer: {expert_parallel: 2, virtual_pipeline: 2}",
        {"trainer.virtual_pipeline": 2, "trainer.expert_parallel": 2, "trainer.engine": "fsdp"},
    ),
    (
        "trainer: {distributed_optimizer: true}",
        {"trainer.distributed_optimizer": True, "trainer.engine": "fsdp"},
    ),
    (
        "trainer: {engine: verl, context_parallel: 2}",
        {"trainer.context_parallel": 2, "trainer.engine": "verl"},
    ),
    (
        "trainer: {context_parallel: 2, ranks: 3}",
        {"trainer.context_parallel": 2, "trainer.ranks": 3},
    ),
    (
        "trainer: {context_parallel: 2, packing: true}",
        {"trainer.context_parallel": 2, "trainer.packing": True},
    ),
    (
        "trainer: {sequence_parallel: true}",
        {"trainer.sequence_parallel": True, "trainer.engine": "fsdp"},
    ),
    (
        "trainer: {engine: megatron, sequence_parallel: true, context_parallel: 2}",
        {
            "trainer.engine": "megatron",
            "trainer.tensor_parallel": None,
            "trainer.pipeline_parallel": 1,
            "trainer.context_parallel": 2,
            "trainer.ranks": None,
            "trainer.sequence_parallel": True,
        },
    ),
    (
        "trainer: {engine: megatron, pipeline_parallel: 2, context_parallel: 2}",
        {
            "trainer.engine": "megatron",
            "trainer.tensor_parallel": None,
            "trainer.pipeline_parallel": 2,
            "trainer.context_parallel": 2,
            "trainer.ranks": None,
        },
    ),
    (
        "trainer: {engine: megatron, virtual_pipeline: 2}",
        {"trainer.virtual_pipeline": 2, "trainer.pipeline_parallel": 1},
    ),
    (
        "trainer: {engine: megatron, expert_parallel: 2, tensor_parallel: 2, ranks: 4}",
        {
            "trainer.expert_parallel": 2,
            "trainer.tensor_parallel": 2,
            "trainer.sequence_parallel": False,
        },
    ),
    (
        "trainer: {engine: megatron, expert_parallel: 2, pipeline_parallel: 2}",
        {
            "trainer.engine": "megatron",
            "trainer.tensor_parallel": None,
            "trainer.pipeline_parallel": 2,
            "trainer.ranks": None,
            "trainer.expert_parallel": 2,
        },
    ),
    (
        "{trainer: {cpu_offload: true, critic_offload: {param_offload: true}}, "
        "algorithm: {preset: ppo}}",
        {"trainer.critic_offload.param_offload": True, "trainer.cpu_offload": True},
    ),
    (
        "model: {lora: {rank: 8}}\ntrainer: {engine: megatron}",
        {"model.lora.rank": 8, "trainer.engine": "megatron"},
    ),
    ("model: {lora: {alpha: 8}}", {"model.lora.alpha": 8.0, "model.lora.rank": 0}),
    (
        "model: {lora: {rank: 8, target_modules: [all-linear, q_proj]}}",
        {"model.lora.target_modules": ("all-linear", "q_proj")},
    ),
    ("model: {lora: {rank: 8, target_modules: []}}", {"model.lora.target_modules": ()}),
    (
        "trainer: {engine: megatron, packing: true}",
        {"trainer.packing": True, "trainer.engine": "megatron"},
    ),
    ("trainer: {engine: verl, packing: true}", {"trainer.packing": True, "trainer.engine": "verl"}),
    (
        "trainer: {engine: verl, policy_offload: {param_offload: true}}",
        {"trainer.policy_offload.param_offload": True, "trainer.engine": "verl"},
    ),
    (
        "trainer: {engine: verl, schedule: linear}",
        {"trainer.engine": "verl", "trainer.schedule": "linear"},
    ),
    (
        "{trainer: {engine: verl}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        {"algorithm.loss": "divergence", "trainer.engine": "verl"},
    ),
    (
        "{trainer: {engine: verl-megatron}, model: {dtype: float32, path: /m}}",
        {"trainer.engine": "verl-megatron", "model.dtype": "float32"},
    ),
    *(
        (
            f"{{trainer: {{engine: verl-megatron, {name}: {text}}}, "
            "model: {dtype: bfloat16, path: /m}}",
            {f"trainer.{name}": value, "trainer.engine": "verl-megatron"},
        )
        for name, text, value in (
            ("virtual_pipeline", "2", 2),
            ("expert_parallel", "2", 2),
            ("distributed_optimizer", "true", True),
            ("fused_loss", "true", True),
            ("packing", "true", True),
            ("gpus", "0", 0.0),
        )
    ),
    (
        "{trainer: {engine: verl-megatron, ranks: 3, tensor_parallel: 2}, "
        "model: {dtype: bfloat16, path: /m}}",
        {
            "trainer.engine": "verl-megatron",
            "trainer.tensor_parallel": 2,
            "trainer.pipeline_parallel": 1,
            "trainer.ranks": 3,
        },
    ),
    (
        "trainer: {engine: megatron, cpu_offload: true}",
        {"trainer.cpu_offload": True, "trainer.engine": "megatron"},
    ),
    (
        "{model: {dtype: bfloat16}, sync: {dtype: float32}}",
        {"model.dtype": "bfloat16", "sync.dtype": "float32"},
    ),
    (
        "{rollouts: {keep_answers: checkpoint}, checkpoints: {interval: 0}}",
        {"rollouts.keep_answers": "checkpoint", "checkpoints.interval": 0},
    ),
    (
        "checkpoints: {save_hf_checkpoint: last, interval: 0}",
        {"checkpoints.save_hf_checkpoint": "last", "checkpoints.interval": 0},
    ),
    ("{steps: 3, trainer: {profile_steps: [2, 4]}}", {"trainer.profile_steps": (2, 4), "steps": 3}),
    (
        "trainer: {profile_steps: [1], profile_ranks: [2]}",
        {"trainer.profile_ranks": (2,), "trainer.ranks": None},
    ),
    ("trainer: {profile_ranks: [1]}", {"trainer.profile_ranks": (1,), "trainer.profile_steps": ()}),
    *(
        (
            f"explorer: {{engine: vllm-server, count: 2, engine_options: {text}}}",
            {
                "explorer.engine_options": value,
                "explorer.engine": "vllm-server",
                "explorer.count": 2,
            },
        )
        for text, value in (
            ("{}", {}),
            ("{url: 'http://10.0.0.1:80'}", {"url": "http://10.0.0.1:80"}),
            ("{url: ['http://[::1]:80']}", {"url": ["http://[::1]:80"]}),
        )
    ),
    *(
        (
            f"{{explorer: {{min_proof: proven{checks}}}, sync: {{method: {method}}}}}",
            {
                "explorer.min_proof": "proven",
                "explorer.proof": proof,
                "explorer.proof_layers": layers,
                "sync.method": method,
            },
        )
        for checks, method, proof, layers in (
            (", proof: names", "memory", "names", None),
            (", proof: probes", "memory", "probes", None),
            (", proof_layers: 2", "memory", None, 2),
            ("", "checkpoint", None, None),
        )
    ),
    ("sync: {offset: 1}", {"sync.offset": 1, "sync.style": "trainer_driven"}),
    (
        "sync: {interval: 4, max_staleness: 2}",
        {
            "sync.max_staleness": 2,
            "sync.interval": 4,
            "sync.offset": 0,
            "sync.style": "trainer_driven",
        },
    ),
    (
        "sync: {style: fixed, offset: 2, max_staleness: 1}",
        {"sync.max_staleness": 1, "sync.interval": 1, "sync.offset": 2, "sync.style": "fixed"},
    ),
    (
        "sync: {style: fully_async, method: nccl}",
        {"sync.style": "fully_async", "sync.method": "nccl"},
    ),
    (
        "sync: {method: nccl, publish: snapshot}",
        {"sync.publish": "snapshot", "sync.method": "nccl"},
    ),
    ("sync: {method: nccl, full_every: 2}", {"sync.full_every": 2, "sync.method": "nccl"}),
    ("sync: {method: nccl, transport: ray}", {"sync.transport": "ray", "sync.method": "nccl"}),
    (
        "{sync: {transport: cuda-ipc}, trainer: {ranks: 2}}",
        {"sync.transport": "cuda-ipc", "trainer.ranks": 2},
    ),
    (
        "{sync: {transport: cuda-ipc}, explorer: {device: cpu}}",
        {"sync.transport": "cuda-ipc", "explorer.device": "cpu"},
    ),
    (
        "sync: {transport: cuda-ipc, full_every: 2}",
        {"sync.transport": "cuda-ipc", "sync.full_every": 2},
    ),
    (
        "{sync: {transport: cuda-ipc}, explorer: {engine: vllm}}",
        {"explorer.engine": "vllm", "sync.transport": "cuda-ipc"},
    ),
    (
        "sync: {method: checkpoint, publish: shards}",
        {"sync.publish": "shards", "sync.method": "checkpoint"},
    ),
    (
        "sync: {method: checkpoint, full_every: 3}",
        {"sync.full_every": 3, "sync.method": "checkpoint"},
    ),
    (
        "sync: {method: checkpoint, transport: shm}",
        {"sync.transport": "shm", "sync.method": "checkpoint"},
    ),
    (
        "{sync: {method: checkpoint}, explorer: {proof: served}}",
        {"explorer.proof": "served", "explorer.engine": "huggingface", "sync.method": "checkpoint"},
    ),
    ("explorer: {gpus: 1.5, engine: 'x:y'}", {"explorer.gpus": 1.5}),
    ("explorer: {gpus: 2}", {"explorer.gpus": 2.0, "explorer.engine": "huggingface"}),
    ("explorer: {gpus: 0.5, device: cpu}", {"explorer.gpus": 0.5, "explorer.device": "cpu"}),
    ("explorer: {gpus: 0, device: cuda}", {"explorer.device": "cuda", "explorer.gpus": 0.0}),
    ("trainer: {gpus: 0.5}", {"trainer.gpus": 0.5, "trainer.ranks": None}),
    (
        "rollouts: {chat_template_kwargs: {tokenize: false}}",
        {"rollouts.chat_template_kwargs": {"tokenize": False}},
    ),
    (
        "{rollouts: {pause_mode: keep}, explorer: {deterministic: true}}",
        {"rollouts.pause_mode": "keep", "explorer.deterministic": True},
    ),
    (
        "{rollouts: {pause_mode: keep}, sync: {style: fixed}}",
        {"rollouts.pause_mode": "keep", "sync.style": "fixed"},
    ),
    (
        "{rollouts: {pause_mode: retract}, sync: {max_staleness: 0}}",
        {"rollouts.pause_mode": "retract", "sync.max_staleness": 0, "sync.interval": 1},
    ),
    (
        "{rollouts: {pause_mode: keep}, sync: {interval: 3, max_staleness: 2}}",
        {"rollouts.pause_mode": "keep", "sync.max_staleness": 2, "sync.interval": 3},
    ),
    ("trainer: {colocated: true}", {"trainer.colocated": True, "sync.max_staleness": None}),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0, method: nccl}}",
        {"trainer.colocated": True, "sync.method": "nccl"},
    ),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0}, explorer: {dtype: bfloat16}}",
        {"explorer.dtype": "bfloat16", "trainer.colocated": True},
    ),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0}, model: {path: x, lora: {rank: 4}}}",
        {"trainer.colocated": True, "model.lora.rank": 4},
    ),
    (
        "trainer: {engine: megatron, rollout_tensor_parallel: 1}",
        {"trainer.rollout_tensor_parallel": 1, "trainer.colocated": False},
    ),
    (
        "{trainer: {colocated: true, rollout_tensor_parallel: 1}, sync: {max_staleness: 0}}",
        {"trainer.rollout_tensor_parallel": 1, "trainer.engine": "fsdp"},
    ),
    (
        "{trainer: {colocated: true, engine: megatron, rollout_tensor_parallel: 3}, "
        "sync: {max_staleness: 0}}",
        {"trainer.rollout_tensor_parallel": 3, "trainer.ranks": None},
    ),
]
"""Text, and the settings that do not go together."""
MISTAKES: list[tuple[str, type[BadSettings], dict[str, object]]] = [
    ("rollouts: 5", NoSection, {"fault": "section", "name": "rollouts", "value": "5"}),
    (
        "algorithm: {kl: 0.1}",
        NoSection,
        {"fault": "section", "name": "algorithm.kl", "value": "0.1"},
    ),
    ("algorithm: {preset: dapoo}", PresetRefused, {"error": re.compile("preset 'dapoo'")}),
    *(
        (text, UnknownSetting, {"name": name, "nearest": nearest})
        for text, name, nearest in UNKNOWN
    ),
    *(
        (text, WrongValue, {"name": name, "allowed": allowed})
        for text, name, allowed in WRONG_VALUES
    ),
    *(
        (text, SettingsContradict, {"settings": tuple(values), "values": tuple(values.values())})
        for text, values in CONTRADICTIONS
    ),
]


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("given", "method"), [("online", "nccl"), ("offline", "checkpoint"), ("memory", "memory")]
)
def test_a_sync_method_may_have_its_name_in_trinity_rft(tmp_path, given, method):
    path = written(tmp_path, f"sync: {{method: {given}}}")
    assert read_config(path).checked().sync.method == method


@pytest.mark.parametrize(
    ("text", "error", "attributes"), MISTAKES, ids=[text for text, *_ in MISTAKES]
)
def test_a_mistake_is_one_sentence_that_names_file_and_field(tmp_path, text, error, attributes):
    path = written(tmp_path, text)
    with raises(error, **attributes) as refusal:
        read_config(path).checked()
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "text", "attributes"),
    [
        ("a.yaml", "steps: [", {"fault": "YAML", "line": 1}),
        ("a.yaml", "steps: 1\nsteps: 2", {"fault": "twice", "line": 1, "name": "steps"}),
        ("a.toml", "steps = ", {"fault": "TOML"}),
        ("a.json", "{}", {"fault": "ending"}),
    ],
)
def test_a_file_that_cannot_be_parsed_is_one_sentence(tmp_path, name, text, attributes):
    path = written(tmp_path, text, name)
    with raises(ConfigUnreadable, origin=str(path), **attributes):
        read_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    path, reason = tmp_path / "none.yaml", "No such file or directory"
    with raises(ConfigUnreadable, origin=str(path), fault="file", reason=reason):
        read_config(path)


def test_every_mistake_is_found_and_the_first_tells_how_many_others(tmp_path):
    reading = read_config(written(tmp_path, "step: 3\nseed: -1\ntrainer: {pipeline_parallel: 2}"))
    assert len(reading.problems) == 3
    with raises(SeveralMistakes, fault="first", mistakes=tuple(reading.problems)):
        reading.checked()


def test_yaml_and_toml_say_the_same(tmp_path):
    yaml = written(tmp_path, "steps: 5\ntrainer:\n  learning_rate: 5e-5\n  cpus: 1\n")
    toml = written(tmp_path, "steps = 5\n[trainer]\nlearning_rate = 5e-5\ncpus = 1\n", "run.toml")
    read = read_config(yaml).checked()
    assert read == read_config(toml).checked()
    assert (read.trainer.learning_rate, read.trainer.cpus) == (5e-5, 1.0)


def test_a_preset_lies_below_the_file_and_the_command_line(tmp_path):
    path = written(tmp_path, "algorithm: {preset: dapo, clip_high: 0.3, overlong: {penalty: 2}}")
    texts = ["algorithm.kl.coefficient=0.01", "algorithm.overlong.mask=true"]
    algorithm = read_config(path, [typed_setting(text) for text in texts]).checked().algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl.coefficient) == (0.2, 0.3, 0.01)
    assert algorithm.filters.zero_variance == "resample"
    overlong = OverlongConfig(mask=True, buffer=0.2, penalty=2.0)
    assert algorithm.overlong == overlong
    [chosen] = [typed_setting("algorithm.preset=dr_grpo")]
    assert read_config(written(tmp_path, ""), [chosen]).checked().algorithm.scale == "none"


def test_a_preset_is_read_again_from_the_copy_and_from_the_log(tmp_path):
    text = "algorithm: {preset: dr_grpo, scale: null, kl: {coefficient: 0.1}}"
    config = read_config(written(tmp_path, text)).checked()
    assert config.algorithm.scale is None
    write_copy(tmp_path / "run", config)
    assert read_config(tmp_path / "run" / "config.yaml").checked() == config
    assert TrainConfig.from_text(config.to_text()) == config


def test_an_algorithm_of_the_users_file_is_checked_before_the_run(tmp_path):
    (tmp_path / "own.py").write_text("def squared(tokens, config):\n    return None\n")
    path = written(tmp_path, "algorithm: {loss: './own.py:squared', options: {strength: 0.5}}")
    algorithm = read_config(path).checked().algorithm
    assert (algorithm.loss, algorithm.options) == (f"{tmp_path}/own.py:squared", {"strength": 0.5})
    [problem] = read_config(written(tmp_path, "algorithm: {loss: './own.py:cubed'}")).problems
    own = f"{tmp_path}/own.py:cubed"
    assert_attributes(problem, settings=("algorithm.loss",), values=(own,))


@pytest.mark.parametrize(
    ("text", "error", "attributes"),
    [
        (
            "{sets: {Hard: {}}}",
            NoSection,
            {"fault": "name", "name": "evaluation.sets", "value": '"Hard"'},
        ),
        (
            "{sets: {hard: 4}}",
            NoSection,
            {"fault": "section", "name": "evaluation.sets.hard", "value": "4"},
        ),
        (
            "{sets: {hard: {samples: 0}}}",
            WrongValue,
            {"name": "evaluation.sets.hard.samples", "allowed": "an integer of at least 1"},
        ),
        (
            "{sets: {hard: {sample: 4}}}",
            UnknownSetting,
            {"name": "evaluation.sets.hard.sample", "nearest": "evaluation.sets.NAME.samples"},
        ),
        (
            "{sets: {hard: {pass_at: 4}}}",
            WrongValue,
            {
                "name": "evaluation.sets.hard.pass_at",
                "allowed": "a list, each an integer of at least 1 or null",
            },
        ),
        (
            "{sets: {hard: {pass_at: [8]}}}",
            SettingsContradict,
            {
                "settings": ("evaluation.sets.hard.pass_at", "evaluation.sets.hard.samples"),
                "values": ((8,), 4),
            },
        ),
        (
            "{sets: {hard: {temperature: 0}}}",
            SettingsContradict,
            {
                "settings": ("evaluation.sets.hard.temperature", "evaluation.sets.hard.samples"),
                "values": (0.0, 4),
            },
        ),
        (
            "{sets: {hard: {versions: [900]}}}",
            SettingsContradict,
            {"settings": ("evaluation.sets.hard.versions", "steps"), "values": ((900,), 300)},
        ),
        (
            "{sets: {a: {at_start: false, at_end: false}}}",
            SettingsContradict,
            {
                "settings": ("evaluation.sets.a.at_end", "evaluation.sets.a.at_start"),
                "values": (False, False),
            },
        ),
        ("{timeout: 0}", WrongValue, {"name": "evaluation.timeout", "allowed": "a number above 0"}),
        (
            "{sets: {a: {interval: 5}}}\nsync: {method: nccl}",
            SettingsContradict,
            {"settings": ("evaluation.sets.a.interval", "sync.method"), "values": (5, "nccl")},
        ),
    ],
)
def test_a_mistake_in_a_set_of_held_out_questions_is_one_sentence(
    tmp_path, text, error, attributes
):
    with raises(error, **attributes) as refusal:
        read_config(written(tmp_path, f"evaluation: {text}")).checked()
    assert "\n" not in str(refusal.value)


def test_sets_of_held_out_questions_have_the_users_names(tmp_path):
    text = "evaluation: {sets: {b: {samples: 2, questions: ./b.jsonl}, a: }}"
    config = read_config(written(tmp_path, text)).checked()
    assert [*config.evaluation.sets] == ["b", "a"]
    assert config.evaluation.sets["b"].passes == (1, 2)
    assert config.evaluation.sets["b"].questions == str(tmp_path / "b.jsonl")
    again = read_config(written(tmp_path, to_yaml(config), "copy.yaml")).checked()
    assert again == config == TrainConfig.from_text(config.to_text())
    overlaid = read_config(
        tmp_path / "copy.yaml", [typed_setting("evaluation.sets.a.pass_at=[1, 3]")]
    ).checked()
    assert overlaid.evaluation.sets["a"].pass_at == (1, 3)
    none = read_config(tmp_path / "copy.yaml", [typed_setting("evaluation.sets={}")]).checked()
    assert none.evaluation.sets == {}


@pytest.mark.parametrize(
    ("sets", "error", "attributes"),
    [
        (
            "{a: {questions: a.jsonl, weight: 0}}",
            WrongValue,
            {"name": "task.sets.a.weight", "value": "0"},
        ),
        (
            "{a: {questions: a.jsonl, weight: .inf}}",
            WrongValue,
            {"name": "task.sets.a.weight", "value": "null"},
        ),
        (
            "{a: {weight: 2}, b: {questions: m:x}}",
            SettingsContradict,
            {"sentence": re.compile(r"^task\.sets\.a\.questions is null, and the set has")},
        ),
        ("[a.jsonl, b.jsonl]", NoSection, {"fault": "section", "name": "task.sets"}),
    ],
)
def test_a_mistake_in_a_set_of_questions_is_one_sentence(tmp_path, sets, error, attributes):
    with raises(error, **attributes) as refusal:
        read_config(written(tmp_path, f"model: {{path: m}}\ntask: {{sets: {sets}}}")).checked()
    assert "\n" not in str(refusal.value)


def test_two_sets_of_one_name_are_refused(tmp_path):
    with raises(ConfigUnreadable, fault="twice", name="a"):
        read_config(written(tmp_path, "task: {sets: {a: {questions: b.jsonl}, a: {weight: 2}}}"))


def test_held_out_questions_that_no_family_of_the_sets_judges_need_a_function(tmp_path):
    text = """
task: {sets: {a: {questions: "reasoning-gym:spell_backward"}}}
evaluation: {sets: {hard: {questions: hard.jsonl}}}
"""
    [problem] = read_config(written(tmp_path, text)).problems
    assert isinstance(problem, SettingsContradict)
    assert problem.settings[0] == "evaluation.sets.hard.questions"
    text += "rewards: {function: 'm:reward'}\n"
    config = read_config(written(tmp_path, text)).checked()
    assert config.task.sets["a"].weight == 1.0
    assert TrainConfig.from_text(config.to_text()) == config


def test_an_empty_file_is_the_defaults(tmp_path):
    assert read_config(written(tmp_path, "# nothing\n")).checked() == TrainConfig()


def test_settings_of_the_command_line_lie_over_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "steps: 5\nsync: {interval: 2}")
    texts = ["steps=7", "name=12", "trainer.learning_rate=1e-3", "model.path=./policy"]
    config = read_config(path, [typed_setting(text) for text in texts]).checked()
    assert (config.steps, config.name, config.sync.interval) == (7, "12", 2)
    assert config.trainer.learning_rate == 1e-3
    assert config.model.path == str(tmp_path / "policy")


@pytest.mark.parametrize(
    ("text", "attributes"),
    [
        ("steps=x", {"name": "steps", "value": '"x"'}),
        ("sync.intervl=1", {"name": "sync.intervl", "nearest": "sync.interval"}),
    ],
)
def test_a_wrong_setting_of_the_command_line_is_named(tmp_path, text, attributes):
    [problem] = read_config(written(tmp_path, ""), [typed_setting(text)]).problems
    assert_attributes(problem, origin=f"--set {text}", **attributes)


def test_a_setting_without_a_value_is_refused():
    with raises(CommandRefused, fault="setting", setting="steps"):
        typed_setting("steps")


def test_paths_are_relative_to_the_file(tmp_path):
    text = """
model: {path: policy}
task: {questions: q.jsonl}
rewards: {function: "./r.py:exact"}
checkpoints: {root: ../kept}
tracking: {folder: metrics, trackers: [jsonl]}
"""
    config = read_config(written(tmp_path, text)).checked()
    assert config.model.path == str(tmp_path / "policy")
    assert config.task.questions == str(tmp_path / "q.jsonl")
    assert config.rewards.function == f"{tmp_path}/r.py:exact"
    assert config.checkpoints.root == str(tmp_path.parent / "kept")
    assert config.tracking.folder == str(tmp_path / "metrics")
    named = read_config(written(tmp_path, "task: {questions: 'reasoning-gym:spell'}")).checked()
    assert named.task.questions == "reasoning-gym:spell"
    text = (
        "task: {name: mine.py:Sums, options: {evaluation: held.jsonl}}\n"
        "rewards: {function: 'pkg.r:exact'}"
    )
    config = read_config(written(tmp_path, text)).checked()
    task = config.task
    assert task.name == f"{tmp_path}/mine.py:Sums"
    assert config.rewards.function == "pkg.r:exact"
    assert task.options == {"evaluation": str(tmp_path / "held.jsonl")}


def test_the_copy_in_the_runs_folder_reads_as_the_same_configuration(tmp_path):
    config = read_config(EXAMPLES[0]).checked()
    write_copy(tmp_path / "run", config)
    assert read_config(tmp_path / "run" / "config.yaml").checked() == config
    assert (tmp_path / "run" / "config.yaml").read_text() == to_yaml(config)


def test_an_overlay_of_options_equals_a_file(tmp_path):
    options = {option.removeprefix("--").replace("-", "_"): None for option in OPTIONS}
    reading, rest = overlaid(options | {"steps": 7, "weights": "redis", "max_staleness": 0, "a": 1})
    text = SHIPPED_FILE.read_text().replace("steps = 300", "steps = 7")
    text += '\n[sync]\ntransport = "redis"\nmax_staleness = 0\n'
    assert reading.checked() == read_config(written(tmp_path, text, "run.toml")).checked()
    assert rest == {"a": 1}


def test_trinitys_names_of_the_settings_of_checkpoints_are_read(tmp_path):
    text = "trainer: {max_checkpoints_to_keep: 0, save_hf_checkpoint: always}"
    checkpoints = read_config(written(tmp_path, text)).checked().checkpoints
    assert (checkpoints.keep, checkpoints.save_hf_checkpoint) == (0, "always")


@pytest.mark.parametrize(
    ("which", "steps"), [("never", set()), ("last", {9}), ("always", set(range(1, 10)))]
)
def test_the_configuration_says_which_checkpoints_have_a_hugging_face_folder(which, steps):
    config = TrainConfig(steps=9).replaced("checkpoints", save_hf_checkpoint=which)
    assert {step for step in range(1, 10) if config.is_hf_save_step(step)} == steps


def test_options_are_named_in_messages_about_them():
    options = {option.removeprefix("--").replace("-", "_"): None for option in OPTIONS}
    [problem] = overlaid(options | {"tensor_parallel": 2, "engine": "verl"})[0].problems
    assert str(problem) == (
        "--tensor-parallel is 2, and --engine verl has no such option: set --engine fsdp, megatron "
        "or verl-megatron, or leave it out"
    )


def test_every_field_has_a_meaning_and_every_option_a_field():
    assert all(field.meaning.endswith(".") for field in fields().values())
    assert set(OPTIONS.values()) <= set(fields())


def test_the_editors_schema_has_a_meaning_and_bounds_of_every_field():
    structs = json.loads(schema_files()["commands/train-check.json"])["$defs"]
    seen = set()
    for path, field in fields().items():
        section = path.rpartition(".")[0]
        struct = sections()[section] if section else TrainConfig
        shown = structs[struct.__name__]["properties"][path.rpartition(".")[2]]
        assert shown["description"].startswith(field.meaning)
        for option in shown.get("anyOf", [shown]):
            if option.get("type") in {"integer", "number"}:
                assert option.keys() & BOUNDS, f"{path} has no bound"
                seen.add(path)
    assert {"trainer.learning_rate", "evaluation.sets.NAME.top_p"} <= seen
    properties = structs["RewardsConfig"]["properties"]
    assert properties["best_grade"]["description"].endswith("Read only if `rewards.judge` is set.")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_editor_accepts_every_example(path):
    schema = json.loads(schema_files()["commands/train-check.json"])
    validator = jsonschema.Draft202012Validator(schema)
    # PyYAML reads YAML 1.1, in which 5e-4 is text; editors read 1.2.
    validator.validate(yaml.safe_load(path.read_text().replace("5e-4", "5.0e-4")))
    assert not validator.is_valid({"stepz": 3})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_checks(cli, path):
    result = cli("train", str(path), "--check")
    assert result.returncode == 0, result.stderr
    assert "samples_per_prompt: " in result.stdout


def test_check_tells_every_mistake_and_starts_nothing(cli, tmp_path):
    path = written(tmp_path, "step: 3\nseed: -1")
    result = cli("train", str(path), "--check")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: {path}: there is no setting step: is steps meant?",
        f"error: {path}: seed is -1, but must be an integer from 0 to 4294967295",
    ]
    result = cli("train", str(path), "--set", "name=x")
    assert result.returncode == 1
    assert "(1 more: see --check)" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("name", "current"), [(name, path) for name, (path, _) in ALIASES.items()])
def test_another_name_sets_the_setting_and_warns_with_the_name_here(
    tmp_path, caplog, monkeypatch, name, current
):
    """Invariant 1 of config/other_names.py."""
    monkeypatch.chdir(tmp_path)  # from which the command line's paths start
    value = _other_value(fields()[current])
    content = {}
    section = content
    *keys, last = name.split(".")
    for key in keys:
        section = section.setdefault(key, {})
    section[last] = value
    by_file = read_config(written(tmp_path, json.dumps(content)))
    by_option = read_config(written(tmp_path, ""), [typed_setting(f"{name}={json.dumps(value)}")])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all(name in text and current in text for text in messages)
    setting = typed_setting(f"{current}={json.dumps(value)}")
    expected = read_config(written(tmp_path, ""), [setting])
    assert by_file.config == by_option.config == expected.config != TrainConfig()
    assert len(caplog.records) == 2, "the setting's own name is not reported"


def _other_value(field):
    if field.choices:
        return next(choice for choice in field.choices if choice != field.default)
    for value in (3, 0.75, 1.5, True, [1], ["jsonl"], "rloo", {"a": 1}):
        try:
            if field.converted(value) != field.default:
                return value
        except ValueError:
            pass
    raise AssertionError(f"{field.path} takes none of these values")


def test_a_former_name_beside_the_new_one_is_refused_with_both(tmp_path):
    """Invariant 3 of config/other_names.py."""
    both = ["trainer.ramp_steps", "trainer.warmup_steps"]
    [in_file] = read_config(written(tmp_path, "trainer: {ramp_steps: 3, warmup_steps: 3}")).problems
    settings = [typed_setting(f"{name}=3") for name in both]
    [in_options] = read_config(written(tmp_path, ""), settings).problems
    logged = json.dumps({"trainer": {"ramp_steps": 3, "warmup_steps": 3}})
    with pytest.raises(SettingNamedTwice) as refusal:
        TrainConfig.from_text(logged)
    assert (refusal.value.path, [*refusal.value.names]) == (both[1], both)
    for problem in (in_file, in_options):
        assert_attributes(problem, path=both[1], names=tuple(both))


def test_the_command_line_may_name_a_setting_of_the_file_otherwise(tmp_path):
    path = written(tmp_path, "trainer: {ramp_steps: 3}")
    config = read_config(path, [typed_setting("trainer.warmup_steps=5")]).checked()
    assert config.trainer.warmup_steps == 5


def test_every_name_of_another_project_is_of_a_setting_that_there_is():
    assert OTHER_NAMES.keys() <= fields().keys()
    names = [name for path, others in OTHER_NAMES.items() for _, name, _ in others if name != path]
    assert not set(names) & set(fields()), "a setting's own name is no other's"
    assert not set(names) & set(WITHOUT_EQUIVALENT)
    aliases = [name for name in names if name in ALIASES]
    assert sorted(set(aliases)) == sorted(aliases), "an alias is of one setting"


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("lr: 1.0e-6", "lr", "is trainer.learning_rate here"),
        ("adv_estimator: grpo", "adv_estimator", "is algorithm.advantage here"),
        ("loss_type: grpo", "loss_type", "is algorithm.normalisation here (grpo is sequence-mean"),
        (
            "data: {val_files: a.parquet}",
            "data.val_files",
            "is evaluation.sets.NAME.questions here",
        ),
        ("trainer: {test_freq: 5}", "trainer.test_freq", "is evaluation.sets.NAME.interval here"),
        (
            "algorithm: {use_kl_in_reward: true}",
            "algorithm.use_kl_in_reward",
            "is algorithm.kl.where here (true is reward)",
        ),
        (
            "algorithm: {kl_ctrl: {kl_coef: 0.1}}",
            "algorithm.kl_ctrl.kl_coef",
            "is algorithm.kl.coefficient here (counts if",
        ),
        (
            "actor_rollout_ref: {model: {path: m}}",
            "actor_rollout_ref.model.path",
            "is model.path here (may be a name on the hub",
        ),
        ("data: {shuffle: true}", "data.shuffle", "it is in a section of veRL"),
        ("synchronizer: {other: 1}", "synchronizer.other", "it is in a section of Trinity-RFT"),
        ("num_train_epochs: 2", "num_train_epochs", "set steps: questions are drawn again"),
        ("trainer: {nnodes: 2}", "trainer.nnodes", "set trainer.ranks, and RAY_ADDRESS"),
        (
            "datasets: [{path: a}]",
            "datasets",
            "is task.sets.NAME.questions here (a list, here sets by name)",
        ),
        (
            "probabilities: [0.5, 0.5]",
            "probabilities",
            "set the weight of each set, task.sets.NAME.weight",
        ),
        ("stopping_strategy: first_exhausted", "stopping_strategy", "begins its next pass"),
        (
            "actor_rollout_ref: {rollout: {top_k: 20}}",
            "actor_rollout_ref.rollout.top_k",
            "is rollouts.top_k here (-1 samples from all",
        ),
    ],
)
def test_a_name_of_another_meaning_is_refused_with_what_to_do(tmp_path, text, name, hint):
    """Invariant 1 of config/other_names.py."""
    [problem] = read_config(written(tmp_path, text)).problems
    assert_attributes(problem, name=name, nearest=None, hint=re.compile(re.escape(hint)))
    assert "\n" not in str(problem)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("data: {train_files: [a.parquet, b.parquet]}", "data.train_files"),
        ("task: {questions: {a: a.jsonl}}", "task.questions"),
    ],
)
def test_several_sources_in_one_setting_are_refused_with_what_to_do(tmp_path, text, name):
    with raises(WrongValue, name=name, reason=re.compile(r"^name each .* below task\.sets")):
        read_config(written(tmp_path, text)).checked()


def test_a_name_that_is_like_no_other_is_refused_with_the_sections(tmp_path):
    with raises(UnknownSetting, name="trainer.logging_dirs", nearest=None, hint="") as refusal:
        read_config(written(tmp_path, "trainer: {logging_dirs: x}")).checked()
    assert refusal.value.sections[:2] == ("model", "task")


def test_a_configuration_of_verl_is_read_as_far_as_the_meanings_are_the_same(tmp_path):
    text = """
data: {train_files: q.parquet, train_batch_size: 8, max_response_length: 64, prompt_key: question}
actor_rollout_ref:
  actor: {optim: {lr: 1.0e-6}, ppo_epochs: 2, clip_ratio_high: 0.28}
  rollout: {n: 4, temperature: 0.7}
algorithm: {adv_estimator: reinforce_plus_plus, gamma: 0.99}
trainer: {save_freq: 20, total_training_steps: 50, project_name: mine, critic_warmup: 0}
synchronizer: {sync_style: dynamic_by_explorer}
"""
    reading = read_config(written(tmp_path, text), [typed_setting("tracking.trackers=[jsonl]")])
    config = reading.checked()
    assert config.task.questions == str(tmp_path / "q.parquet"), "a path is relative to the file"
    assert (config.rollouts.prompts_per_step, config.rollouts.samples_per_prompt) == (8, 4)
    assert (config.trainer.learning_rate, config.algorithm.epochs) == (1e-6, 2)
    assert (config.algorithm.advantage, config.algorithm.gamma) == ("reinforce++", 0.99)
    assert (config.checkpoints.interval, config.steps, config.sync.style) == (
        *(20, 50),
        "explorer_driven",
    )


@pytest.mark.parametrize(
    ("former", "mode"),
    [("finish", "wait"), ("keep_cache", "keep"), ("recompute_cache", "retract")],
)
def test_the_modes_of_a_pause_are_read_by_their_former_names(tmp_path, former, mode):
    text = f"rollouts: {{on_update: {former}}}\nsync: {{max_staleness: 1, style: trainer_driven}}"
    assert read_config(written(tmp_path, text)).checked().rollouts.pause_mode == mode


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("tinker", "publish the steps of such a loop by trinity_events.training_run"),
        ("verl_legacy", "install veRL 0.8 or later, and write verl"),
        ("trinity.trainer.verl.monkey_patch", "no function of veRL is replaced: write verl"),
        ("verl_megatron", "write verl-megatron for veRL's Megatron engine"),
    ],
)
def test_a_trainer_of_trinity_rft_that_is_not_here_is_answered(tmp_path, engine, reason):
    [problem] = read_config(written(tmp_path, f"trainer: {{engine: {engine}}}")).problems
    assert_attributes(problem, name="trainer.engine", reason=re.compile(re.escape(reason)))
    [problem] = read_config(written(tmp_path, "trainer: {engine: deepspeed}")).problems
    assert_attributes(problem, allowed="one of fsdp, megatron, verl, verl-megatron", reason="")


def test_a_name_that_many_settings_end_with_gives_no_hint():
    assert format_hint("path") is None
    assert format_hint("nonsense") is None


def test_a_file_is_laid_over_its_base_field_by_field_and_paths_are_of_their_own_file(tmp_path):
    (tmp_path / "common").mkdir()
    written(tmp_path / "common", "steps: 9\nmodel: {path: ./policy}\ntrainer: {ranks: 3}", "a.yaml")
    written(tmp_path, "base: common/a.yaml\nseed: 4\ntrainer: {warmup_steps: 5}", "b.yaml")
    reading = read_config(written(tmp_path, "base: b.yaml\nsteps: 7"))
    assert reading.problems == []
    config = reading.config
    assert (config.steps, config.seed) == (7, 4)
    assert (config.trainer.ranks, config.trainer.warmup_steps) == (3, 5)
    assert config.model.path == str(tmp_path / "common" / "policy")


def test_a_mistake_in_a_base_names_the_base(tmp_path):
    base = written(tmp_path, "stepz: 9", "base.yaml")
    [problem] = read_config(written(tmp_path, "base: base.yaml")).problems
    assert_attributes(problem, origin=str(base), name="stepz")


@pytest.mark.parametrize(
    ("text", "error", "attributes"),
    [
        ("base: run.yaml", BaseRefused, {"fault": "circle"}),
        ("base: b.yaml", BaseRefused, {"fault": "circle"}),
        ("base: 3", BaseRefused, {"fault": "path", "base": "3"}),
        ("base: none.yaml", ConfigUnreadable, {"fault": "file"}),
    ],
)
def test_a_base_that_cannot_be_used_is_one_sentence(tmp_path, text, error, attributes):
    written(tmp_path, "base: run.yaml", "b.yaml")
    with raises(error, **attributes):
        read_config(written(tmp_path, text, "run.yaml"))
