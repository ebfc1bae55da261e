"""Processes of one run, each started by its command, as Compose starts them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.waits import PATIENCE
from trinity_events.server import connect_sync
from trinity_schemas import Envelope, RunClosed, RunKeys, decode_envelope


def small_run(folder: Path, model: Path, **sections: Any) -> Path:
    """Write the configuration of a small run in a folder, for what is no matter of learning.

    Its one rank and its explorer start from the model as it is. It measures and saves nothing.

    Args:
        folder: Folder of the file.
        model: Hugging Face folder of the policy.
        sections: Settings that are laid over the small ones, by section.
    """
    settings: dict[str, Any] = {
        "model": {"path": str(model)},
        "trainer": {"ranks": 1},
        "evaluation": {"sets": {}},
        "rollouts": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "checkpoints": {"interval": 0},
    }
    for name, section in sections.items():
        within = settings.get(name, {})
        settings[name] = {**within, **section} if isinstance(section, dict) else section
    file = folder / "small.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    return file


class Processes:
    """Processes of a run, which share its servers and its folder, and no Ray cluster."""

    def __init__(self, folder: Path, run_id: str, redis_url: str, weights_url: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self.redis_url = redis_url
        self.env = os.environ | {
            "TRINITY_REDIS_URL": redis_url,
            "TRINITY_WEIGHTS_REDIS_URL": weights_url,
        }
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, command: str, *args: str, within: Sequence[str] = (), **streams: Any
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *within,
                *(sys.executable, "-m", "trinity_events", command, "--run", self.run_id),
                *("--checkpoint-root", str(self.folder), *args),
            ],
            env=self.env,
            text=True,
            start_new_session=True,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
        )
        self._started.append(process)
        return process

    def wait_for_announcements(self, count: int, process: subprocess.Popen[str]) -> None:
        give_up = time.monotonic() + 2 * PATIENCE
        with connect_sync(self.redis_url) as client:
            while client.xlen(RunKeys.of(self.run_id).announcements) < count:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < give_up, "waited in vain"
                time.sleep(0.02)

    def log(self) -> list[Envelope]:
        with connect_sync(self.redis_url) as client:
            entries = client.xrange(RunKeys.of(self.run_id).events)
        return [decode_envelope(fields[b"e"]) for _, fields in entries]

    def closed(self) -> list[str]:
        return [one.event.reason for one in self.log() if isinstance(one.event, RunClosed)]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = PATIENCE) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=seconds)
    assert "Traceback" not in error
    return process.returncode, out, error
