"""A configuration file is read whole, and each mistake in it is one sentence."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from trinity_workers.algorithms.settings import OverlongConfig
from trinity_workers.config.cli_options import OPTIONS, SHIPPED_FILE, overlaid
from trinity_workers.config.errors import BadSettings
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

MISTAKES = [
    ("step: 3", "there is no setting step: is steps meant?"),
    ("sync: {intervall: 3}", "no setting sync.intervall: is sync.interval meant?"),
    ("samples_per_prompt: 3", "is rollouts.samples_per_prompt meant?"),
    ("rollouts: 5", "rollouts is 5, but it is a section"),
    ("steps: 0", "steps is 0, but must be an integer of at least 1"),
    ("steps: many", 'steps is "many", but must be an integer of at least 1'),
    ("steps: true", "steps is true, but must be an integer"),
    ("steps: null", "steps is null, but must be an integer"),
    ("seed: -1", "seed is -1, but must be an integer from 0 to 4294967295"),
    ("algorithm: {clip_high: 0}", "algorithm.clip_high is 0, but must be a number above 0"),
    ("algorithm: {overlong: {buffer: 1}}", "must be a number from 0 to below 1"),
    ("algorithm: {kl: 0.1}", "algorithm.kl is 0.1, but it is a section"),
    ("algorithm: {kl: {coeficient: 1}}", "setting algorithm.kl.coeficient: is algorithm.kl.coeff"),
    ("kl: {coefficient: 1}", "there is no setting kl: is algorithm.kl meant?"),
    ("algorithm: {kl: {estimator: k4}}", 'algorithm.kl.estimator is "k4", but must be one of k1'),
    ("algorithm: {preset: dapoo}", "unknown preset 'dapoo': did you mean 'dapo'?"),
    ("algorithm: {loss: pppo}", "unknown loss 'pppo': did you mean 'ppo'?"),
    ("algorithm: {loss: gspo}", "set algorithm.normalisation sequence-mean"),
    ("rollouts: {samples_per_prompt: 1}", "algorithm.advantage grpo compares the samples"),
    (
        "{rollouts: {samples_per_prompt: 1}, algorithm: {advantage: reinforce++, filters: "
        "{zero_variance: mask}}}",
        "algorithm.filters.zero_variance mask leaves out every group of one sample",
    ),
    (
        "{trainer: {engine: megatron}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        "algorithm.loss divergence compares all of it",
    ),
    ("algorithm: {advantage: gae}", "algorithm.advantage gae needs the values of a critic"),
    ("algorithm: {preset: distillation}", "with a teacher: set algorithm.teacher.path"),
    (
        "algorithm: {teacher: {path: /t}}",
        "algorithm.teacher.path is /t, and nothing asks a teacher: set algorithm.advantage teacher",
    ),
    (
        "{steps: 3, algorithm: {preset: ppo, critic: {critic_warmup_steps: 3}}}",
        "algorithm.critic.critic_warmup_steps is 3, and of 3 steps none would train the policy",
    ),
    (
        "{rollouts: {prompts_per_step: 2, samples_per_prompt: 2}, algorithm: {mini_batches: 5}}",
        "algorithm.mini_batches is 5, and a step has 4 answers",
    ),
    (
        "trainer: {micro_batch_rows: 4, micro_batch_tokens: 400}",
        "trainer.micro_batch_rows and trainer.micro_batch_tokens both divide a step's rows",
    ),
    (
        "{trainer: {micro_batch_tokens: 7}, rollouts: {max_new_tokens: 7}}",
        "trainer.micro_batch_tokens is 7, and a row has up to 7 tokens of an answer",
    ),
    (
        "{trainer: {fused_loss: true}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        "algorithm.loss divergence compares whole logits, which trainer.fused_loss never has",
    ),
    ("trainer: {micro_batch_tokens: 0}", "trainer.micro_batch_tokens is 0"),
    ("trainer: {schedule: step}", "must be one of constant, linear, cosine"),
    ("sync: {timeout: .inf}", "sync.timeout is null, but must be a number above 0"),
    ("explorer: {proof: all}", "must be"),
    ("sync: {transport: nccl}", "must be one of auto, shm, ray, redis"),
    ("sync: {method: disk}", "must be one of memory, nccl, checkpoint"),
    ("sync: {method: [nccl]}", "must be one of memory, nccl, checkpoint"),
    ("checkpoints: {strategy: none}", "must be one of "),
    ("task: {options: 3}", "task.options is 3, but must be a mapping"),
    (
        "trainer: {tensor_parallel: 2}",
        "trainer.tensor_parallel is 2, and trainer.engine fsdp has no such option: set trainer",
    ),
    ("trainer: {engine: megatron, tensor_parallel: 3}", "cannot be divided into groups of 3"),
    (
        "trainer: {expert_parallel: 2, virtual_pipeline: 2}",
        "trainer.virtual_pipeline and trainer.expert_parallel are set, and trainer.engine fsdp has",
    ),
    ("trainer: {distributed_optimizer: true}", "engine fsdp has no such option"),
    ("trainer: {virtual_pipeline: 1}", "must be an integer of at least 2 or null"),
    ("trainer: {context_parallel: 2}", "context parallelism is not supported: its attention runs"),
    ("trainer: {sequence_parallel: true}", "sequence parallelism is not supported: its layer"),
    (
        "trainer: {engine: megatron, virtual_pipeline: 2}",
        "trainer.virtual_pipeline is 2, and there is no pipeline: set trainer.pipeline_parallel 2",
    ),
    (
        "trainer: {engine: megatron, expert_parallel: 2, tensor_parallel: 2, ranks: 4}",
        "trainer.expert_parallel and trainer.tensor_parallel are both above 1",
    ),
    (
        "trainer: {engine: megatron, expert_parallel: 2, pipeline_parallel: 2}",
        "the 1 ranks of a pipeline stage cannot be divided into groups of 2",
    ),
    (
        "trainer: {engine: megatron, distributed_optimizer: true}",
        "cannot load its state, so that no checkpoint of it resumes: set checkpoints.interval 0",
    ),
    (
        "{trainer: {cpu_offload: true, critic_offload: {param_offload: true}}, "
        "algorithm: {preset: ppo}}",
        "trainer.cpu_offload keeps the models in the host's memory already: set trainer",
    ),
    (
        "model: {lora: {rank: 8}}\ntrainer: {engine: megatron}",
        "model.lora.rank 8 has adapters, which are trained on FSDP only: set trainer.engine fsdp",
    ),
    (
        "model: {lora: {alpha: 8}}",
        "model.lora.alpha is 8, and model.lora.rank 0 has no adapters: set model.lora.rank",
    ),
    (
        "model: {lora: {rank: 8, target_modules: [all-linear, q_proj]}}",
        "model.lora.target_modules has all-linear in addition to other names: keep it alone",
    ),
    ("model: {lora: {rank: 8, target_modules: []}}", "model.lora.target_modules is empty: name"),
    ("model: {lora: {rank: 8, dropout: 1.0}}", "must be a number from 0 to below 1"),
    ("trainer: {engine: megatron, packing: true}", "engine megatron has no such option"),
    ("trainer: {engine: verl, packing: true}", "engine verl has no such option"),
    (
        "trainer: {engine: verl, policy_offload: {param_offload: true}}",
        "trainer.policy_offload.param_offload is true, and trainer.engine verl has no such option",
    ),
    (
        "trainer: {engine: verl, schedule: linear}",
        "trainer.schedule is linear, which veRL's engine does not have: set it constant or cosine",
    ),
    (
        "{trainer: {engine: verl}, algorithm: {advantage: none, loss: divergence, "
        "teacher: {path: /t}}}",
        "algorithm.loss divergence needs logits, which veRL's engine does not give",
    ),
    ("trainer: {engine: megatron, cpu_offload: true}", "engine megatron has no such option"),
    (
        "{model: {dtype: bfloat16}, sync: {dtype: float32}}",
        "sync.dtype is float32, and the policy computes in bfloat16",
    ),
    ("checkpoints: {save_hf_checkpoint: first}", "must be one of never, last, always"),
    (
        "{rollouts: {keep_answers: checkpoint}, checkpoints: {interval: 0}}",
        "rollouts.keep_answers is checkpoint, and checkpoints.interval 0 writes no checkpoints",
    ),
    (
        "checkpoints: {save_hf_checkpoint: last, interval: 0}",
        "checkpoints.save_hf_checkpoint is last, and checkpoints.interval 0 writes no checkpoints",
    ),
    ("{steps: 3, trainer: {profile_steps: [2, 4]}}", "names step 4, and the run has 3"),
    ("trainer: {profile_steps: 2}", "must be a list, each an integer of at least 1"),
    ("trainer: {profile_steps: [0]}", "must be a list, each an integer of at least 1"),
    (
        "trainer: {profile_steps: [1], profile_ranks: [2]}",
        "names rank 2, and the last of 2 trainers is rank 1",
    ),
    ("trainer: {profile_ranks: [1]}", "no step is profiled: set trainer.profile_steps"),
    ("explorer: {dtype: float8}", "must be one of float32, bfloat16 or null"),
    ("sync: {style: random}", "must be one of fixed, trainer_driven, explorer_driven, fully_async"),
    ("sync: {offset: 1}", "only sync.style fixed has steps at which explorers synchronise"),
    ("sync: {interval: 4, max_staleness: 2}", "rollouts 3 optimizer steps old: choose at least 3"),
    (
        "sync: {style: fixed, offset: 2, max_staleness: 1}",
        "sync.max_staleness is 1, and sync.interval 1 with sync.offset 2 makes rollouts 2",
    ),
    (
        "sync: {style: fully_async, method: nccl}",
        "a collective group makes the trainer wait for each explorer",
    ),
    ("sync: {method: nccl, publish: snapshot}", "sync.publish is snapshot, and with"),
    ("sync: {method: nccl, full_every: 2}", "sync.full_every is 2, and with sync.method nccl rank"),
    ("sync: {method: nccl, transport: ray}", "sync.transport is ray, and with sync"),
    ("sync: {method: checkpoint, publish: shards}", "none of them through memory: set"),
    ("sync: {method: checkpoint, full_every: 3}", "set sync.method memory, or leave"),
    ("sync: {method: checkpoint, transport: shm}", "set sync.method memory, or leave"),
    ("{sync: {method: checkpoint}, explorer: {proof: served}}", "explorer.proof served compares"),
    ("explorer: {gpus: 1.5, engine: 'x:y'}", "Ray divides one GPU alone"),
    ("explorer: {gpus: 2}", "explorer.engine huggingface uses one"),
    ("explorer: {gpus: 0.5, device: cpu}", "explorer.device cpu does not use"),
    ("explorer: {gpus: 0, device: cuda}", "explorer.gpus 0 reserves none"),
    ("trainer: {gpus: 0.5}", "Ray places two ranks on a GPU, and NCCL takes one"),
    (
        "rollouts: {chat_template_kwargs: {tokenize: false}}",
        "has tokenize, which the run gives itself",
    ),
    ("rollouts: {on_update: restart}", "must be one of finish, keep_cache, recompute_cache"),
    (
        "{rollouts: {on_update: keep_cache}, explorer: {deterministic: true}}",
        "depend on the moment at which weights arrive, which explorer.deterministic rules out: set",
    ),
    (
        "{rollouts: {on_update: keep_cache}, sync: {style: fixed}}",
        "explorers change them: set rollouts.on_update finish, or another sync.style",
    ),
    (
        "{rollouts: {on_update: recompute_cache}, sync: {max_staleness: 0}}",
        "version began: set rollouts.on_update finish, or sync.max_staleness 1 or more",
    ),
    (
        "{rollouts: {on_update: keep_cache}, sync: {interval: 3, max_staleness: 2}}",
        "with sync.max_staleness 2 trains on no answer that an earlier version began",
    ),
    (
        "trainer: {colocated: true}",
        "trainer.colocated generates between two steps, with the weights of the last one: set "
        "sync.max_staleness 0, or set trainer.colocated false",
    ),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0, method: nccl}}",
        "set sync.method memory, or set trainer.colocated false",
    ),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0}, explorer: {dtype: bfloat16}}",
        "explorer.dtype is bfloat16, and with trainer.colocated the trainer's ranks answer",
    ),
    (
        "{trainer: {colocated: true}, sync: {max_staleness: 0}, model: {path: x, lora: {rank: 4}}}",
        "trainer.colocated generates with whole weights, and model.lora.rank trains adapters",
    ),
    (
        "trainer: {engine: megatron, rollout_tensor_parallel: 1}",
        "it is for ranks that generate: set trainer.colocated true, or leave it out",
    ),
    (
        "{trainer: {colocated: true, rollout_tensor_parallel: 1}, sync: {max_staleness: 0}}",
        "trainer.rollout_tensor_parallel is 1, and trainer.engine fsdp has no such option",
    ),
    (
        "{trainer: {colocated: true, engine: megatron, rollout_tensor_parallel: 3}, "
        "sync: {max_staleness: 0}}",
        "is 3, and 2 trainers cannot be divided into groups of 3: choose a divisor",
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


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_mistake_is_one_sentence_that_names_file_and_field(tmp_path, text, message):
    path = written(tmp_path, text)
    [problem] = read_config(path).problems
    assert problem.startswith(f"{path}: ")
    assert message in problem
    assert "\n" not in problem
    with pytest.raises(BadSettings):
        read_config(path).checked()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "steps: [", "is not YAML at line"),
        ("a.yaml", "steps: 1\nsteps: 2", "steps is given twice"),
        ("a.toml", "steps = ", "is not TOML"),
        ("a.json", "{}", "is neither .yaml, .yml nor .toml"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_one_sentence(tmp_path, name, text, message):
    with pytest.raises(BadSettings, match=message):
        read_config(written(tmp_path, text, name))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadSettings, match=r"none\.yaml cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")


def test_every_mistake_is_found_and_the_first_tells_how_many_others(tmp_path):
    reading = read_config(written(tmp_path, "step: 3\nseed: -1\ntrainer: {tensor_parallel: 2}"))
    assert len(reading.problems) == 3
    with pytest.raises(BadSettings, match="2 more: see --check"):
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
    assert "own.py has no 'cubed'" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{sets: {Hard: {}}}", 'evaluation.sets has "Hard", but a name there has only lower-case'),
        ("{sets: {hard: 4}}", "evaluation.sets.hard is 4, but it is a section"),
        (
            "{sets: {hard: {samples: 0}}}",
            "evaluation.sets.hard.samples is 0, but must be an integer",
        ),
        ("{sets: {hard: {sample: 4}}}", "no setting evaluation.sets.hard.sample: is evaluation"),
        (
            "{sets: {hard: {pass_at: 4}}}",
            "evaluation.sets.hard.pass_at is 4, but must be a list, each",
        ),
        (
            "{sets: {hard: {pass_at: [8]}}}",
            "pass@8 of 4 answers: set evaluation.sets.hard.samples 8",
        ),
        ("{sets: {hard: {temperature: 0}}}", "all 4 answers to a question are then the same"),
        ("{sets: {hard: {versions: [900]}}}", "has step 900, and the run has 300 steps"),
        ("{sets: {a: {at_start: false, at_end: false}}}", "evaluation.sets.a is never asked"),
        ("{timeout: 0}", "evaluation.timeout is 0, but must be a number above 0"),
        ("{sets: {a: {interval: 5}}}\nsync: {method: nccl}", "sync.method nccl keeps none"),
    ],
)
def test_a_mistake_in_a_set_of_held_out_questions_is_one_sentence(tmp_path, text, message):
    [problem] = read_config(written(tmp_path, f"evaluation: {text}")).problems
    assert message in problem and "\n" not in problem


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
    ("sets", "message"),
    [
        (
            "{a: {questions: a.jsonl, weight: 0}}",
            "task.sets.a.weight is 0, but must be a number ab",
        ),
        ("{a: {questions: a.jsonl, weight: .inf}}", "task.sets.a.weight is null, but must be"),
        ("{a: {weight: 2}, b: {questions: m:x}}", "task.sets.a.questions is null, and the set has"),
        ("[a.jsonl, b.jsonl]", 'task.sets is ["a.jsonl","b.jsonl"], but it is a section'),
    ],
)
def test_a_mistake_in_a_set_of_questions_is_one_sentence(tmp_path, sets, message):
    [problem] = read_config(
        written(tmp_path, f"model: {{path: m}}\ntask: {{sets: {sets}}}")
    ).problems
    assert message in problem and "\n" not in problem


def test_two_sets_of_one_name_are_refused(tmp_path):
    with pytest.raises(BadSettings, match="a is given twice in the section"):
        read_config(written(tmp_path, "task: {sets: {a: {questions: b.jsonl}, a: {weight: 2}}}"))


def test_held_out_questions_that_no_family_of_the_sets_judges_need_a_function(tmp_path):
    text = """
task: {sets: {a: {questions: "reasoning-gym:spell_backward"}}}
evaluation: {sets: {hard: {questions: hard.jsonl}}}
"""
    [problem] = read_config(written(tmp_path, text)).problems
    assert "evaluation.sets.hard.questions names questions of none of task.sets" in problem
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
    ("text", "message"),
    [("steps=x", '--set steps=x: steps is "x"'), ("sync.intervl=1", "is sync.interval meant")],
)
def test_a_wrong_setting_of_the_command_line_is_named(tmp_path, text, message):
    [problem] = read_config(written(tmp_path, ""), [typed_setting(text)]).problems
    assert message in problem


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(BadSettings, match=r"write section\.field=value"):
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
    [problem] = overlaid(options | {"tensor_parallel": 2})[0].problems
    assert problem == (
        "--tensor-parallel is 2, and --engine fsdp has no such option: set --engine megatron, or "
        "leave it out"
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
    both = ["trainer.ramp_steps", "trainer.warmup_steps"]
    [in_file] = read_config(written(tmp_path, "trainer: {ramp_steps: 3, warmup_steps: 3}")).problems
    settings = [typed_setting(f"{name}=3") for name in both]
    [in_options] = read_config(written(tmp_path, ""), settings).problems
    logged = json.dumps({"trainer": {"ramp_steps": 3, "warmup_steps": 3}})
    with pytest.raises(SettingNamedTwice) as refusal:
        TrainConfig.from_text(logged)
    assert (refusal.value.path, [*refusal.value.names]) == (both[1], both)
    assert all(name in problem for name in both for problem in (in_file, in_options))


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
    ("text", "message"),
    [
        ("lr: 1.0e-6", "is trainer.learning_rate here"),
        ("adv_estimator: grpo", "is algorithm.advantage here"),
        ("loss_type: grpo", "is algorithm.normalisation here (grpo is sequence-mean"),
        ("data: {val_files: a.parquet}", "is evaluation.sets.NAME.questions here"),
        ("trainer: {test_freq: 5}", "is evaluation.sets.NAME.interval here"),
        ("algorithm: {use_kl_in_reward: true}", "is algorithm.kl.where here (true is reward)"),
        ("algorithm: {kl_ctrl: {kl_coef: 0.1}}", "is algorithm.kl.coefficient here (counts if"),
        ("actor_rollout_ref: {model: {path: m}}", "is model.path here (may be a name on the hub"),
        ("data: {train_files: [a.parquet, b.parquet]}", "name each of several sources below task"),
        ("task: {questions: {a: a.jsonl}}", "below task.sets, with its weight"),
        ("datasets: [{path: a}]", "is task.sets.NAME.questions here (a list, here sets by name)"),
        ("probabilities: [0.5, 0.5]", "set the weight of each set, task.sets.NAME.weight"),
        ("stopping_strategy: first_exhausted", "begins its next pass"),
        ("data: {shuffle: true}", "it is in a section of veRL"),
        ("synchronizer: {other: 1}", "it is in a section of Trinity-RFT"),
        ("num_train_epochs: 2", "set steps: questions are drawn again"),
        ("trainer: {nnodes: 2}", "set trainer.ranks, and RAY_ADDRESS"),
        (
            "actor_rollout_ref: {rollout: {top_k: 20}}",
            "is rollouts.top_k here (-1 samples from all",
        ),
        ("trainer: {logging_dirs: x}", "the sections are model, task"),
    ],
)
def test_a_name_of_another_meaning_is_refused_with_what_to_do(tmp_path, text, message):
    [problem] = read_config(written(tmp_path, text)).problems
    assert message in problem and "meant?" not in problem and "\n" not in problem


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
    ("engine", "message"),
    [
        ("tinker", "publish the steps of such a loop by trinity_events.training_run"),
        ("verl_legacy", "install veRL 0.8 or later, and write verl"),
        ("trinity.trainer.verl.monkey_patch", "no function of veRL is replaced: write verl"),
        (
            "verl-megatron",
            "has run on a double of both alone: write megatron, which is",
        ),
        (
            "verl_megatron",
            "has run on a double of both alone: write megatron, which is",
        ),
    ],
)
def test_a_trainer_of_trinity_rft_that_is_not_here_is_answered(tmp_path, engine, message):
    [problem] = read_config(written(tmp_path, f"trainer: {{engine: {engine}}}")).problems
    assert message in problem
    [problem] = read_config(written(tmp_path, "trainer: {engine: deepspeed}")).problems
    assert problem.endswith("but must be one of fsdp, megatron, verl")


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
    assert problem.startswith(f"{base}: there is no setting stepz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: run.yaml", "each is laid over the next"),
        ("base: b.yaml", "each is laid over the next"),
        ("base: 3", "base is 3, but must be the path"),
        ("base: none.yaml", "none.yaml cannot be read: No such file"),
    ],
)
def test_a_base_that_cannot_be_used_is_one_sentence(tmp_path, text, message):
    written(tmp_path, "base: run.yaml", "b.yaml")
    with pytest.raises(BadSettings, match=message):
        read_config(written(tmp_path, text, "run.yaml"))
