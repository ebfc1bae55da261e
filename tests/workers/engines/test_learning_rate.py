"""Learning rates are functions of the step alone."""

import pytest

pytest.importorskip("torch")

from trinity_workers.engines.learning_rate import LearningRate

CASES = [
    ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"ramp_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ({"schedule": "linear", "steps": 4}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    ({"schedule": "linear", "ramp_steps": 2, "steps": 4}, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
    ({"schedule": "cosine", "steps": 4}, [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ({"schedule": "cosine", "ramp_steps": 8, "steps": 4}, [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]),
]


@pytest.mark.parametrize(("settings", "shares"), CASES)
def test_it_rises_over_the_ramp_and_falls_to_zero_after_the_last_step(settings, shares):
    rate = LearningRate(highest=3e-4, **settings)
    found = [rate.at(step) for step in range(6)]
    assert found == pytest.approx([3e-4 * share for share in shares], abs=1e-9)
