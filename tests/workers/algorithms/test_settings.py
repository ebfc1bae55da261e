"""Claims about settings: presets, what they need, and contradictions, each in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinity_workers.algorithms.errors import AlgorithmError
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


WRONG = [
    ({"preset": "dr-grpo"}, "unknown preset 'dr-grpo': did you mean 'dr_grpo'?"),
    ({"advantage": "gpo"}, "unknown advantage 'gpo': did you mean 'grpo'?"),
    ({"loss": "pppo"}, "unknown loss 'pppo': did you mean 'ppo'?"),
    ({"clip": 0.2}, "algorithm cannot be used: Object contains unknown field `clip`"),
    ({"kl": {"estimator": "k4"}}, "algorithm.kl.estimator cannot be used: Invalid enum value"),
    ({"dual_clip": 0.9}, "algorithm.dual_clip cannot be used: Expected `float` > 1"),
    ({"advantage": "gae"}, "advantage gae needs the values of a critic: set critic.use true"),
    ({"critic": {"use": True}}, "advantage grpo uses no critic"),
    ({"preset": "rloo", "scale": "group"}, "rloo cannot be divided by the deviation of its group"),
    ({"advantage": "gae", "critic": {"use": True}, "scale": "group"}, "scale is batch or none"),
    ({"preset": "gspo", "normalisation": "token-mean"}, "gspo has one ratio for a whole response"),
    ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip is 3, and it bounds the ratio of loss ppo"),
    ({"loss": "supervised"}, "loss supervised takes no advantages: set advantage none"),
    ({"loss": "divergence"}, "loss divergence takes no advantages: set advantage none"),
    ({"advantage": "none"}, "loss ppo learns nothing from advantage none"),
    (
        {"kl": {"estimator": "k1", "coefficient": 0.1}},
        "the gradient of kl.estimator k1 in the loss is 0 on average",
    ),
    (
        {"kl": {"where": "reward", "coefficient": 0.1, "weighted": True}},
        "a reward is fixed before the ratio is known",
    ),
    (
        {"preset": "gspo", "kl": {"coefficient": 0.1, "weighted": True}},
        "kl.weighted needs one for each token",
    ),
    (
        {"preset": "distillation", "kl": {"where": "reward", "coefficient": 0.1}},
        "advantage teacher takes no rewards: set kl.where loss",
    ),
    (
        {"importance_sampling": {"weights": "token"}},
        "the ratio of loss ppo to the behaviour policy corrects already",
    ),
    (
        {"preset": "supervised", "importance_sampling": {"mask": "icepop"}},
        "loss supervised corrects for no sampling policy",
    ),
    (
        {
            "preset": "gspo",
            "importance_sampling": {"ratio_to": "proximal", "weights": "token"},
        },
        "set importance_sampling.weights sequence or none",
    ),
    (
        {"importance_sampling": {"mask": "geometric", "mask_low": 2, "mask_high": 1.5}},
        "mask_low 2 is not below importance_sampling.mask_high 1.5",
    ),
    (
        {
            "importance_sampling": {
                "ratio_to": "proximal",
                "weights": "sequence",
                "mask": "icepop",
            }
        },
        "icepop judges single tokens",
    ),
    ({"filters": {"part": "right"}}, "filters.part is right, and it is compared when groups"),
    ({"preset": "dr_grpo", "deviation_epsilon": 1e-6}, "it is added to the deviation of a group"),
    ({"preset": "rloo", "deviation_epsilon": 1e-6}, "advantage rloo is not divided here"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_settings_that_cannot_work_are_refused_in_one_sentence(values, message):
    with pytest.raises(AlgorithmError) as caught:
        read_settings(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_contradiction_has_the_paths_of_its_settings():
    ((paths, message),) = find_contradictions(AlgorithmConfig(advantage="gae"))
    assert paths == ("algorithm.advantage", "algorithm.critic.use")
    assert message.startswith("advantage gae needs")


@pytest.mark.processes
def test_settings_are_read_without_torch():
    code = (
        "import sys, trinity_workers.algorithms.rules as s; s.read_settings({'preset': 'dapo'});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
