"""The Ray that `train` starts on its own host."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from tests.support.errors import raises
from tests.support.waits import PATIENCE
from trinity_workers.launch.processes import RayNotStarted, local_ray

pytestmark = [pytest.mark.ray, pytest.mark.heavy, pytest.mark.processes]


def test_ray_starts_although_the_folder_of_temporary_files_has_a_long_name(tmp_path):
    room = tmp_path / ("long" * 15)  # as those of jobs have that a batch system runs
    room.mkdir()
    start = (
        "import anyio; from trinity_workers.launch.processes import local_ray\n"
        "async def main():\n"
        "    async with local_ray(1):\n"
        "        print('started')\n"
        "anyio.run(main)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", start],
        env={**os.environ, "TMPDIR": str(room)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert shown.stdout == "started\n", shown.stderr


ENDED_THREADS = """
import threading
from itertools import repeat

import anyio
import anyio.to_thread
import psutil
from anyio._backends._asyncio import WorkerThread

from trinity_workers.launch.processes import local_ray

THREADS = 4


async def main():
    async with local_ray(1):
        WorkerThread.MAX_IDLE_TIME = 0
        begun = threading.Barrier(THREADS)
        async with anyio.create_task_group() as tasks:
            for function in repeat(begun.wait, THREADS):
                tasks.start_soon(anyio.to_thread.run_sync, function)
        workers = [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]
        await anyio.to_thread.run_sync(int)  # ends the threads but the one that it uses
        while sum(thread.is_alive() for thread in workers) > 1:
            await anyio.sleep(0.01)
        children = psutil.Process().children()
        print(*sorted(
            child.name() for child in children if child.status() != psutil.STATUS_ZOMBIE
        ))


anyio.run(main)
"""
"""Program that starts Ray, has anyio end threads that idle, and prints its processes."""


def test_ray_outlives_the_threads_that_anyio_ends():
    shown = subprocess.run(
        [sys.executable, "-c", ENDED_THREADS],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert {"gcs_server", "raylet"} <= set(shown.stdout.split()), shown.stderr


async def test_a_host_too_busy_to_start_ray_is_told_in_one_sentence(monkeypatch):
    def times_out(**_options):
        raise Exception("The current node timed out during startup.\n")

    monkeypatch.setattr("ray.init", times_out)
    with raises(RayNotStarted, reason="The current node timed out during startup."):
        async with local_ray(1):
            pass
