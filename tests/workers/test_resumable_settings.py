"""A setting that changed takes effect at a resume, or is refused with both values."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.errors import raises
from tests.support.hostile_configs import with_settings
from trinity_workers.config.errors import LoggedSettingsUnreadable
from trinity_workers.config.fields import fields
from trinity_workers.config.other_names import FORMER_NAMES, SettingNamedTwice
from trinity_workers.config.resumable_settings import (
    APPLIED,
    QUESTIONS,
    REFUSED,
    REWARDS,
    SettingsNotResumable,
    _find_reason,
    changes_rewards,
    check_questions,
    compare_settings,
)
from trinity_workers.config.train_config import TrainConfig

RUN = "grpo-1"


def compare(before, after):
    return compare_settings(RUN, with_settings(before).to_text(), with_settings(after))


def test_every_setting_is_applied_refused_or_one_of_the_questions():
    """Invariant 1."""
    tables = [*APPLIED, *REFUSED, *QUESTIONS]
    assert sorted(set(fields()) - set(tables)) == [], "enter these in resumable_settings.py"
    assert sorted(set(tables) - set(fields())) == [], "these are no settings"
    assert len(tables) == len(set(tables)), "one table each"
    assert set(fields()) >= REWARDS


def test_the_same_settings_are_no_change():
    assert compare({"seed": 7}, {"seed": 7}) == ()


def test_settings_that_may_change_are_listed_with_both_values():
    """Invariant 2."""
    changes = compare(
        {"trainer.learning_rate": 1e-3, "steps": 2},
        {"trainer.learning_rate": 1e-5, "steps": 4, "rollouts.samples_per_prompt": 8},
    )
    assert [(change.name, change.before, change.after) for change in changes] == [
        ("steps", "2", "4"),
        ("trainer.learning_rate", "0.001", "0.00001"),
        ("rollouts.samples_per_prompt", "16", "8"),
    ]


def test_sets_of_questions_that_come_and_go_are_listed():
    changes = compare({"evaluation.sets": {"a": {}}}, {"evaluation.sets": {"b": {"count": 3}}})
    by_name = {change.name: change for change in changes}
    assert by_name["evaluation.sets.a.count"].after is None
    assert by_name["evaluation.sets.b.count"].before is None
    assert by_name["evaluation.sets.b.count"].after == "3"


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_a_setting_that_may_not_change_is_refused_with_both_values(path):
    """Invariant 4."""
    before = TrainConfig().to_text()
    values = msgspec.json.decode(before)
    *parents, last = path.split(".")
    section = values
    for key in parents:
        section = section[key]
    section[last] = "earlier"
    with pytest.raises(SettingsNotResumable) as refusal:
        compare_settings(RUN, msgspec.json.encode(values).decode(), TrainConfig())
    [change] = refusal.value.changes
    assert (refusal.value.run_id, change.name, change.before) == (RUN, path, '"earlier"')
    message = str(refusal.value)
    assert f'{path} was "earlier" and is now {change.after} ({REFUSED[path]})' in message
    assert "--fresh" in message
    assert "--run" in message


def test_all_refused_changes_are_named_at_once():
    with pytest.raises(SettingsNotResumable) as refusal:
        compare({}, {"seed": 7, "trainer.engine": "megatron", "trainer.learning_rate": 1.0})
    assert [change.name for change in refusal.value.changes] == ["seed", "trainer.engine"]


def test_a_setting_in_no_table_is_refused():
    """Invariant 5."""
    assert _find_reason("trainer.learning_rate", "fsdp") is None
    assert _find_reason("trainer.of_a_later_version", "fsdp") == "no rule says that it may change"


def test_verl_resumes_at_its_number_of_ranks():
    ranks = {"trainer.ranks": 1}
    assert [change.name for change in compare({}, ranks)] == ["trainer.ranks"]
    verl = {"trainer.engine": "verl"}
    with pytest.raises(SettingsNotResumable) as refusal:
        compare(verl, verl | ranks)
    assert [change.name for change in refusal.value.changes] == ["trainer.ranks"]


def test_a_configuration_of_another_version_has_defaults_for_what_it_lacks():
    values = msgspec.json.decode(with_settings({"seed": 3}).to_text())
    del values["trainer"]["max_grad_norm"], values["evaluation"]
    values["trainer"]["removed_since"] = 1
    logged = msgspec.json.encode(values).decode()
    assert compare_settings(RUN, logged, with_settings({"seed": 3})) == ()
    for damaged in ("{", "[]", "[" * 100_000):
        with raises(LoggedSettingsUnreadable, run_id=RUN):
            compare_settings(RUN, damaged, TrainConfig())


def logged_by_former_names(config):
    """Return a configuration as an earlier version logged it."""
    values = msgspec.json.decode(config.to_text())
    for former, current in FORMER_NAMES.items():
        *keys, name = current.split(".")
        *former_keys, former_name = former.split(".")
        section = former_section = values
        for key in keys:
            section = section[key]
        for key in former_keys:
            former_section = former_section.setdefault(key, {})
        former_section[former_name] = section.pop(name)
    return msgspec.json.encode(values).decode()


def test_a_configuration_of_the_log_is_read_by_former_names():
    config = with_settings({"trainer.warmup_steps": 3, "algorithm.critic.critic_warmup_steps": 2})
    logged = logged_by_former_names(config)
    assert TrainConfig.from_text(logged) == config
    assert compare_settings(RUN, logged, config) == ()
    [change] = compare_settings(RUN, logged, config.replaced("trainer", warmup_steps=4))
    assert (change.name, change.before, change.after) == ("trainer.warmup_steps", "3", "4")
    with pytest.raises(SettingsNotResumable) as refusal:
        compare_settings(RUN, logged, with_settings({"trainer.warmup_steps": 3}))
    [refused] = refusal.value.changes
    assert (refused.name, refused.before) == ("algorithm.critic.critic_warmup_steps", "2")
    values = msgspec.json.decode(logged)
    values["trainer"]["warmup_steps"] = 3
    with pytest.raises(SettingNamedTwice):
        compare_settings(RUN, msgspec.json.encode(values).decode(), config)


@pytest.mark.parametrize(("digests", "proof"), [(True, "served"), (False, "names")])
def test_a_proof_is_read_by_its_former_name_which_was_true_or_false(digests, proof):
    values = msgspec.json.decode(TrainConfig().to_text())
    del values["explorer"]["proof"]
    values["sync"]["tensor_digests"] = digests
    assert TrainConfig.from_text(msgspec.json.encode(values).decode()).proof.checks == proof


def test_questions_may_move_and_may_not_change():
    """Invariant 3."""
    moved = compare({"task.questions": "/a/q.jsonl"}, {"task.questions": "/b/q.jsonl"})
    check_questions(RUN, "sha256:a", "sha256:a", moved)
    with pytest.raises(SettingsNotResumable) as refusal:
        check_questions(RUN, "sha256:a", "sha256:b", moved)
    [change] = refusal.value.changes
    assert (change.name, change.before) == ("task.questions", '"/a/q.jsonl"')
    with pytest.raises(SettingsNotResumable) as refusal:  # the file has other records
        check_questions(RUN, "sha256:a", "sha256:b")
    [change] = refusal.value.changes
    assert (change.before, change.after) == ("sha256:a", "sha256:b")


def test_sets_of_questions_may_move_and_may_not_change():
    """Invariant 3."""
    sets = {"a": {"questions": "/a/q.jsonl", "weight": 2.0}, "b": {"questions": "/b.jsonl"}}
    weighed = sets | {"a": {"questions": "/moved/q.jsonl", "weight": 3.0}}
    changes = compare({"task.sets": sets}, {"task.sets": weighed})
    assert [change.name for change in changes] == ["task.sets.a.questions", "task.sets.a.weight"]
    check_questions(RUN, "sha256:a", "sha256:a", changes)
    assert not changes_rewards(changes)
    with pytest.raises(SettingsNotResumable) as refusal:
        check_questions(RUN, "sha256:a", "sha256:b", changes)
    assert refusal.value.changes == changes
    options = {"a": sets["a"] | {"source": {"size": 3}}, "b": sets["b"]}
    assert changes_rewards(compare({"task.sets": sets}, {"task.sets": options}))


def test_changed_rewards_discard_earlier_answers():
    """Invariant 6."""
    assert changes_rewards(compare({}, {"rewards.function": "./rewards.py:score"}))
    assert not changes_rewards(compare({}, {"trainer.learning_rate": 1.0}))


def test_a_long_value_is_cut_in_the_event():
    [change] = compare({}, {"rewards.judge_prompt": "x" * 100_000})
    assert len(change.after) == 1000


def test_a_model_that_moved_is_the_same_behind_a_link_at_its_earlier_place(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").symlink_to("new")
    before, after = ({"model.path": str(tmp_path / name)} for name in ("old", "new"))
    assert compare(before, after) == ()
    with pytest.raises(SettingsNotResumable):
        compare(before, {"model.path": str(tmp_path / "other")})


def test_a_preset_with_the_same_values_may_be_named():
    [change] = compare({}, {"algorithm.preset": "grpo"})
    assert change.name == "algorithm.preset"


def test_another_task_or_another_time_for_its_rewards_changes_rewards():
    assert {"task.name", "rewards.deadline"} <= REWARDS
