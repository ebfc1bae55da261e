"""A reward service that goes away pauses a real run, which continues when it answers again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ray")

from tests.support.own_models import own_model

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"
PATIENCE = 300.0


class RewardService:
    """Reward service that goes away after some calls, in one of two ways, until it is let back."""

    def __init__(self, calls: int, status: int | None) -> None:
        self.calls, self.status = calls, status
        self.is_away, self.may_return = threading.Event(), threading.Event()
        self.server = self.listen(0)
        self.port = self.server.server_address[1]
        self.refused = 0

    def listen(self, port: int) -> ThreadingHTTPServer:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {})

            def do_POST(self) -> None:
                body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
                service.calls -= 1
                if service.calls == 0:
                    service.is_away.set()
                if service.is_away.is_set() and not service.may_return.is_set():
                    service.refused += 1
                    self.reply(service.status or 503, {})
                else:
                    rewards = [float(len(answer["text"]) % 3) for answer in body["answers"]]
                    self.reply(200, {"rewards": rewards})

            def reply(self, status: int, value: object) -> None:
                payload = msgspec.json.encode(value)
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def hang_up(self) -> None:
        """Close the socket that listens, so that connections are refused."""
        self.server.shutdown()
        self.server.server_close()

    def come_back(self) -> None:
        self.may_return.set()
        if self.status is None:
            self.server = self.listen(self.port)


@contextmanager
def training(folder: Path, home: Path, settings: dict) -> Iterator[subprocess.Popen[str]]:
    """Train in the background, as a configuration says."""
    (folder / "own.yaml").write_text(msgspec.json.encode(settings).decode())
    command = [sys.executable, "-m", "trinity_events", "train", str(folder / "own.yaml"), "--json"]
    environment = os.environ | {
        "TRINITY_HOME": str(home),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def explain(home: Path) -> dict:
    command = [sys.executable, "-m", "trinity_events", "explain", "away", "--json"]
    environment = os.environ | {"TRINITY_HOME": str(home)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return msgspec.json.decode(done.stdout)


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (None, 0.0),  # until `explain` names it: more than the five seconds of a wait's report
        pytest.param(None, 60.0, marks=pytest.mark.nightly),
        pytest.param(500, 60.0, marks=pytest.mark.nightly),
    ],
)
def test_a_service_that_is_away_costs_no_prompt(tmp_path, status, seconds):
    home, folder = tmp_path / "h", tmp_path / "f"
    home.mkdir()
    folder.mkdir()
    (folder / "questions.jsonl").write_bytes((EXAMPLE / "questions.jsonl").read_bytes())
    own_model(folder / "model", "qwen3")
    service = RewardService(6, status)
    url = f"http://127.0.0.1:{service.port}/judge"
    settings = {
        "name": "away",
        "steps": 4,
        "model": {"path": "./model"},
        "task": {"questions": "./questions.jsonl"},
        "rewards": {"service": url, "deadline": 10},
        "rollouts": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
        "algorithm": {"preset": "dr_grpo"},
        "evaluation": {"sets": {"held-out": {"count": 4}}},
        "checkpoints": {"interval": 0},
        # Shorter than the long outage, which must not count for it.
        "sync": {"timeout": 45},
    }
    with training(folder, home, settings) as run:
        assert service.is_away.wait(PATIENCE), run.communicate(timeout=60)[1][-4000:]
        began = time.monotonic()
        if status is None:
            service.hang_up()
        while True:
            assert run.poll() is None, run.communicate()[1][-4000:]
            assert time.monotonic() - began < PATIENCE
            causes = explain(home).get("causes", [])  # absent while there are none
            if causes and "fails for every request" in causes[0]["sentence"]:
                break
        assert url in causes[0]["sentence"], causes
        # The length of the outage is what is tested.
        time.sleep(max(seconds - (time.monotonic() - began), 0.0))
        service.come_back()
        out, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, errors[-4000:]
    summary = msgspec.json.decode(out.splitlines()[-1])
    assert (summary["outcome"], summary["log"]["dropped"]) == ("finished", {})
    assert "a reward failed" not in errors
    [held_out] = summary["evaluations"].values()
    assert (held_out["first_step"], held_out["last_step"]) == (0, 4)
    audit = [sys.executable, "-m", "trinity_events", "audit", "away", "--json"]
    environment = os.environ | {"TRINITY_HOME": str(home)}
    books = subprocess.run(audit, env=environment, check=True, capture_output=True, text=True)
    assert msgspec.json.decode(books.stdout)["balanced"]
