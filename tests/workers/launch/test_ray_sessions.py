"""Folders of Ray's sessions are removed once their driver has ended: those of this project."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.waits import PATIENCE
from trinity_workers.launch import ray_reaper
from trinity_workers.launch.ray_reaper import mark_session, remove_sessions

pytestmark = [pytest.mark.ray, pytest.mark.heavy]

GONE = 4_194_305
"""No process has this id: it is above the largest of Linux."""


@pytest.fixture
def session(tmp_path):
    """Makes the folder of a session, with a log; a driver may have marked it and ended."""

    def make(driver, *, is_marked=True):
        folder = tmp_path / f"session_2026-01-01_00-00-00_000000_{driver}"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "raylet.out").write_text("log")
        if is_marked:
            os.close(mark_session(tmp_path, driver))
        return folder

    return make


def test_sessions_of_ended_drivers_are_removed_and_those_of_others_are_not(session, tmp_path):
    ended, foreign = session(GONE), session(GONE + 1, is_marked=False)
    running = session(GONE + 2)
    lock = mark_session(tmp_path, GONE + 2)
    (tmp_path / "session_latest").symlink_to(ended)
    remove_sessions(tmp_path)
    assert sorted(tmp_path.iterdir()) == [foreign, running]
    os.close(lock)
    remove_sessions(tmp_path)
    assert sorted(tmp_path.iterdir()) == [foreign]


def test_links_are_not_followed(session, tmp_path):
    outside = session(GONE)
    (outside / "logs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / f"session_x_{GONE}").symlink_to(outside)
    remove_sessions(folder)
    assert (outside / "logs" / "raylet.out").exists()
    remove_sessions(tmp_path)
    assert not outside.exists()
    assert (tmp_path / "outside" / "file").exists()


@pytest.mark.processes
def test_a_session_with_a_process_is_not_removed(session, tmp_path):
    folder = session(GONE)
    code = "import time; print('ready', flush=True); time.sleep(60)"
    sleeping = [sys.executable, "-c", code, f"--session={folder}"]
    with subprocess.Popen(sleeping, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"  # before, it may not have its arguments yet
        remove_sessions(tmp_path)
        assert folder.exists()
        process.kill()
    remove_sessions(tmp_path)
    assert not folder.exists()


@pytest.mark.processes
def test_the_reaper_removes_the_session_when_its_driver_has_ended(session, tmp_path):
    folder = session(GONE)
    reaper = [sys.executable, "-I", "-S", ray_reaper.__file__, str(tmp_path), str(GONE)]
    subprocess.run(reaper, stdin=subprocess.DEVNULL, timeout=PATIENCE, check=True)
    assert not folder.exists()
