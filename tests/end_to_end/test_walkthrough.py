"""The steps of docs/walkthrough.md, in real processes: a rank is killed, and the run goes on."""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.browser import NAMES, browser
from tests.support.dashboards import dashboard_process
from tests.support.run_processes import TrainRun, small_run
from trinity_events.server import connect_sync
from trinity_schemas import (
    Envelope,
    RunClosed,
    RunKeys,
    RunResumed,
    StepReady,
    decode_envelope,
)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]


class Killed(NamedTuple):
    """Run that ended because one of its trainer ranks was killed, and what it has told."""

    run_id: str
    file: Path
    folder: Path
    pid: int
    with_torch: set[str]
    """Trainer and rank, if they had loaded torch by the first checkpoint."""
    status: int
    summary: dict[str, Any]
    stderr: str
    closing: str
    """Id of the event that closed it."""
    seen: dict[str, str] | None
    """Texts of a page while it trained, after its end and just before; None without a browser."""


def stream_of(redis_url: str, key: str) -> list[tuple[str, Envelope]]:
    with connect_sync(redis_url) as client:
        entries = client.xrange(key)
    return [(entry.decode(), decode_envelope(fields[b"e"])) for entry, fields in entries]


def checkpoints(redis_url: str, run_id: str) -> list[StepReady]:
    """Return the announcements of checkpoints."""
    announced = stream_of(redis_url, RunKeys.of(run_id).announcements)
    events = [envelope.event for _, envelope in announced]
    return [
        event for event in events if isinstance(event, StepReady) and event.kind == "checkpoint"
    ]


def has_torch(pid: int) -> bool:
    """Return True if a process has loaded torch, or begins to."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory, policy_folder, redis_url, cli):
    """A run whose second rank is killed after its first checkpoint, found by its process id."""
    folder = tmp_path_factory.mktemp("walkthrough")
    run_id = f"test-{secrets.token_hex(6)}"
    file = small_run(
        folder,
        policy_folder,
        steps=100_000,
        trainer={"ranks": 2},
        checkpoints={"interval": 2, "root": str(folder)},
    )
    run = TrainRun(file, "--run", run_id, "--json")
    seen: dict[str, str] | None = None
    with ExitStack() as exits:
        exits.callback(run.close)
        run.until(lambda: checkpoints(redis_url, run_id))
        page = None
        if any(map(shutil.which, NAMES)):
            page = exits.enter_context(browser(tmp_path_factory.mktemp("browser")))
            page.open(f"{exits.enter_context(dashboard_process(redis_url))}#/{run_id}/overview")
            page.wait_for("document.querySelectorAll('.explorers tbody tr').length === 1")
            page.wait_for("document.querySelector('.pill.ok')")
            seen = {"live": page.text(".pill") + page.text("main")}
        shown = json.loads(cli("status", run_id, "--json").stdout)
        pids = {name: shown["processes"][name]["pid"] for name in ("trainer-0", "actor-1")}
        with_torch = {name for name, pid in pids.items() if has_torch(pid)}
        pid = pids["actor-1"]
        os.kill(pid, signal.SIGKILL)
        status, out, stderr = run.ended()
        if page is not None and seen is not None:
            page.wait_for("document.querySelector('.headline.bad .link')")
            seen["failed"] = page.text(".headline")
            page.evaluate("document.querySelector('.headline .link').click()")
            page.wait_for("document.querySelector('.banner')")
            seen["before"] = page.text("main")
            assert page.problems == []
    [line] = out.splitlines()
    events = stream_of(redis_url, RunKeys.of(run_id).events)
    [closing] = [entry for entry, envelope in events if isinstance(envelope.event, RunClosed)]
    summary = json.loads(line)
    return Killed(*(run_id, file, folder, pid, with_torch, status, summary, stderr, closing, seen))


def test_a_rank_that_was_killed_by_the_id_that_status_lists_is_in_the_object_of_the_run(killed):
    assert killed.status == 1
    assert killed.summary["outcome"] == "failed"
    assert re.fullmatch(
        rf"\w+: actor-1 \(process {killed.pid} on {socket.gethostname()}\) of .* died.*: "
        r"killed by SIGKILL .*",
        killed.summary["error"],
    )
    assert killed.summary["error"].partition(": ")[2] in killed.stderr
    newest = killed.summary["newest_checkpoint"]
    assert newest["folder"] == str(killed.folder / killed.run_id / f"global_step_{newest['step']}")
    assert Path(newest["folder"]).is_dir()
    assert killed.summary["log"]["steps"] >= newest["step"]


def test_the_ranks_compute_with_torch_and_the_trainer_runs_without_it(killed):
    assert killed.with_torch == {"actor-1"}


def test_status_and_explain_name_the_killed_rank_and_blame_no_explorer(killed, cli):
    explained = json.loads(cli("explain", killed.run_id, "--json").stdout)
    first = explained["causes"][0]
    assert first["reason"] == "closed"
    assert f"actor-1 (process {killed.pid} on" in first["sentence"]
    assert first["sentence"] in cli("explain", killed.run_id).stdout
    shown = cli("status", killed.run_id, env={"COLUMNS": "300"}).stdout
    [explorer] = [line for line in shown.splitlines() if line.startswith("explorer-0")]
    assert explorer.split()[1] != "lost"
    # A save that was under way when the summary was made may become ready after it.
    [step] = re.findall(r"newest ready checkpoint is that of step (\d+)", shown)
    assert int(step) >= killed.summary["newest_checkpoint"]["step"]


def test_the_dashboard_shows_it_live_and_why_it_failed_and_the_state_just_before(killed):
    if killed.seen is None:
        pytest.skip("no browser is at hand")
    assert "live" in killed.seen["live"]
    assert "running" in killed.seen["live"]
    assert f"actor-1 (process {killed.pid} on" in killed.seen["failed"]
    assert "You see the state after event" in killed.seen["before"]
    assert "The run failed" not in killed.seen["before"]


def test_bisect_finds_the_event_that_closed_it_and_a_step_back_shows_it_open(killed, cli):
    def read(*command):
        shown = cli(*command, "--json")
        assert shown.returncode == 0, shown.stderr
        return [json.loads(line) for line in shown.stdout.splitlines()]

    [result] = read("bisect", killed.run_id, "closed == 'failed'")
    assert result["found"]["id"] == killed.closing
    *_, before, closing = read(
        *("replay", killed.run_id, "--step", "--until", killed.closing),
        *("--from", str(killed.summary["newest_checkpoint"]["step"])),
    )
    assert closing["id"] == killed.closing
    assert {"closed", "closed_error"} <= {change["path"] for change in closing["changes"]}
    [between] = read("diff", killed.run_id, before["id"], killed.closing)
    [change] = [difference for difference in between["changes"] if difference["path"] == "closed"]
    assert change["after"] == "failed"


@pytest.mark.parametrize("until", [pytest.param((), marks=pytest.mark.nightly), ("--until", "2")])
def test_its_history_as_a_test_passes_under_pytest(killed, cli, tmp_path, until):
    written = tmp_path / "test_history.py"
    shown = cli("export", killed.run_id, "--pytest", *until, "--output", str(written))
    assert shown.returncode == 0, shown.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^7 passed", done.stdout, re.MULTILINE)


def next_arguments(killed: Killed) -> list[str]:
    """Return what follows ``train`` in the command to go on with."""
    command = shlex.split(killed.summary["next_command"])
    return command[command.index("train") + 1 :]


def test_the_command_to_go_on_with_is_the_one_that_began_it(killed):
    assert next_arguments(killed) == [str(killed.file), "--run", killed.run_id, "--json"]


@pytest.mark.nightly(
    "crashes/test_killed_runs.py::test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one"
)
def test_the_command_that_it_told_goes_on_from_the_newest_checkpoint(killed, redis_url, cli):
    checkpoint = checkpoints(redis_url, killed.run_id)[-1]
    file, *arguments = next_arguments(killed)
    run = TrainRun(Path(file), *arguments)
    try:
        run.until(
            lambda: [
                announcement
                for announcement in checkpoints(redis_url, killed.run_id)
                if (announcement.epoch, announcement.step) == (2, checkpoint.step + 2)
            ]
        )
        run.process.send_signal(signal.SIGTERM)
        status, out, stderr = run.ended()
    finally:
        run.close()
    assert status == 143
    assert f"resumes from the checkpoint of step {checkpoint.step}: epoch 1 " in stderr
    events = stream_of(redis_url, RunKeys.of(killed.run_id).events)
    [resumed] = [envelope.event for _, envelope in events if isinstance(envelope.event, RunResumed)]
    assert (resumed.step, resumed.checkpoint.epoch) == (checkpoint.step, 1)
    assert json.loads(out)["outcome"] == "interrupted"
