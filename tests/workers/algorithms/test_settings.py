"""Claims about settings: presets, what they need, and contradictions, each in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.errors import raises
from trinity_workers.algorithms.errors import (
    AlgorithmContradiction,
    AlgorithmError,
    AlgorithmSettingRefused,
    UnknownPreset,
)
from trinity_workers.algorithms.presets import PRESETS
from trinity_workers.algorithms.rules import (
    find_contradictions,
    read_settings,
)
from trinity_workers.algorithms.settings import (
    SCALES,
    AlgorithmConfig,
)


def test_without_a_preset_the_settings_are_those_of_the_trainer_today():
    config = read_settings({})
    assert config == AlgorithmConfig()
    assert (config.advantage, config.loss, config.normalisation) == ("grpo", "ppo", "token-mean")
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.2, 0.2, None)
    assert not config.needed_fields


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_contradicts_nothing_and_is_read_again_as_it_was_written(name):
    import msgspec

    config = read_settings({"preset": name})
    assert config.preset == name
    written = msgspec.json.decode(msgspec.json.encode(config))
    assert read_settings(written) == config
    assert list(find_contradictions(config)) == []


def test_presets_are_the_published_algorithms():
    dapo = read_settings({"preset": "dapo"})
    assert (dapo.clip_low, dapo.clip_high, dapo.normalisation) == (0.2, 0.28, "token-mean")
    assert dapo.filters.zero_variance == "resample"
    assert dapo.overlong.buffer == 0.2
    assert read_settings({"preset": "grpo"}).normalisation == "sequence-mean"
    dr_grpo = read_settings({"preset": "dr_grpo"})
    assert (dr_grpo.divisor, dr_grpo.normalisation) == ("none", "constant")
    ppo = read_settings({"preset": "ppo"})
    assert ppo.needed_fields == {"values"}
    assert (ppo.kl.where, ppo.kl.estimator) == ("reward", "k1")


def test_settings_are_laid_over_those_of_the_preset_section_by_section():
    config = read_settings(
        {"preset": "dapo", "clip_high": 0.3, "overlong": {"penalty": 0.5}, "kl": {"coefficient": 1}}
    )
    assert config.clip_high == 0.3
    assert (config.overlong.buffer, config.overlong.penalty) == (0.2, 0.5)
    assert PRESETS["dapo"]["overlong"] == {"buffer": 0.2}, "the preset itself stays"
    assert config.needed_fields == {"reference_logprobs"}


def test_the_runs_limit_stands_where_there_is_no_own():
    config = read_settings({"overlong": {"buffer": 0.2, "limit": 5}}).with_limit(9)
    assert (config.overlong.limit, config.normalisation_length) == (5, 9)


def test_an_estimator_divides_by_its_own_deviation_unless_another_is_set():
    for name, scales in SCALES.items():
        config = AlgorithmConfig(advantage=name)
        assert config.divisor == scales[0]
    assert AlgorithmConfig(scale="batch").divisor == "batch"
    assert AlgorithmConfig(advantage="my:own").divisor == "none"


WRONG: list[tuple[dict, type[AlgorithmError], dict[str, object]]] = [
    ({"preset": "dr-grpo"}, UnknownPreset, {"name": "dr-grpo", "nearest": "dr_grpo"}),
    (
        {"advantage": "gpo"},
        AlgorithmContradiction,
        {"settings": ("algorithm.advantage",), "values": ("gpo",)},
    ),
    (
        {"loss": "pppo"},
        AlgorithmContradiction,
        {"settings": ("algorithm.loss",), "values": ("pppo",)},
    ),
    ({"clip": 0.2}, AlgorithmSettingRefused, {"path": "algorithm"}),
    ({"kl": {"estimator": "k4"}}, AlgorithmSettingRefused, {"path": "algorithm.kl.estimator"}),
    ({"dual_clip": 0.9}, AlgorithmSettingRefused, {"path": "algorithm.dual_clip"}),
    (
        {"advantage": "gae"},
        AlgorithmContradiction,
        {"settings": ("algorithm.advantage", "algorithm.critic.use"), "values": ("gae", False)},
    ),
    (
        {"critic": {"use": True}},
        AlgorithmContradiction,
        {"settings": ("algorithm.critic.use", "algorithm.advantage"), "values": (True, "grpo")},
    ),
    (
        {"preset": "rloo", "scale": "group"},
        AlgorithmContradiction,
        {"settings": ("algorithm.advantage", "algorithm.scale"), "values": ("rloo", "group")},
    ),
    (
        {"advantage": "gae", "critic": {"use": True}, "scale": "group"},
        AlgorithmContradiction,
        {"settings": ("algorithm.advantage", "algorithm.scale"), "values": ("gae", "group")},
    ),
    (
        {"preset": "gspo", "normalisation": "token-mean"},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.loss", "algorithm.normalisation"),
            "values": ("gspo", "token-mean"),
        },
    ),
    (
        {"preset": "gspo", "dual_clip": 3.0},
        AlgorithmContradiction,
        {"settings": ("algorithm.dual_clip", "algorithm.loss"), "values": (3.0, "gspo")},
    ),
    (
        {"loss": "supervised"},
        AlgorithmContradiction,
        {"settings": ("algorithm.loss", "algorithm.advantage"), "values": ("supervised", "grpo")},
    ),
    (
        {"loss": "divergence"},
        AlgorithmContradiction,
        {"settings": ("algorithm.loss", "algorithm.advantage"), "values": ("divergence", "grpo")},
    ),
    (
        {"advantage": "none"},
        AlgorithmContradiction,
        {"settings": ("algorithm.advantage", "algorithm.loss"), "values": ("none", "ppo")},
    ),
    (
        {"kl": {"estimator": "k1", "coefficient": 0.1}},
        AlgorithmContradiction,
        {
            "settings": (
                "algorithm.kl.coefficient",
                "algorithm.kl.where",
                "algorithm.kl.estimator",
                "algorithm.kl.weighted",
            ),
            "values": (0.1, "loss", "k1", False),
        },
    ),
    (
        {"kl": {"where": "reward", "coefficient": 0.1, "weighted": True}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.kl.coefficient", "algorithm.kl.weighted", "algorithm.kl.where"),
            "values": (0.1, True, "reward"),
        },
    ),
    (
        {"preset": "gspo", "kl": {"coefficient": 0.1, "weighted": True}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.kl.coefficient", "algorithm.kl.weighted", "algorithm.loss"),
            "values": (0.1, True, "gspo"),
        },
    ),
    (
        {"preset": "distillation", "kl": {"where": "reward", "coefficient": 0.1}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.kl.coefficient", "algorithm.kl.where", "algorithm.advantage"),
            "values": (0.1, "reward", "teacher"),
        },
    ),
    (
        {"importance_sampling": {"weights": "token"}},
        AlgorithmContradiction,
        {
            "settings": (
                "algorithm.importance_sampling.weights",
                "algorithm.loss",
                "algorithm.importance_sampling.ratio_to",
            ),
            "values": ("token", "ppo", "behaviour"),
        },
    ),
    (
        {"preset": "supervised", "importance_sampling": {"mask": "icepop"}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.importance_sampling.mask", "algorithm.loss"),
            "values": ("icepop", "supervised"),
        },
    ),
    (
        {"preset": "gspo", "importance_sampling": {"ratio_to": "proximal", "weights": "token"}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.loss", "algorithm.importance_sampling.weights"),
            "values": ("gspo", "token"),
        },
    ),
    (
        {"importance_sampling": {"mask": "geometric", "mask_low": 2, "mask_high": 1.5}},
        AlgorithmContradiction,
        {
            "settings": (
                "algorithm.importance_sampling.mask_low",
                "algorithm.importance_sampling.mask_high",
            ),
            "values": (2.0, 1.5),
        },
    ),
    (
        {"importance_sampling": {"ratio_to": "proximal", "weights": "sequence", "mask": "icepop"}},
        AlgorithmContradiction,
        {
            "settings": (
                "algorithm.importance_sampling.mask",
                "algorithm.importance_sampling.weights",
            ),
            "values": ("icepop", "sequence"),
        },
    ),
    (
        {"filters": {"part": "right"}},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.filters.part", "algorithm.filters.zero_variance"),
            "values": ("right", "keep"),
        },
    ),
    (
        {"preset": "dr_grpo", "deviation_epsilon": 1e-06},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.deviation_epsilon", "algorithm.advantage", "algorithm.scale"),
            "values": (1e-06, "grpo", "none"),
        },
    ),
    (
        {"preset": "rloo", "deviation_epsilon": 1e-06},
        AlgorithmContradiction,
        {
            "settings": ("algorithm.deviation_epsilon", "algorithm.advantage", "algorithm.scale"),
            "values": (1e-06, "rloo", None),
        },
    ),
]


@pytest.mark.parametrize(("values", "error", "attributes"), WRONG)
def test_settings_that_cannot_work_are_refused_in_one_sentence(values, error, attributes):
    with raises(error, **attributes) as caught:
        read_settings(values)
    assert "\n" not in str(caught.value)


def test_a_contradiction_has_the_paths_of_its_settings():
    (conflict,) = find_contradictions(AlgorithmConfig(advantage="gae"))
    assert conflict.paths == ("algorithm.advantage", "algorithm.critic.use")
    assert conflict.values == ("gae", False)
    assert conflict.sentence.startswith("advantage gae needs")


@pytest.mark.processes
def test_settings_are_read_without_torch():
    code = (
        "import sys, trinity_workers.algorithms.rules as s; s.read_settings({'preset': 'dapo'});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
