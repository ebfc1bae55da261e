"""What fails in another process of the run, as one sentence."""

import errno
import os
import subprocess
import sys

import pytest
import redis

ray = pytest.importorskip("ray.exceptions", reason="Ray is not installed")

from tests.support.errors import assert_attributes, raises  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.errors import DeadlineExceeded  # noqa: E402
from trinity_schemas import Process  # noqa: E402
from trinity_workers.launch.actors import ProcessFailed, find_death, format_ray_error  # noqa: E402
from trinity_workers.launch.processes import RayNotStarted, local_ray  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.heavy]


def nested_error(cause):
    """As Ray raises it: of two classes at once, and nested where one task called another."""
    inner = ray.RayTaskError("inner", "a traceback\n" * 40, cause).as_instanceof_cause()
    return ray.RayTaskError("outer", "another\n" * 40, inner).as_instanceof_cause()


@pytest.mark.parametrize(
    "cause", [DeadlineExceeded("no weights came", 1.0), redis.ConnectionError("gone")]
)
def test_what_fails_for_a_known_reason_is_that_error_itself(cause):
    error = format_ray_error(nested_error(cause))
    assert type(error) is type(cause)
    assert str(error) == str(cause)


def test_a_disk_that_is_full_is_one_sentence():
    error = format_ray_error(
        nested_error(OSError(errno.ENOSPC, "No space left on device", "/models/a"))
    )
    assert isinstance(error, ProcessFailed)
    assert error.reason == "[Errno 28] No space left on device: '/models/a'"


def test_a_defect_keeps_its_traceback():
    error = nested_error(KeyError("layer"))
    assert format_ray_error(error) is error


def test_a_dead_process_is_named_with_its_end():
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Explorer\n"
        "\tactor_id: 0123\n\tpid: 77\n\tnamespace: x\nSome common causes are many."
    )
    assert_attributes(
        find_death(message, "explorer-0"),
        process="explorer-0 (process 77)",
        how="The actor died unexpectedly before finishing this task.",
    )
    process = Process(host="here", pid=77, started=0)
    assert_attributes(
        find_death(message, "explorer-0", process, "killed by SIGKILL"),
        process="explorer-0 (process 77 on here)",
        how="killed by SIGKILL",
    )
    assert find_death("", "trainer-0").process == "trainer-0"


@pytest.mark.processes
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


@pytest.mark.processes
def test_ray_outlives_the_threads_that_anyio_ends():
    shown = subprocess.run(
        [sys.executable, "-c", ENDED_THREADS],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert {"gcs_server", "raylet"} <= set(shown.stdout.split()), shown.stderr


@pytest.mark.processes
async def test_a_host_too_busy_to_start_ray_is_told_in_one_sentence(monkeypatch):
    def times_out(**_options):
        raise Exception("The current node timed out during startup.\n")

    monkeypatch.setattr("ray.init", times_out)
    with raises(RayNotStarted, reason="The current node timed out during startup."):
        async with local_ray(1):
            pass
