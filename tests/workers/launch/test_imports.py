"""What a launcher loads before a run: torch and transformers take seconds in every process."""

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
    "module", ["launch.launcher", "launch.explore", "trainer.trainer", "explorer.explorer"]
)
def test_classes_of_actors_are_known_without_the_libraries_that_they_train_with(module):
    code = STARTS_A_RUN.format(module=f"trinity_workers.{module}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
