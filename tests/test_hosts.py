"""Processes on several hosts: none is judged by a process id of another one."""

import socket
import subprocess
import sys
import tempfile

import anyio.to_thread
import msgspec
import pytest

from tests.support.pipeline import accept_reports
from tests.support.waits import PATIENCE
from trinity_events.analysis.causes import find_causes, find_unseen, select_processes
from trinity_events.analysis.hosts import format_unseen
from trinity_events.coordinator import this_process
from trinity_events.core import Monitor, MonitorState
from trinity_events.live_facts import read_live_facts
from trinity_events.log import AsyncPublisher, MemoryEventLog, new_producer
from trinity_events.replay import current_state
from trinity_events.system.host import get_host_id
from trinity_schemas import (
    ExplorerStatusChanged,
    RunOpened,
    TrainerStatusChanged,
    WaitStarted,
    decode_envelope,
)

NAMED = """
import sys
from trinity_events.diagnostics.stacks import enable_stack_dumps
enable_stack_dumps(*sys.argv[1:])
"""
IDENTITY = "from trinity_events.system.host import get_host_id; print(get_host_id())"


def run_python(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def move_to(monkeypatch, tmp_path):
    """Moves this process to a host: its processes share a folder, as they share a ``/tmp``."""

    def move(folder: str, name: str) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
        monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
        monkeypatch.setattr(socket, "gethostname", lambda: name)

    return move


@pytest.fixture
def waiting_run(log, publisher, move_to):
    """Makes a run whose trainer, on a host `trains`, waits for the explorer of another host."""

    async def made(folder: str, name: str) -> None:
        move_to(folder, name)
        explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer"))
        await explorer.publish(ExplorerStatusChanged(status="running"))
        await accept_reports(log)
        move_to("trainers", "trains")
        trainer = AsyncPublisher(log, publisher.epoch, new_producer("trainer"))
        await trainer.publish(TrainerStatusChanged(status="running", step=0))
        wait = WaitStarted(wait_id="w", what="rollouts", waits_for=("explorer-0",), seconds=9.0)
        await trainer.publish(wait)

    return made


async def read_first_cause(client, log):
    state, facts = await current_state(log), await read_live_facts(client, log.run_id)
    return state, facts, next(cause for cause in find_causes(state, facts) if cause.what)


@pytest.mark.server
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "shown"), [("serves", "serves"), ("asks", "asks (")], ids=["named", "of one name"]
)
async def test_an_explorer_of_another_host_is_not_judged_by_a_process_of_this_one(
    client, log, waiting_run, move_to, name, shown
):
    await waiting_run("explorers", name)
    move_to("here", "asks")
    await anyio.to_thread.run_sync(run_python, NAMED, log.run_id, "explorer-0")  # and has ended
    state, facts, cause = await read_first_cause(client, log)
    assert facts.processes["explorer-0"].condition == "ended"
    assert (cause.process, cause.reason, cause.pid) == ("explorer-0", "waits", None)
    assert cause.host.startswith(shown)
    assert f"explorer-0 is on {cause.host}, whose processes are not seen" in cause.sentence
    assert "explorer-0" not in select_processes(state, facts)


@pytest.mark.server
@pytest.mark.processes
async def test_an_explorer_of_this_host_that_has_ended_is_the_cause(
    client, log, waiting_run, move_to
):
    await waiting_run("here", "asks")
    move_to("here", "asks")
    await anyio.to_thread.run_sync(run_python, NAMED, log.run_id, "explorer-0")
    _, facts, cause = await read_first_cause(client, log)
    assert (cause.reason, cause.host) == ("ended", None)
    assert cause.pid == facts.processes["explorer-0"].pid


@pytest.mark.server
async def test_the_hosts_whose_processes_cannot_be_seen_are_named(
    client, log, waiting_run, move_to
):
    await waiting_run("explorers", "serves")
    move_to("here", "asks")
    state, facts, _ = await read_first_cause(client, log)
    unseen = find_unseen(state, facts)
    assert unseen["serves"] == ["explorer-0"]
    assert unseen["trains"] == ["trainer-0"]
    assert "serves (explorer-0)" in format_unseen(unseen)
    move_to("trainers", "trains")
    state, facts, _ = await read_first_cause(client, log)
    assert "trains" not in find_unseen(state, facts)


@pytest.mark.processes
def test_processes_have_one_host_if_they_share_a_boot_their_ids_and_their_folder(move_to):
    move_to("here", "asks")
    assert run_python(IDENTITY) == get_host_id() == this_process().host_id
    earlier = get_host_id()
    move_to("elsewhere", "asks")
    assert get_host_id() != earlier


def test_where_the_folder_is_unusable_no_other_process_has_the_identity(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none" / "there"))
    drawn = get_host_id()
    assert get_host_id() == drawn, "a process keeps it"
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert get_host_id() != drawn


async def test_a_sender_names_its_host_in_its_first_event_alone(move_to, run_id):
    memory_log = MemoryEventLog(run_id)
    move_to("here", "asks")
    trainer = AsyncPublisher(memory_log, 1, new_producer("trainer"))
    await trainer.publish(RunOpened())
    for status in ("running", "stopped"):
        await trainer.publish(TrainerStatusChanged(status=status, step=0))
    envelopes = [decode_envelope(entry.payload) for entry in await memory_log.read()]
    assert [envelope.host_id for envelope in envelopes] == [get_host_id(), None, None]
    monitor = Monitor(MonitorState(run_id=memory_log.run_id))
    monitor.fold(await memory_log.read())
    assert {name: host.node for name, host in monitor.state.hosts.items()} == {
        "trainer-0": "asks",
        "launcher-0": "asks",
    }


@pytest.mark.processes
def test_the_end_of_a_process_of_another_host_is_not_read_from_this_one():
    process_exit = pytest.importorskip("trinity_workers.runtime.process_exit")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = msgspec.structs.replace(this_process(), pid=child.pid)
        elsewhere = msgspec.structs.replace(here, host_id="0" * 16)
        theirs, ours = process_exit.ExitWatch(), process_exit.ExitWatch()
        theirs.watch(elsewhere)
        ours.watch(here)
        child.kill()
        assert "SIGKILL" in ours.wait(here, PATIENCE)
    assert theirs.wait(elsewhere, 0.1) == ""
