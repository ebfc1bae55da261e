"""Claims about names: built in, by entry point, and a user's own functions."""

from __future__ import annotations

import sys

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch, near  # noqa: E402
from trinity_workers.algorithms import built_in, registry  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.settings import SCALES, AlgorithmConfig  # noqa: E402
from trinity_workers.algorithms.update import policy_update  # noqa: E402
from trinity_workers.tasks.errors import FunctionUnusable, ObjectUnusable  # noqa: E402

OWN = '''
from trinity_workers.algorithms.types import Advantages, TokenLosses


def raw(batch, config, reduce):
    """Take the rewards as they are."""
    scores = batch.token_rewards.sum(-1, keepdim=True) * config.options["factor"]
    return Advantages(scores * batch.response_mask)


def linear(tokens, config):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return TokenLosses(-ratio * tokens.advantages, {"own": ratio})


def alone(tokens):
    return tokens
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_algorithm.py"
    path.write_text(OWN)
    return path


def test_every_built_in_name_is_a_function_with_a_source_in_its_docstring():
    for name in built_in.ADVANTAGES:
        assert registry.find_advantage(name).__doc__
    for name in built_in.POLICY_LOSSES:
        assert registry.find_policy_loss(name).__doc__
    assert set(built_in.ADVANTAGES) == set(SCALES)


def test_functions_of_a_file_are_used_by_their_names(own):
    config = AlgorithmConfig(advantage=f"{own}:raw", loss=f"{own}:linear", options={"factor": 3.0})
    batch = make_batch([1, 2], rewards=torch.tensor([1.0, -1.0]), token_rewards=None)
    prepared = prepare(batch, config).batch
    near(prepared.advantages, [[3, 0], [-3, -3]])
    update = policy_update(prepared, batch.behaviour_logprobs, config)
    near(update.loss(update.denominator), -(3 - 3 - 3) / 3)
    assert update.metrics.values()["own"] == pytest.approx(1.0)
    # Whatever the settings refuse for built-in names is left to a function of one's own.
    assert read_settings({"advantage": f"{own}:raw", "critic": {"use": True}})


def test_a_package_offers_its_functions_by_entry_points(tmp_path, own, monkeypatch):
    about = tmp_path / "own_algorithm-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-algorithm\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[trinity_events.advantages]\nraw = own_algorithm:raw\n"
        "[trinity_events.policy_losses]\nlinear = own_algorithm:linear\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert registry.find_advantage("raw").__name__ == "raw"
        assert registry.find_policy_loss("linear").__name__ == "linear"
    finally:
        registry.find_advantage.cache_clear()
        registry.find_policy_loss.cache_clear()
        sys.modules.pop("own_algorithm", None)


@pytest.mark.parametrize(
    ("name", "error", "attributes"),
    [
        ("gpo", ObjectUnusable, {"fault": "unknown", "nearest": "grpo"}),
        ("nowhere:fn", ObjectUnusable, {"fault": "module", "place": "nowhere"}),
        (
            "math:pi",
            FunctionUnusable,
            {"fault": "callable", "signature": "(batch, config, reduce)"},
        ),
    ],
)
def test_a_name_that_is_no_advantage_is_refused_in_one_sentence(name, error, attributes):
    with raises(error, kind="advantage", name=name, **attributes):
        registry.find_advantage(name)


def test_a_function_of_other_arguments_is_refused_before_training(own):
    with raises(FunctionUnusable, fault="arguments", signature="(tokens, config)"):
        registry.find_policy_loss(f"{own}:alone")
