"""A run without explorers: the ranks of the trainer answer its rollouts, between its steps."""

import json
from pathlib import Path

import pytest

from tests.support.pipeline import events_of
from trinity_schemas import (
    EvaluationFinished,
    ExplorerStatusChanged,
    StepTrained,
    VersionOpened,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.ray,
    pytest.mark.megatron,
    pytest.mark.heavy,
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "train" / "ppo_megatron.yaml"
SETTINGS = (
    "trainer.colocated=true",
    "trainer.rollout_tensor_parallel=1",  # two ranks train one replica, and generate as two
    "sync.max_staleness=0",
    "rollouts.prompts_per_step=2",
    "rollouts.samples_per_prompt=2",
    "evaluation.sets={held-out: {count: 3, samples: 1}}",
    "algorithm.critic.critic_warmup_steps=1",
)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
async def test_a_run_of_ppo_on_megatron_answers_its_rollouts_by_its_own_ranks(
    cli, log, redis_url, tmp_path, policy_folder
):
    settings = (*SETTINGS, f"model.path={policy_folder}", "steps=2")
    words = [word for setting in settings for word in ("--set", setting)]
    place = ("--run", log.run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = cli("train", str(EXAMPLE), *words, *place, "--json", timeout=1000)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["transport"], summary["log"]["failures"]) == ("none", 0)
    checkpoint = tmp_path / log.run_id / "global_step_2"
    assert all((checkpoint / role / "model").is_dir() for role in ("actor", "critic"))

    first, second = [entry.event for entry in await events_of(log, StepTrained)]
    assert first.staleness == second.staleness == {0: 4}
    assert "critic/vf_loss" in first.metrics
    assert "pg_loss" not in first.metrics, "the critic is trained alone first"
    assert {"critic/vf_explained_var", "pg_loss"} <= second.metrics.keys()
    evaluated = [entry.event.version.step for entry in await events_of(log, EvaluationFinished)]
    assert evaluated == [0, 2]
    assert not await events_of(log, VersionOpened), "no weights travel"
    assert not await events_of(log, ExplorerStatusChanged)
    audited = cli("audit", log.run_id, "--redis-url", redis_url, "--json")
    assert audited.returncode == 0, audited.stdout
