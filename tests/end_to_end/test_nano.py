"""The run in one file trains, also after its trainer was killed, and no prompt twice."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.pipeline import reducer_process
from tests.support.waits import PATIENCE, child
from trinity_events import blocking

pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nano.py"


def test_it_is_one_file_of_at_most_300_lines_without_the_trainers_package():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(r"^\s*(from|import) trinity_workers", text, re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.processes
def test_a_killed_trainer_resumes_and_no_prompt_is_trained_twice(redis_url, tmp_path, cli):
    env = {
        **os.environ,
        "TRINITY_REDIS_URL": redis_url,
        "CHECKPOINT_ROOT": str(tmp_path),
        "STEPS": "30",
    }

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, str(EXAMPLE), *arguments]
        return parts.enter_context(child(command, stdout=subprocess.PIPE, env=env, text=True))

    with ExitStack() as parts:
        parts.enter_context(reducer_process(redis_url, "nano", tmp_path))
        explorers = [start("explore", "0"), start("explore", "1")]
        killed = start("train")
        assert killed.stdout.readline().startswith("step 20 ")
        explorers.pop().kill()
        blocking.wait_ready("nano", 20, "checkpoint", redis_url=redis_url, deadline=PATIENCE)
        killed.kill()
        killed.wait()
        resumed = start("train")
        output, _ = resumed.communicate()
        assert resumed.returncode == 0
        assert output.splitlines()[-1].startswith("step 30 ")
        explorers[0].communicate()
        assert explorers[0].returncode == 0
    audit = cli("audit", "nano")
    assert audit.returncode == 0, audit.stdout
    assert "240" in audit.stdout
