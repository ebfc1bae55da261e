"""Learning rates are functions of the step alone."""

import pytest

torch = pytest.importorskip("torch")

from trinity_workers.engines.learning_rate import (  # noqa: E402
    LearningRate,
    apply_learning_rate,
)

CASES = [
    ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ({"schedule": "linear", "steps": 4}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    ({"schedule": "linear", "warmup_steps": 2, "steps": 4}, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
    ({"schedule": "cosine", "steps": 4}, [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ({"schedule": "cosine", "warmup_steps": 8, "steps": 4}, [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]),
]


@pytest.mark.parametrize(("settings", "shares"), CASES)
def test_it_rises_over_the_ramp_and_falls_to_zero_after_the_last_step(settings, shares):
    rate = LearningRate(highest=3e-4, **settings)
    rates = [rate.at(step) for step in range(6)]
    assert rates == pytest.approx([3e-4 * share for share in shares], abs=1e-9)


def trained(steps, rate, *, state=None):
    """A scalar, and its learning rates in the steps after a state was loaded."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([parameter], lr=rate.highest)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate.share)
    if state is not None:
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        apply_learning_rate(scheduler, rate.highest)
    rates = []
    for _ in range(steps):
        parameter.grad = torch.ones(())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates, (optimizer.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize(
    "later",
    [
        LearningRate(highest=1e-5, warmup_steps=4),
        LearningRate(highest=1e-3, schedule="linear", steps=8),
        LearningRate(highest=1e-3, warmup_steps=4),
    ],
)
def test_the_rate_of_the_configuration_counts_over_that_of_the_loaded_state(later):
    _, state = trained(2, LearningRate(highest=1e-3, warmup_steps=4))
    rates, _ = trained(4, later, state=state)
    assert rates == [later.at(step) for step in range(2, 6)], "to the bit"
