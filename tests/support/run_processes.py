"""Processes of one run, each started by its command, as Compose starts them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from tests.support.pipeline import OUTCOMES
from tests.support.sessions import find_process
from tests.support.waits import PATIENCE, wait_until
from trinity_events.log import position
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


def count_outcomes(client: redis.Redis, run_id: str) -> int:
    """Count the outcomes of steps and saves that are announced."""
    entries = client.xrange(RunKeys.of(run_id).announcements)
    events = [decode_envelope(fields[b"e"]).event for _, fields in entries]
    return sum(isinstance(event, OUTCOMES) for event in events)


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
        self.urls: dict[str, str] = {}
        """Command to the URL of its user, where that is another; for log and weights."""
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
            env=self._env_of(command),
            text=True,
            start_new_session=True,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
        )
        self._started.append(process)
        return process

    def _env_of(self, command: str) -> dict[str, str]:
        names = ("TRINITY_REDIS_URL", "TRINITY_WEIGHTS_REDIS_URL")
        url = self.urls.get(command)
        return self.env if url is None else self.env | dict.fromkeys(names, url)

    def wait_for_announcements(self, count: int, process: subprocess.Popen[str]) -> None:
        """Wait until ``count`` outcomes of steps and saves are announced."""
        give_up = time.monotonic() + 2 * PATIENCE
        with connect_sync(self.redis_url) as client:
            while count_outcomes(client, self.run_id) < count:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < give_up, "waited in vain"
                time.sleep(0.02)

    def wait_for_reports(self) -> None:
        """Wait until the reducer has moved all reports of now into the events."""
        keys = RunKeys.of(self.run_id)
        with connect_sync(self.redis_url) as client:
            newest = client.xrevrange(keys.reports, count=1)
            last = position(newest[0][0].decode()) if newest else (0, 0)
            wait_until(lambda: position((client.get(keys.reported) or b"0-0").decode()) >= last)

    def log(self) -> list[Envelope]:
        with connect_sync(self.redis_url) as client:
            entries = client.xrange(RunKeys.of(self.run_id).events)
        return [decode_envelope(fields[b"e"]) for _, fields in entries]

    def closed(self) -> list[str]:
        return [
            envelope.event.reason
            for envelope in self.log()
            if isinstance(envelope.event, RunClosed)
        ]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = PATIENCE) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=seconds)
    assert "Traceback" not in error
    return process.returncode, out, error


class TrainRun:
    """Run of all parts, by ``train`` in a session of its own, and the lines it has printed.

    Args:
        file: Configuration of the run.
        args: Further arguments of ``train``.
    """

    def __init__(self, file: Path, *args: str) -> None:
        self.stderr_lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trinity_events", "train", str(file), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.stderr_lines += self.process.stderr

    def until(self, met: Callable[[], Any]) -> Any:
        """Wait for a condition while the run goes on."""
        give_up = time.monotonic() + 3 * PATIENCE
        while not (result := met()):
            assert self.process.poll() is None, "".join(self.stderr_lines)
            assert time.monotonic() < give_up, "waited in vain"
            time.sleep(0.02)
        return result

    def actor(self, name: str) -> int:
        """Return the process id of one of its Ray actors."""
        return find_process(self.process.pid, f"ray::{name}".encode())

    def ended(self) -> tuple[int, str, str]:
        """Wait for its end; return its status, its output, and the lines of its progress."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        status = self.process.wait(3 * PATIENCE)
        self._listening.join()
        return status, out, "".join(self.stderr_lines)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listening.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
