"""An explorer takes data from the log, and the names of code and places from its own side."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.hostile_configs import (
    hostile_configs,
    trainer_config,
    with_settings,
    write_hostile_code,
)
from trinity_workers.config.fields import fields
from trinity_workers.config.files import _PATHS, _SOURCES, read_config, typed_setting
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.config.trusted_settings import (
    DATA,
    REFERENCES,
    Host,
    OwnConfig,
    SettingsDiffer,
    SettingsUntrusted,
    merge,
)

RUN, URL = "grpo-1", "http://127.0.0.1:9"
EXAMPLES = [
    path
    for folder in ("train", "own_task")
    for path in sorted((Path(__file__).parents[2] / "examples" / folder).glob("*.yaml"))
]


@pytest.fixture
def host(tmp_path):
    """A host with installed entry points, and with an empty checkpoint root."""
    (tmp_path / "checkpoints").mkdir()
    local = Host.local(tmp_path / "checkpoints")
    installed = {path: names | {"installed"} for path, names in local.installed.items()}
    return msgspec.structs.replace(local, installed=installed)


@pytest.fixture
def own(tmp_path):
    """Reads a file of the explorer's own side, as `train` reads it."""

    def read(text: str, *settings: str, folder: str = "own") -> OwnConfig:
        file = tmp_path / folder / "run.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        reading = read_config(file, [typed_setting(text) for text in settings])
        # A file may name a token and a function: what it names counts, not its rules.
        return OwnConfig(file=file, config=reading.config)

    return read


# --- the tables (1, 6) ----------------------------------------------------------------------


def test_every_setting_is_either_data_or_names_code_a_path_a_url_or_a_variable():
    """Invariant 1."""
    tables = [*DATA, *REFERENCES]
    assert sorted(set(fields()) - set(tables)) == [], "enter these in trusted_settings.py"
    assert sorted(set(tables) - set(fields())) == [], "these are no settings"
    assert sorted(set(DATA) & set(REFERENCES)) == []


def test_every_path_that_is_resolved_when_a_file_is_read_is_a_reference():
    assert set(_PATHS) | set(_SOURCES) <= set(REFERENCES)


def test_a_setting_that_is_in_no_table_is_not_taken_from_the_log(host):
    """Invariant 6."""
    logged = with_settings({"task.prompt": "theirs", "task.answer": "theirs"})
    merged = merge(RUN, logged, None, host, data=DATA - {"task.prompt"})
    assert (merged.task.prompt, merged.task.answer) == ("prompt", "theirs")


# --- without a file (2, 4, 5) ---------------------------------------------------------------


@pytest.mark.parametrize("name", hostile_configs(Path("/nowhere/proof"), URL))
def test_what_names_code_or_a_place_in_the_log_is_refused_without_a_file(name, host, tmp_path):
    """Invariant 4."""
    proof = tmp_path / "proof"
    write_hostile_code(proof)
    hostile = hostile_configs(proof, URL)[name]
    modules = set(sys.modules)
    with pytest.raises(SettingsUntrusted) as refused:
        merge(RUN, with_settings(hostile.settings), None, host)
    assert refused.value.run_id == RUN
    assert refused.value.settings == tuple(hostile.refused)
    for setting, kind in hostile.refused.items():
        assert f"{setting} ({kind})" in str(refused.value)
    assert "--config FILE" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert not proof.exists()
    assert set(sys.modules) == modules, "nothing is imported"


def test_installed_names_and_data_are_taken_from_the_log_without_a_file(host):
    """Invariants 2 and 4."""
    chosen = {
        "task.name": "installed",
        "explorer.engine": "installed",
        "steps": 7,
        "rollouts.temperature": 0.5,
        "explorer.wait_for_run": 60.0,
        "model.lora.target_modules": ["q_proj"],
        "evaluation.sets": {"a.b": {"count": 3}, "NAME": {}},
    }
    logged = with_settings(chosen)
    assert merge(RUN, logged, None, host) == logged
    for built_in in ("spell-backward", "sort-digits", "complex-sums"):
        assert merge(RUN, with_settings({"task.name": built_in}), None, host).task.name == built_in


def test_a_model_below_the_checkpoint_root_is_taken_and_no_other(host, tmp_path):
    """Invariant 4."""
    root = host.checkpoint_root
    (root / "run" / "model").mkdir(parents=True)
    inside = with_settings({"model.path": str(root / "run" / "model")})
    assert merge(RUN, inside, None, host) == inside

    (tmp_path / "elsewhere").mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "circle").symlink_to(root / "circle")
    outside = [root, root / "link", root / ".." / "elsewhere", root / "circle", root / "a\0b"]
    for path in [*map(str, outside), "run/model", f"{root}-beside", ""]:
        with pytest.raises(SettingsUntrusted) as refused:
            merge(RUN, with_settings({"model.path": path}), None, host)
        assert refused.value.settings == ("model.path",)


def test_what_the_trainer_alone_uses_never_comes_from_the_log(host, own, tmp_path):
    """Invariant 5."""
    logged = trainer_config(tmp_path / "proof", URL)
    assert merge(RUN, logged, None, host) == TrainConfig()
    given = own("tracking: {trackers: [jsonl]}")
    assert merge(RUN, logged, given, host).tracking.trackers == ("jsonl",)


def test_a_refusal_names_a_bounded_number_of_settings(host):
    sets = {f"set-{number}": {"questions": "x:y"} for number in range(1000)}
    with pytest.raises(SettingsUntrusted) as refused:
        merge(RUN, with_settings({"evaluation.sets": sets}), None, host)
    assert len(refused.value.settings) == 1000
    assert "and 990 more" in str(refused.value)
    assert len(str(refused.value)) < 1000


# --- with a file (2, 3) ---------------------------------------------------------------------

OWN_TASK = """
model: {path: ./model}
task:
  questions: ./data/questions.jsonl
  options: {evaluation: ./data/held-out.jsonl, chat: true}
rewards: {function: ./reward.py:reward, token_variable: OUR_TOKEN}
evaluation:
  sets:
    hard: {questions: ./data/hard.jsonl, count: 5}
    all: {}
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_run_of_a_file_is_explored_with_the_same_file_also_in_another_folder(
    path, host, tmp_path
):
    logged = TrainConfig.from_text(read_config(path).checked().to_text())
    logged = logged.replaced("sync", transport="redis")  # as the launcher resolves auto
    same = OwnConfig(file=path, config=read_config(path).checked())
    assert merge(RUN, logged, same, host) == logged
    copied = shutil.copytree(path.parent, tmp_path / "elsewhere") / path.name
    moved = OwnConfig(file=copied, config=read_config(copied).checked())
    merged = merge(RUN, logged, moved, host)
    assert merged == moved.config.replaced("sync", transport="redis")


def test_the_file_decides_what_names_something_and_the_log_all_else(host, own):
    """Invariants 2 and 3."""
    logged = own(OWN_TASK, "steps=9", "evaluation.sets={hard: {questions: ./data/hard.jsonl}}")
    logged = logged.config.replaced("rollouts", temperature=0.3)
    given = own(OWN_TASK, folder="ours")
    with pytest.raises(SettingsDiffer):  # --set takes paths from the current folder
        merge(RUN, own(OWN_TASK, "model.path=./other").config, given, host)
    merged = merge(RUN, logged, given, host)
    assert merged.steps == 9
    assert merged.rollouts.temperature == 0.3
    assert [*merged.evaluation.sets] == ["hard"], "the log names the sets"
    assert merged.evaluation.sets["hard"].count == 256
    folder = given.file.parent
    assert merged.model.path == str(folder / "model")
    assert merged.task == given.config.task
    assert merged.evaluation.sets["hard"].questions == str(folder / "data" / "hard.jsonl")
    assert merged.rewards.token_variable == "OUR_TOKEN"


@pytest.mark.parametrize("name", hostile_configs(Path("/nowhere/proof"), URL))
def test_what_the_log_names_and_the_file_does_not_is_refused(name, host, own, tmp_path):
    """Invariant 3."""
    hostile = hostile_configs(tmp_path / "proof", URL)[name]
    given = own("steps: 9")
    with pytest.raises(SettingsDiffer) as refused:
        merge(RUN, with_settings(hostile.settings), given, host)
    assert (refused.value.run_id, refused.value.file) == (RUN, given.file)
    assert set(refused.value.settings) == set(hostile.refused)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ("rewards.function=./reward.py:other", "rewards.function"),
        ("rewards.function=./other.py:reward", "rewards.function"),
        ("rewards.function=null", "rewards.function"),
        ("task.questions=./reward.jsonl", "task.questions"),
        ("task.questions=datasets:questions.jsonl", "task.questions"),
        ("model.path=./data", "model.path"),
        ("model.path=null", "model.path"),
        ("rewards.token_variable=THEIR_TOKEN", "rewards.token_variable"),
        ("task.options={evaluation: ./data/other.jsonl, chat: true}", "task.options"),
        ("task.options={evaluation: ./data/held-out.jsonl, chat: false}", "task.options"),
        ("evaluation.sets={hard: {}}", "evaluation.sets.hard.questions"),
        ("evaluation.sets={}", "evaluation.sets.hard.questions"),
    ],
)
def test_a_difference_in_what_is_named_is_refused_by_its_setting(
    changed, refused, host, own, monkeypatch
):
    """Invariant 3."""
    given = own(OWN_TASK)
    monkeypatch.chdir(given.file.parent)  # from which --set takes relative paths
    with pytest.raises(SettingsDiffer) as differs:
        merge(RUN, own(OWN_TASK, changed).config, given, host)
    assert differs.value.settings == (refused,)
    assert refused in str(differs.value)


def test_of_a_path_below_the_file_all_of_it_is_compared_and_of_others_the_last_name(host, own):
    task = "task: {{questions: {}}}\nrewards: {{function: m:r}}\nmodel: {{path: /models/qwen}}"
    given = own(task.format("./data/q.jsonl"))

    def merged(questions: str, model: str) -> TrainConfig:
        logged = with_settings(
            {"task.questions": questions, "rewards.function": "m:r", "model.path": model}
        )
        return merge(RUN, logged, given, host)

    assert merged("/theirs/data/q.jsonl", "/mnt/qwen") == given.config
    assert merged("data/q.jsonl", "qwen") == given.config, "a log may have relative paths"
    for questions, model, refused in (
        ("/theirs/test/q.jsonl", "/mnt/qwen", "task.questions"),
        ("/q.jsonl", "/mnt/qwen", "task.questions"),
        ("/theirs/data/q.jsonl", "/mnt/llama", "model.path"),
    ):
        with pytest.raises(SettingsDiffer) as differs:
            merged(questions, model)
        assert differs.value.settings == (refused,)
