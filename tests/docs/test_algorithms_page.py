"""The page of losses and advantages names all of them, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

torch = pytest.importorskip("torch")
yaml = pytest.importorskip("yaml")

from tests.support.batches import make_batch, near  # noqa: E402
from tests.support.rollout_messages import PROMPT, experience, policy  # noqa: E402
from trinity_workers.algorithms.built_in import ADVANTAGES, POLICY_LOSSES  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.presets import PRESETS  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.settings import (  # noqa: E402
    SCALES,
    AlgorithmConfig,
    Normalisation,
)
from trinity_workers.algorithms.update import policy_update  # noqa: E402
from trinity_workers.config.files import read_config  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
STEP, OWN = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
OF_A_RUN, ALL, CHOSEN = (
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
)


def test_every_name_has_a_row():
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    for names in (PRESETS, ADVANTAGES, POLICY_LOSSES, get_args(Normalisation)):
        assert set(names) <= rows


def test_the_scales_are_those_that_an_advantage_takes():
    for name, scales in SCALES.items():
        row = re.search(rf"^\| `{re.escape(name)}` \|.*\| (\*\*.*?) \|", PAGE, re.MULTILINE)
        assert row[1] == ", ".join([f"**{scales[0]}**", *scales[1:]])


def test_the_settings_and_their_defaults_are_all_there():
    import msgspec

    assert msgspec.to_builtins(AlgorithmConfig()) == ALL


def test_the_step_gives_a_loss():
    space = {}
    exec(STEP, space)
    group = [experience(PROMPT, policy((4, 5)), sample=sample) for sample in range(2)]

    def logprobs_of(batch):
        return batch.behaviour_logprobs.clone().requires_grad_()

    loss = space["loss_of_a_step"]([group], 0, logprobs_of)
    near(loss, 0.0)  # equal rewards
    loss.backward()


def test_the_example_of_an_own_algorithm_runs(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    chosen = {
        name: value.replace("./own.py", str(path)) if isinstance(value, str) else value
        for name, value in CHOSEN.items()
    }
    config = read_settings(chosen)
    # Rewards 3, 1, 2: two below, two above, one of each; shares of three.
    batch = make_batch(
        [1, 2, 1], groups=[4] * 3, rewards=torch.tensor([3.0, 1.0, 2.0]), token_rewards=None
    )
    prepared = prepare(batch, config).batch
    near(prepared.advantages, [[2 / 3, 0], [-2 / 3, -2 / 3], [0, 0]])
    logprobs = (batch.behaviour_logprobs + 0.2 * batch.response_mask).requires_grad_()
    update = policy_update(prepared, logprobs, config)
    # 4 tokens of penalty 0.5 * 0.04; -e^0.2 (2/3 - 4/3).
    grown = torch.tensor(0.2, dtype=torch.float64).exp()
    near(update.loss(update.denominator), (4 * 0.02 + grown * 2 / 3) / 4)
    assert update.metrics.values()["penalty"] == pytest.approx(0.02)
    (gradient,) = torch.autograd.grad(update.loss_sum, logprobs)
    near(gradient[2], [2 * 0.5 * 0.2, 0.0])


def test_the_section_of_a_run_is_read(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(OF_A_RUN))
    algorithm = read_config(tmp_path / "run.yaml").checked().algorithm
    assert (algorithm.preset, algorithm.clip_high, algorithm.kl.coefficient) == ("dapo", 0.3, 0.01)
