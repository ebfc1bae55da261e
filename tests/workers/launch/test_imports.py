"""What a launcher loads before a run: torch and transformers take seconds in every process."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.processes

STARTS_A_RUN = """
import sys
import {module}
print(*({{"torch", "transformers", "ray"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("module", "loaded"),
    [
        ("launch.launcher", []),
        ("launch.explore", []),
        ("trainer.trainer", []),
        ("explorer.explorer", []),
        # It calls the ranks, of which it imports none.
        ("trainer.ray_backend", ["ray"]),
    ],
)
def test_classes_of_actors_are_known_without_the_libraries_that_they_train_with(module, loaded):
    code = STARTS_A_RUN.format(module=f"trinity_workers.{module}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == loaded


CHECKS_A_RUN = """
import sys
import anyio
from functools import partial
from pathlib import Path
from trinity_workers.config.files import read_config
from trinity_workers.launch.run_check import check_run
import trinity_workers.trainer.rank_actors
config, root = read_config(Path(sys.argv[1])).checked(), Path(sys.argv[1]).parent
anyio.run(partial(check_run, config, root, alone=True, ray_address=None))
print(*({"torch", "transformers"} & set(sys.modules)))
"""


def test_a_run_is_checked_and_its_ranks_are_started_without_torch(tmp_path, policy_folder):
    (tmp_path / "reward.py").write_text("def reward(question, answer):\n    return 1.0\n")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 40)
    settings = {
        "model": {"path": str(policy_folder)},
        "task": {"questions": "questions.jsonl"},
        "rewards": {"function": "reward.py:reward"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-c", CHECKS_A_RUN, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
