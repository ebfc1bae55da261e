"""A test is marked for the processes that it starts."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.support.markers import (
    StartedProcesses,
    check_heavy_words,
    has_none_for,
    needed_marker,
    ray_folder,
)


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


@pytest.mark.parametrize(
    ("text", "heavy", "light"),
    [
        ("def test_it(): ...", False, True),
        ("@pytest.mark.heavy\ndef test_it(): ...", True, True),
        ("def test_it(rank_group): ...", True, True),
        ("\npytestmark = [pytest.mark.ray, pytest.mark.heavy]\n", True, False),
    ],
)
def test_a_file_is_left_out_where_its_words_say_that_no_test_is_selected(text, heavy, light):
    assert has_none_for("heavy and not nightly", text) is not heavy
    assert has_none_for("not heavy and not nightly", text) is not light
    assert not has_none_for("", text)
    assert not has_none_for("ray", text)


def test_a_heavy_test_in_a_file_without_a_word_of_it_is_refused(tmp_path):
    (path := tmp_path / "test_it.py").write_text("def test_it(fixture_of_ray): ...")
    item = SimpleNamespace(path=path, nodeid="it", get_closest_marker=lambda name: name == "heavy")
    with pytest.raises(pytest.UsageError, match="it is heavy"):
        check_heavy_words([item])
    path.write_text("def test_it(ray_cluster): ...")
    check_heavy_words([item])
