"""The command line, as a process, right and wrong."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import metadata

import anyio
import pytest
from msgspec import structs
from rich.console import Console
from typer import Context
from typer.main import get_group

from tests.support.event_histories import committed, registration, started
from tests.support.pipeline import (
    accept_reports,
    announced,
    folded,
    publish_steps,
    reducer_task,
    until,
)
from tests.support.redis_servers import free_ports
from tests.support.waits import PATIENCE, child
from trinity_events import liveness
from trinity_events.cli import runs
from trinity_events.cli import status as status_command
from trinity_events.cli.app import build
from trinity_events.log import AsyncPublisher, Stream, new_producer, open_run, position
from trinity_events.replay import current_state
from trinity_events.server import EmbeddedServer, connect_sync
from trinity_events.views.status import status_panel
from trinity_schemas import (
    ExplorerStatusChanged,
    RunClosed,
    RunKeys,
    explorer_key,
    heartbeat_key,
)

pytestmark = [pytest.mark.server, pytest.mark.processes]

COMMANDS = (
    *("demo", "serve", "reducer", "runs", "status", "explain", "tail", "replay"),
    *("diff", "bisect", "track", "plot", "delete", "watch", "metrics"),
    *(
        "dashboard",
        "traces",
        "acl",
        "audit",
        "export",
        "import",
        "verify",
        "train",
        "evaluate",
        "explorer",
        "convert",
        "goodput",
        "samples",
        "retrain",
    ),
)


@pytest.fixture
async def finished_run(publisher, log, redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, range(3))
        await publisher.publish(committed(2, "state_dict", registration()))
        await publisher.publish(RunClosed(reason="finished", step=2))
        await announced(log, 4)
    return run_id


def test_every_command_is_there():
    group = get_group(build())
    assert set(group.list_commands(Context(group))) == set(COMMANDS)


def test_the_former_name_of_a_command_runs_with_a_warning_and_is_not_listed(cli):
    refused = cli("trainer", "--run", "not a name", "--steps", "1")
    warning, error = refused.stderr.splitlines()
    assert (refused.returncode, warning.split(":")[0], error.split(":")[0]) == (
        1,
        "warning",
        "error",
    )
    assert "train --parts trainer" in warning
    assert "\n  trainer " not in cli("--help").stdout


ALONE = """
import sys
from trinity_events.cli import main
sys.argv = ["trinity-events", *sys.argv[1:]]
try:
    main()
finally:
    assert "trinity_workers" not in sys.modules
"""


def test_a_command_of_this_package_loads_none_of_another():
    command = [sys.executable, "-c", ALONE, "status", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "trinity-events status" in done.stdout


def test_a_misspelled_command_is_compared_with_those_of_all_packages(cli):
    for wrong, right in (("dem", "demo"), ("statu", "status")):
        assert f"No such command '{wrong}'. Did you mean '{right}'" in cli(wrong).stderr


def test_the_version_can_be_told(cli):
    assert cli("--version").stdout == f"trinity-events {metadata.version('trinity-events')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(cli, command):
    shown = cli(command, "--help", env={"COLUMNS": "200"})
    assert shown.returncode == 0
    assert f"Example: trinity-events {command}" in shown.stdout


async def test_status_shows_what_is_ready_and_what_a_step_waits_for(cli, finished_run, redis_url):
    shown = cli("status", finished_run, "--redis-url", redis_url)
    assert shown.returncode == 0
    assert "finished at step 2" in shown.stdout
    assert (
        "Step 2 state_dict was not complete when the run ended: it lacked 1 of 1 saves"
        in shown.stdout
    )
    state = json.loads(cli("status", finished_run, "--json").stdout)
    assert state["ready"]["weights"]["at"] == {"epoch": 1, "step": 2}


async def test_status_and_tail_say_why_a_run_failed_and_who_is_lost(
    publisher, log, redis_url, run_id, cli
):
    error = "ActorDied: explorer-0 (process 7 on here) of the run died: killed"
    lost, ended = (AsyncPublisher(log, 1, new_producer("explorer", rank)) for rank in (0, 1))
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await lost.publish(ExplorerStatusChanged(status="running"))
        await ended.publish(ExplorerStatusChanged(status="stopped"))
        await publisher.publish(RunClosed(reason="failed", step=1, error=f"{error}\n  so it is"))
        await folded(log)
    shown = cli("status", run_id, env={"COLUMNS": "150"}).stdout
    assert error in shown
    statuses = dict(line.split()[:2] for line in shown.splitlines() if line.startswith("explorer-"))
    assert statuses == {"explorer-0": "lost", "explorer-1": "stopped"}
    assert f"reason=failed step=1 error={error} so it is\n" in cli("tail", run_id).stdout


async def test_status_counts_ages_to_now_and_says_how_long_ago_the_last_event_was(
    publisher, run_id, cli
):
    await publisher.publish(committed(1, "state_dict", registration()))
    await anyio.sleep(1.1)
    shown = cli("status", run_id).stdout
    assert float(re.search(r"committed (\d+\.\d) s ago", shown)[1]) >= 1.1
    assert int(re.search(r"^last event (\d+) s ago$", shown, re.MULTILINE)[1]) >= 1
    await publisher.publish(RunClosed(reason="finished"))
    assert "last event" not in cli("status", run_id).stdout


async def test_runs_are_asked_for_beside_each_other_and_listed_in_order(
    client, redis_url, run_id, monkeypatch
):
    names, read_runs, several = [f"{run_id}-{n}" for n in range(3)], [], anyio.Event()

    async def together(log):
        read_runs.append(log.run_id)
        if len(read_runs) > 1:
            several.set()
        with anyio.fail_after(PATIENCE):
            await several.wait()
        return await current_state(log)

    for name in names:
        await open_run(client, name)
    monkeypatch.setattr(runs, "current_state", together)
    run_ids = [state.run_id for state, _ in await runs._states(redis_url)]
    assert [name for name in run_ids if name in names] == names


async def test_status_says_that_nobody_is_there_once_all_signs_of_life_have_lapsed(
    publisher, log, client, redis_url, run_id, cli
):
    explorer = AsyncPublisher(log, 1, new_producer("explorer", 3))

    async def silent(silence=0.0):
        return await liveness.abandoned_since(client, await current_state(log), silence)

    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await explorer.publish(ExplorerStatusChanged(status="running"))
        await publisher.publish(structs.replace(started(2), lease=60.0))
        await folded(log)
        assert await silent() is None, "a reducer leads"
    signs = {
        "a rank saves": heartbeat_key(run_id, publisher._stamp.producer.incarnation),
        "an explorer has its rank": explorer_key(run_id, 1, 3),
    }
    for sign, key in signs.items():
        await client.set(key, b"")
        assert await silent() is None, sign
        await client.delete(key)
    last = max([position(await log.last_id(stream)) for stream in Stream])
    assert await silent() == last[0]
    assert await silent(60.0) is None, "an entry is a sign of life, too"


LIVES = """
import sys, time
from trinity_events.diagnostics.stacks import enable_stack_dumps
enable_stack_dumps(sys.argv[1], "trainer-0")
print("ready", flush=True)
time.sleep(600)
"""


async def test_status_calls_no_run_abandoned_whose_processes_live_on_this_host(
    publisher, redis_url, run_id
):
    await publish_steps(publisher, [1])
    with child([sys.executable, "-c", LIVES, run_id], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        run_status = await status_command._read_status(redis_url, run_id, silence=0.0)
        assert run_status.facts.processes["trainer-0"].pid == process.pid
        assert run_status.silent_since is None, "to start the run again would fence its trainer"
        assert "abandoned" not in panel_text(run_status)
    run_status = await status_command._read_status(redis_url, run_id, silence=0.0)
    assert run_status.silent_since is not None
    assert "abandoned" in panel_text(run_status)


def panel_text(run_status):
    printer = Console(width=300, file=io.StringIO())
    printer.print(status_panel(*run_status))
    return printer.file.getvalue()


async def test_status_says_in_a_sentence_that_nobody_is_there_and_runs_in_a_word(
    publisher, log, run_id, cli
):
    explorer = AsyncPublisher(log, 1, new_producer("explorer", 0))
    await publish_steps(publisher, [1])
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await accept_reports(log)
    await anyio.sleep(liveness.ABANDONED_AFTER)
    shown = " ".join(cli("status", run_id, env={"COLUMNS": "300"}).stdout.split())
    assert "The run seems abandoned: it is open, but no reducer leads it" in shown
    assert "trainer silent at step 1" in shown
    assert "explorer-0 silent" in shown
    status = json.loads(cli("status", run_id, "--json").stdout)
    assert status["silent_since"] == int((await log.last_id()).partition("-")[0]) / 1000
    [row] = [run for run in json.loads(cli("runs", "--json").stdout) if run["run_id"] == run_id]
    assert row["silent_since"] == status["silent_since"], "runs says the same"
    assert _trainer_in_runs(cli, run_id) == "silent"
    await publisher.publish(RunClosed(reason="interrupted"))
    assert "Nobody" not in cli("status", run_id).stdout
    assert _trainer_in_runs(cli, run_id) == "interrupted"


def _trainer_in_runs(cli, run_id):
    shown = cli("runs").stdout.splitlines()
    [line] = [text_line for text_line in shown if text_line.startswith(run_id)]
    return line.split()[3]


async def test_runs_lists_the_run(cli, finished_run):
    assert finished_run in cli("runs", env={"COLUMNS": "150"}).stdout
    rows = json.loads(cli("runs", "--json").stdout)
    [row] = [row for row in rows if row["run_id"] == finished_run]
    assert row["trainer"] == "finished"
    assert row["ready"]["weights"]["step"] == 2


@pytest.mark.parametrize("columns", [40, 80])
async def test_runs_shows_whole_ids_in_a_narrow_terminal(finished_run, columns):
    terminal, side = os.openpty()
    command = (sys.executable, "-m", "trinity_events", "runs")
    with child(command, stdout=side, env={**os.environ, "COLUMNS": str(columns)}):
        os.close(side)
        shown = b""
        with suppress(OSError):  # how a terminal says that nobody writes any more
            while data := os.read(terminal, 4096):
                shown += data
    os.close(terminal)
    assert f"{finished_run} ".encode() in shown


async def test_tail_prints_the_last_entries_of_both_streams_in_order(cli, finished_run):
    lines = [json.loads(line) for line in cli("tail", finished_run, "--json").stdout.splitlines()]
    assert {line["stream"] for line in lines} == {"events", "announcements"}
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines)
    assert len(cli("tail", finished_run, "-n", "2").stdout.splitlines()) == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_tail_follows(finished_run, publisher, client, options):
    arguments = ("tail", finished_run, "-n", "0", "-f", *options)
    command = [sys.executable, "-m", "trinity_events", *arguments]
    heard = []

    async def say():
        while not heard:  # until it listens there is nothing to hear
            await publisher.publish(committed(9, "state_dict"))
            await anyio.sleep(0.2)

    with child(command, stdout=subprocess.PIPE, text=True) as process:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(say)
                heard.append(
                    await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
                )
        assert "step-committed" in heard[0]
        await until(lambda: _somebody_waits(client))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130


async def _somebody_waits(client):
    return any(
        connection["cmd"] == "xread" and "b" in connection["flags"]
        for connection in await client.client_list()
    )


async def test_replay_shows_each_event_with_what_it_made_true(cli, finished_run):
    shown = cli("replay", finished_run, env={"COLUMNS": "200"})
    assert shown.returncode == 0
    assert shown.stdout.count("step-ready") == 3
    assert "finished at step 2" in shown.stdout


async def test_replay_stops_at_a_step_or_at_an_entry(cli, finished_run, log):
    state = json.loads(cli("replay", finished_run, "--until", "1", "--json").stdout)
    assert state["ready"]["weights"]["at"]["step"] == 1
    third = (await log.read())[2].id
    state = json.loads(cli("replay", finished_run, "--until", third, "--json").stdout)
    assert state["position"] == third
    assert "weights" not in state.get("ready", {})


MISTAKES = {
    "an unreachable server": (
        ("runs", "--redis-url", "redis://127.0.0.1:1"),
        "start one there, or leave --redis-url (TRINITY_REDIS_URL) out to use the embedded server",
    ),
    "no URL": (("runs", "--redis-url", "ftp://x"), "is not the URL of a Redis server"),
    "no port": (("runs", "--redis-url", "redis://localhost:notaport"), "is not the URL"),
    "no bracket": (("runs", "--redis-url", "redis://[::1"), "is not the URL"),
    "no such run": (("status", "nope"), "there is no run 'nope'"),
    "no such run to replay": (("replay", "nope"), "there is no run 'nope'"),
    "no run id": (("reducer", "--run", "a/b"), "is not a slug"),
    "no root": (("reducer", "--checkpoint-root", "/proc/x"), "cannot be written"),
    "no root to serve": (("serve", "--checkpoint-root", "/proc/x"), "cannot be written"),
    "no root for a demo": (("demo", "--checkpoint-root", "/proc/x"), "cannot be written"),
    "no run id for a demo": (("demo", "--run", "{x}"), "is not a slug"),
    "an empty run id for a demo": (("demo", "--run", ""), "is not a slug"),
    "parts of a layer without Megatron": (
        ("demo", "--pipeline-parallel", "2"),
        "--engine fsdp has no such option",
    ),
    "trainers that cannot be divided": (
        ("demo", "--engine", "megatron", "--tensor-parallel", "3"),
        "2 trainers cannot be divided into groups of 3",
    ),
    "a demo without server": (("demo", "--redis-url", "redis://127.0.0.1:1"), "no Redis server"),
    "a demo without chunk server": (
        ("demo", "--weights-redis-url", "redis://127.0.0.1:1"),
        "or leave --weights-redis-url (TRINITY_WEIGHTS_REDIS_URL) out to keep the weight chunks",
    ),
    "an export to standard output": (("export", "nope", "-o", "-"), "export writes a file"),
    "an explorer without chunk server": (
        ("explorer", "--run", "nope", "--wait", "0", "--weights-redis-url", "redis://127.0.0.1:1"),
        "or leave --weights-redis-url (TRINITY_WEIGHTS_REDIS_URL) out to keep the weight chunks",
    ),
}


@pytest.fixture(scope="module")
def mistaken(cli, redis_url):
    """All of them, several at a time: those that no server answers are patient for seconds."""
    with ThreadPoolExecutor(4) as pool:
        yield {args: pool.submit(cli, *args) for args, _ in MISTAKES.values()}


@pytest.mark.parametrize(("args", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_a_nonzero_exit(mistaken, args, sentence):
    shown = mistaken[args].result()
    assert shown.returncode == 1
    assert shown.stdout == ""
    [line] = shown.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


async def test_a_file_that_cannot_be_written_is_one_sentence(cli, finished_run, tmp_path):
    for output in ("/proc/x/y.jsonl", str(tmp_path)):
        shown = cli("export", finished_run, "--output", output)
        assert shown.returncode == 1
        assert "name another with --output" in shown.stderr
        assert len(shown.stderr.splitlines()) == 1


async def test_a_place_that_the_log_does_not_have_is_one_sentence(cli, finished_run):
    for place, sentence in (
        ("99", "step 99 was not reached"),
        ("x-y", "give a step, such as 40"),
        ("²", "give a step, such as 40"),
    ):
        shown = cli("replay", finished_run, "--until", place, "--no-timeline")
        assert shown.returncode == 1
        assert sentence in shown.stderr
        assert "Traceback" not in shown.stderr


@contextmanager
def serving(home, *options):
    """``serve`` in a process of its own; yields what it says, and ends it as Ctrl-C does."""
    with child(
        [sys.executable, "-m", "trinity_events", "serve", *options],
        env={**os.environ, "TRINITY_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_serve_serves_until_it_is_interrupted(tmp_path):
    with serving(tmp_path) as line:
        assert line.startswith("serving at unix://")


def test_the_port_of_serve_is_closed_when_it_ends_although_others_use_the_server(tmp_path):
    [port] = free_ports(1)
    with EmbeddedServer(tmp_path).attached() as url:
        with serving(tmp_path, "--port", str(port)) as line:
            assert line.startswith(f"serving at redis://127.0.0.1:{port} ")
            socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with connect_sync(url) as client:
            assert client.ping()


def test_a_second_serve_takes_no_port_away_from_the_first(tmp_path, cli):
    port, other = free_ports(2)
    home = {"TRINITY_HOME": str(tmp_path)}
    with serving(tmp_path, "--port", str(port)):
        refused = cli("serve", "--port", str(other), env=home)
        assert refused.returncode == 1
        assert f"listens on port {port} for another serve" in refused.stderr
        with serving(tmp_path, "--port", str(port)) as line:
            assert line.startswith(f"serving at redis://127.0.0.1:{port} ")
        socket.create_connection(("127.0.0.1", port)).close()
    with serving(tmp_path, "--port", str(other)):
        socket.create_connection(("127.0.0.1", other)).close()


def test_the_reader_of_a_pipe_may_leave_early(cli, finished_run, redis_url):
    command = f"{sys.executable} -m trinity_events replay {finished_run} | head -1"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "run-opened" in shown.stdout
    assert shown.stderr == ""


async def test_a_run_that_cannot_be_read_hides_no_other(finished_run, client, cli, redis_url):
    spoiled = f"{finished_run}-spoiled"
    keys = RunKeys.of(spoiled)
    await open_run(client, spoiled)
    await client.xadd(keys.events, {"e": b"a later entry"})
    await client.xtrim(keys.events, maxlen=1, approximate=False)
    await client.set(keys.snapshot, b"not a snapshot")
    conflicting = f"{finished_run}-taken"
    await open_run(client, conflicting)
    await client.set(RunKeys.of(conflicting).position, b"\xff")
    result = cli("runs", "--json", "--redis-url", redis_url)
    assert result.returncode == 0, result.stderr
    assert f"error: run {spoiled}: the snapshot is not readable" in result.stderr
    assert f"error: {RunKeys.of(conflicting).position} holds " in result.stderr
    listed = {row["run_id"] for row in json.loads(result.stdout)}
    assert finished_run in listed
    assert not {spoiled, conflicting} & listed
