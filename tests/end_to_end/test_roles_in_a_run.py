"""The example of veRL's roles: a run with events, versions that an explorer serves, checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipeline import reducer_process
from tests.support.waits import PATIENCE, child
from trinity_events.checkpoints.manifest import listed_sums

EXAMPLE = Path(__file__).parents[2] / "examples" / "roles.py"


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.ray
def test_the_example_trains_publishes_saves_and_is_followed(redis_url, tmp_path, cli):
    env = {
        **os.environ,
        "TRINITY_REDIS_URL": redis_url,
        "CHECKPOINT_ROOT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    example = [sys.executable, str(EXAMPLE)]
    with reducer_process(redis_url, "roles", tmp_path), child(example, env=env) as trainer:
        followed = subprocess.run(
            [*example, "follow"],
            env=env,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert followed.returncode == 0, followed.stderr
        assert trainer.wait(PATIENCE) == 0
    assert "explorer serves step 6: " in followed.stdout.splitlines()[-1]
    shown = cli("status", "roles").stdout
    assert "trainer finished at step 6" in shown
    for kind in ("weights", "state_dict", "checkpoint"):
        assert re.search(rf"^{kind} +6 ", shown, re.MULTILINE), kind
    for step in (3, 6):
        names = listed_sums(tmp_path / f"roles/global_step_{step}")
        for rank in range(2):
            assert f"actor/model_world_size_2_rank_{rank}.pt" in names
            assert f"actor/optim_world_size_2_rank_{rank}.pt" in names
