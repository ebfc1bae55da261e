"""Parallelism on FSDP: whole runs whose ranks share sequences or layers, and generate."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray", reason="Ray is not installed")

from tests.support.run_processes import small_run

pytestmark = [pytest.mark.heavy, pytest.mark.processes, pytest.mark.ray]

STEPS = 2


@pytest.mark.parametrize(
    ("shared", "resumes"),
    [
        ("context_parallel", False),
        # That a resume continues behind the last step: test_notice.py, on two ranks.
        pytest.param("context_parallel", True, marks=pytest.mark.nightly),
        pytest.param("tensor_parallel", True, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_share_sequences_or_layers_train_generate_and_save(
    cli, redis_url, run_id, tmp_path, policy_folder, shared, resumes
):
    file = small_run(
        tmp_path,
        policy_folder,
        trainer={"ranks": 2, shared: 2, "colocated": True, "fused_loss": True},
        sync={"max_staleness": 0},
        checkpoints={"interval": STEPS},
        steps=STEPS,
    )
    place = ("--run", run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = cli("train", str(file), *place, "--json", timeout=300)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)["log"]
    assert (summary["steps"], summary["failures"]) == (STEPS, 0)
    # All rows were trained on once: replicas, not ranks, share them.
    audit = cli("audit", run_id, "--redis-url", redis_url)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    if resumes:
        more = ("--set", f"steps={STEPS + 1}", "--json")
        again = cli("train", str(file), *place, *more, timeout=300)
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["log"]["steps"] == 1, "it goes on behind the last step"
