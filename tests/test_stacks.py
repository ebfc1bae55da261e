"""Stacks of a process are taken by those that waited for it until their deadline."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.published_waits import PublishedWaits
from tests.support.waits import PATIENCE, child, wait_until
from trinity_events.diagnostics import py_spy, stacks
from trinity_events.diagnostics.stacks import collect_stacks, enable_stack_dumps, host_processes
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded
from trinity_schemas import WaitEnded

HANGS = """
import sys, time
from trinity_events.diagnostics.stacks import enable_stack_dumps

def generate_for_ever():
    print("ready", flush=True)
    time.sleep(600)

for name in sys.argv[2:]:
    enable_stack_dumps(sys.argv[1], name)
generate_for_ever()
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def hanging(run_id):
    with child(
        [sys.executable, "-c", HANGS, run_id, "explorer-0", "explorer-9"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process


@pytest.mark.processes
def test_stacks_name_the_function_that_a_process_hangs_in(hanging, run_id):
    [stacks_taken] = collect_stacks(run_id, ["explorer-0"])
    assert (stacks_taken.process, stacks_taken.pid) == ("explorer-0", hanging.pid)
    assert "in generate_for_ever" in stacks_taken.stacks
    by_name = {
        event.process: event.pid for event in collect_stacks(run_id, ["explorer-9", "explorer-0"])
    }
    assert by_name == {"explorer-9": hanging.pid, "explorer-0": hanging.pid}
    assert hanging.poll() is None


@pytest.fixture
def stopped(hanging, run_id):
    hanging.send_signal(signal.SIGSTOP)
    wait_until(lambda: host_processes(run_id)["explorer-0"].condition == "stopped")
    return hanging


def use_program(monkeypatch, tmp_path, script):
    """Have a script in the place of py-spy, or none."""
    path = tmp_path / "py-spy"
    if script is not None:
        path.write_text(f"#!{sys.executable} -IS\n{script}")
        path.chmod(0o700)
    monkeypatch.setattr(py_spy, "find_program", lambda: None if script is None else str(path))


@pytest.mark.processes
def test_the_stacks_of_a_process_that_is_stopped_are_read_by_py_spy(stopped, run_id):
    if py_spy.find_program() is None:
        pytest.skip("py-spy is not installed: pip install 'trinity-events[stacks]'")
    events = collect_stacks(
        run_id, ["explorer-0", "explorer-9"], patience=0.1, py_spy_patience=PATIENCE
    )
    stacks_taken = {event.process: event for event in events}
    if not stacks_taken["explorer-0"].stacks:
        pytest.skip("py-spy may not read other processes here: it needs the right to trace them")
    assert stacks_taken["explorer-0"].stacks == stacks_taken["explorer-9"].stacks
    first, *lines = stacks_taken["explorer-0"].stacks.splitlines()
    assert first == py_spy.SOURCE
    assert any("generate_for_ever" in line for line in lines)
    assert HANGS.strip().splitlines()[0] not in lines, "the command line is left out"
    assert host_processes(run_id)["explorer-0"].condition == "stopped"


@pytest.mark.processes
def test_a_process_that_answers_is_not_read(hanging, run_id, monkeypatch):
    monkeypatch.setattr(stacks, "read_stacks", None)
    [stacks_taken] = collect_stacks(run_id, ["explorer-0"])
    assert py_spy.SOURCE not in stacks_taken.stacks


DUMP = 'print("Process 7: a --password x\\nPython v3\\n\\nThread 7")'


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "patience"),
    [
        (None, PATIENCE),
        (f"{DUMP}; import sys; sys.exit(1)", PATIENCE),
        ('print("Process 7: a --password x")', PATIENCE),
        ("import time; time.sleep(600)", 0.3),
        (f"{DUMP}; import sys, os, time; sys.stdout.flush(); os.close(1); time.sleep(600)", 0.3),
        ("import time\nwhile True: time.sleep(0.01); print('x', flush=True)", 0.3),
    ],
    ids=["missing", "fails", "another output", "hangs", "does not end", "goes on"],
)
def test_a_py_spy_that_reads_nothing_changes_nothing(
    stopped, run_id, monkeypatch, tmp_path, script, patience
):
    use_program(monkeypatch, tmp_path, script)
    [stacks_taken] = collect_stacks(run_id, ["explorer-0"], patience=0.1, py_spy_patience=patience)
    assert (stacks_taken.pid, stacks_taken.stacks) == (stopped.pid, "")


@pytest.mark.processes
def test_stacks_that_are_read_are_cut_and_without_the_command_line(
    stopped, run_id, monkeypatch, tmp_path
):
    use_program(monkeypatch, tmp_path, f"{DUMP}\nwhile True: print('frame' * 10)")
    [stacks_taken] = collect_stacks(run_id, ["explorer-0"])
    assert stacks_taken.stacks.startswith(f"{py_spy.SOURCE}\nThread 7\nframe")
    assert "password" not in stacks_taken.stacks
    assert len(stacks_taken.stacks) == 16_000


@pytest.mark.processes
def test_a_process_that_has_ended_is_asked_no_more(hanging, run_id):
    hanging.kill()
    hanging.wait()
    assert collect_stacks(run_id, ["explorer-0"]) == []


@pytest.mark.processes
def test_a_later_process_of_the_same_number_is_never_signalled(
    hanging, run_id, monkeypatch, tmp_path
):
    monkeypatch.setattr(stacks, "_began", lambda pid: 0)
    assert collect_stacks(run_id, ["explorer-0"]) == []
    [file] = tmp_path.glob("trinity-stacks-*/*.stacks")
    assert file.stat().st_size == 0, "it was asked"


@pytest.mark.processes
def test_processes_of_other_runs_and_unknown_ones_are_left_out(hanging, run_id):
    assert collect_stacks("another", ["explorer-0"]) == []
    assert collect_stacks(run_id, ["trainer-0", "", "../explorer-0"]) == []


@pytest.mark.parametrize(
    "name",
    ["a\0b", "\ud800", "n" * 10_000, "../../etc/passwd", "", "/"],
)
def test_a_name_that_is_no_name_of_a_file_is_left_out(run_id, name):
    # Explorers choose the names under which they claim requests.
    assert collect_stacks(run_id, [name]) == []


@pytest.mark.processes
def test_files_of_processes_that_were_killed_are_removed_by_the_next(hanging, run_id, tmp_path):
    [folder] = tmp_path.glob("trinity-stacks-*")
    hanging.kill()
    hanging.wait()
    command = [sys.executable, "-c", HANGS, run_id, "trainer-0"]
    with child(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        names = {file.name for file in folder.iterdir()}
        [file] = [file_name for file_name in names if file_name.endswith(".stacks")]
        assert file.startswith(f"{process.pid}.")
        processes = host_processes(run_id)
        assert processes["explorer-0"] == (hanging.pid, "ended")
        assert processes["trainer-0"] == (process.pid, "running")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: host_processes(run_id)["trainer-0"].condition == "stopped")
        os.kill(process.pid, signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.wait()
        assert not any(file.suffix == ".stacks" for file in folder.iterdir())


def test_where_no_file_can_be_made_a_process_goes_on(run_id, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    enable_stack_dumps(run_id, "explorer-0")
    assert collect_stacks(run_id, ["explorer-0"]) == []


def test_a_folder_of_another_user_is_not_used(run_id, tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    Path(tmp_path / f"trinity-stacks-{os.getuid()}").symlink_to(theirs)
    enable_stack_dumps(run_id, "explorer-0")
    assert list(theirs.iterdir()) == []


@pytest.mark.processes
def test_a_wait_that_reaches_its_deadline_publishes_the_stacks_first(hanging, run_id):
    published = PublishedWaits()
    reporter = WaitReporter(published, threshold=600.0, run_id=run_id)
    with (
        pytest.raises(DeadlineExceeded),
        reporter.waiting("rollouts", ["explorer-0"], deadline=0.1),
    ):
        raise DeadlineExceeded("no rollouts came", 0.1)
    [stacks_taken] = published.events
    assert stacks_taken.process == "explorer-0"
    assert "generate_for_ever" in stacks_taken.stacks
    with reporter.waiting("rollouts", ["explorer-0"]):
        pass
    assert published.of(WaitEnded) == []
    assert len(published.events) == 1, "a wait that is over in time asks for none"
