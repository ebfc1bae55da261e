"""`trinity-events train` runs the examples from their files."""

import json
from pathlib import Path

import pytest

from tests.support.pipeline import events_of
from trinity_schemas import RunOpened, StepTrained, decode_envelope
from trinity_workers.config.files import read_config
from trinity_workers.config.train_config import TrainConfig

pytestmark = [pytest.mark.heavy, pytest.mark.server, pytest.mark.processes, pytest.mark.ray]
EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
FEW = ("steps=2", "rollouts.prompts_per_step=2", "rollouts.samples_per_prompt=2")


@pytest.mark.nightly("end_to_end/test_demo.py::test_its_configuration_is_in_log_and_folder")
@pytest.mark.timeout(600)
async def test_an_example_trains_and_its_configuration_is_in_log_and_folder(
    cli, log, redis_url, tmp_path
):
    """On FSDP, with the model that a run makes; test_resume.py has the example on Megatron."""
    settings = [word for setting in (*FEW, "evaluation.sets={}") for word in ("--set", setting)]
    place = ("--run", log.run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = cli("train", str(EXAMPLES / "fsdp.yaml"), *settings, *place, "--json", timeout=500)
    assert result.returncode == 0, result.stderr
    log_of_run = json.loads(result.stdout)["log"]
    assert (log_of_run["steps"], log_of_run["versions_published"]) == (2, 3)
    assert (log_of_run["versions_unaccounted"], log_of_run["failures"]) == (0, 0)
    assert log_of_run["checkpoints_ready"] == 1
    folder = tmp_path / log.run_id
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        assert (folder / name).read_text() == "2"

    entries = await log.read()
    [opened] = [
        event
        for entry in entries
        if isinstance(event := decode_envelope(entry.payload).event, RunOpened)
    ]
    logged = TrainConfig.from_text(opened.config)
    saved = read_config(folder / "config.yaml").checked()
    assert logged == saved
    assert (saved.steps, saved.trainer.engine, saved.rollouts.prompts_per_step) == (2, "fsdp", 2)


@pytest.mark.nightly(
    "end_to_end/test_colocated.py::test_a_run_of_ppo_on_megatron_answers_its_rollouts_by_its_own_ranks"
)
@pytest.mark.timeout(600)
async def test_ppo_trains_a_critic_that_is_saved_and_not_published(
    cli, log, redis_url, tmp_path, policy_folder
):
    few = (*FEW, "evaluation.sets={}", "algorithm.critic.critic_warmup_steps=1")
    settings = [
        word for setting in (*few, f"model.path={policy_folder}") for word in ("--set", setting)
    ]
    place = ("--run", log.run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = cli("train", str(EXAMPLES / "ppo.yaml"), *settings, *place, timeout=500)
    assert result.returncode == 0, result.stderr
    first, second = [entry.event.metrics for entry in await events_of(log, StepTrained)]
    assert "critic/vf_loss" in first
    assert "pg_loss" not in first, "the critic is trained alone first"
    assert {"critic/vf_explained_var", "pg_loss"} <= second.keys()
    checkpoint = tmp_path / log.run_id / "global_step_2"
    shards = sorted(path.name for path in (checkpoint / "critic").glob("*.pt"))
    assert shards == sorted(path.name for path in (checkpoint / "actor").glob("*.pt"))
    assert len(shards) == 4, "model and optimizer of two ranks"
