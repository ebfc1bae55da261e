"""Histories as test files: they run by themselves, and fail where the fold has changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waits import PATIENCE
from trinity_events.archive.format import read_lines
from trinity_events.testing.history import RecordedHistory, as_test_file

RECORDED = Path(__file__).parents[1] / "recorded"


def entries_of(name):
    lines = read_lines(RECORDED / f"{name}.jsonl")[1]
    return [line.entry for line in lines if line.stream == "events"]


def pytest_of(path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    return subprocess.run(
        command, cwd=path.parent, capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def test_an_exported_test_runs_by_itself(cli, tmp_path):
    path = tmp_path / "test_history.py"
    shown = cli("export", str(RECORDED / "failures.jsonl"), "--pytest", "--output", str(path))
    assert shown.stdout == f"30 events of run recorded-failures in {path}: pytest {path}\n"
    done = pytest_of(path)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout
    path.write_text(path.read_text().replace("'weights': 3", "'weights': 4"))
    done = pytest_of(path)
    assert "1 failed, 6 passed" in done.stdout


@pytest.mark.parametrize("name", ["failures", "rollouts", "complete", "second-epoch", "refusals"])
def test_a_history_tells_what_its_log_was_folded_to(name):
    history = RecordedHistory("recorded-" + name, RecordedHistory.pack(entries_of(name)))
    expected = json.loads((RECORDED / f"{name}.expected.json").read_text())
    assert history.state.entries == len(history.entries)
    assert history.entries == entries_of(name)
    assert sum(history.announced.values()) == expected["state"].get("announced", 0)
    assert history.closed == expected["state"].get("closed")
    namespace = {}
    exec(as_test_file(history.run_id, history.entries), namespace)
    claims = [claim for name, claim in namespace.items() if name.startswith("test_")]
    assert len(claims) == 7
    for claim in claims:
        claim()


def test_a_history_can_end_just_before_what_went_wrong(cli, tmp_path):
    path, last = tmp_path / "test_before.py", entries_of("failures")[7].id
    command = ("export", str(RECORDED / "failures.jsonl"), "--pytest", "--until", last)
    assert cli(*command, "--output", str(path)).returncode == 0
    assert f"up to entry {last}: 8 events" in path.read_text()
    assert pytest_of(path).returncode == 0


def test_a_history_is_cut_for_a_test_alone(cli):
    shown = cli("export", "any", "--until", "3")
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: --until cuts the history of --pytest alone")
