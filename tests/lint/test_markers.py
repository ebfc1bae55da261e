"""A test is marked for the processes that it starts."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time

import pytest

from tests.support.markers import StartedProcesses, needed_marker, ray_folder


def start_by_subprocess() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def start_by_multiprocessing() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    process.join()


@pytest.mark.processes
@pytest.mark.parametrize("start", [start_by_subprocess, start_by_multiprocessing])
def test_a_process_without_its_marker_is_recorded(start) -> None:
    started = StartedProcesses()
    with started.watching():
        started.begin(["processes"])
        start()
        assert started.unmarked == {}
        started.begin(["server"])
        start()
        assert started.unmarked.keys() == {"processes"}


@pytest.mark.parametrize(
    ("command", "marker"),
    [
        (["/usr/bin/redis-server", "--port", "1"], "server"),
        (["python", "-I", "/a/trinity_events/server/reaper.py"], "server"),
        ([f"{ray_folder()}core/src/ray/gcs/gcs_server"], "ray"),
        (["git", "status"], "processes"),
    ],
)
def test_servers_and_ray_have_markers_of_their_own(command, marker) -> None:
    assert needed_marker(command) == marker
