"""The home is its user's alone, and no lock in it is waited for without end."""

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.errors import assert_attributes, raises
from tests.support.redis_servers import free_ports
from tests.support.waits import PATIENCE, child, wait_until
from trinity_events.errors import EmbeddedServerUnusable
from trinity_events.server import EmbeddedServer, connect_sync
from trinity_events.server.embedded import ServerTimeouts
from trinity_events.system import file_locks
from trinity_workers.launch.processes import ReducerProcess

pytestmark = pytest.mark.server

NOBODY = 65534


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("TRINITY_HOME", str(home))
    return home


def open_to_others(folder):
    """What others than its user may use of a folder that they can reach, and of what is in it."""
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [str(path) for path in paths if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@contextmanager
def serving_process(*options):
    command = [sys.executable, "-m", "trinity_events", "serve", *options]
    with child(command, stdout=subprocess.PIPE, text=True, umask=0o022) as process:
        assert process.stdout.readline().startswith("serving at")
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


@pytest.mark.processes
def test_what_the_home_has_is_for_its_user_alone_under_any_umask(own_home):
    with serving_process("--port", str(free_ports(1)[0])):
        with connect_sync(EmbeddedServer(own_home).url) as client:
            client.set("secret", "x")
        with EmbeddedServer(own_home, "weights", durable=False).attached():
            names = {path.name for path in own_home.rglob("*")}
            assert {"redis.log", "start.lock", "users.lock", "port.lock", "weights"} <= names
            assert any(name.endswith(".aof") for name in names)
            assert [path for path in open_to_others(own_home) if "checkpoints" not in path] == []
    assert stat.S_IMODE(own_home.stat().st_mode) == 0o700


def test_the_files_of_a_home_of_before_are_closed_to_others(own_home):
    own_home.mkdir(mode=0o755)
    data = own_home / "redis"
    data.mkdir(mode=0o755)
    (data / "start.lock").touch(mode=0o644)
    with EmbeddedServer(own_home).attached():
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(own_home.stat().st_mode) == 0o755, "which may hold other things"


def test_a_default_checkpoint_root_makes_the_home_for_its_user_alone(own_home, cli):
    # It is made before the server is asked, of which there is none.
    result = cli(
        "reducer", "--redis-url", "redis://127.0.0.1:1", env={"TRINITY_HOME": str(own_home)}
    )
    assert result.returncode == 1
    assert (own_home / "checkpoints").is_dir()
    assert stat.S_IMODE(own_home.stat().st_mode) == 0o700


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_another_user_can_hold_no_lock_of_the_home(own_home):
    own_home.parent.chmod(0o755)
    with EmbeddedServer(own_home).attached():
        for name in ("start.lock", "users.lock", "server.lock"):
            result = subprocess.run(
                ["cat", str(own_home / "redis" / name)],
                user=NOBODY,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "Permission denied" in result.stderr


IMPATIENT = ServerTimeouts(lock=0.3)
HOLD = (
    "import fcntl, os, sys, time\n"
    "descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
    "fcntl.flock(descriptor, fcntl.LOCK_EX)\n"
    "print('holds', flush=True); time.sleep(600)\n"
)


@contextmanager
def holder(path):
    """A process that holds a lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(path)]
    with child(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process


@pytest.mark.processes
@pytest.mark.parametrize("name", ["start.lock", "users.lock"])
def test_a_lock_that_another_process_holds_is_one_sentence_that_names_it(own_home, name):
    path = own_home / "redis" / name
    refused = raises(EmbeddedServerUnusable, fault="lock", where=str(path))
    with holder(path) as process, refused as caught:
        EmbeddedServer(own_home, timeouts=IMPATIENT).attached().__enter__()
    held_by = re.compile(rf"^process {process.pid} \(")
    assert_attributes(caught.value.__cause__, path=path, holders=held_by)
    with EmbeddedServer(own_home).attached() as url, connect_sync(url) as client:
        assert client.ping(), "once it is free"


@pytest.mark.processes
def test_a_lock_that_is_held_for_a_while_is_waited_for(own_home):
    with holder(own_home / "redis" / "start.lock") as process:
        timer = threading.Timer(0.5, process.kill)
        timer.start()
        with EmbeddedServer(own_home).attached() as url, connect_sync(url) as client:
            assert client.ping()
        timer.join()


@pytest.mark.processes
def test_a_command_ends_although_the_lock_is_held_when_it_leaves(own_home, caplog):
    server = EmbeddedServer(own_home, timeouts=IMPATIENT)
    with server.attached() as url, connect_sync(url) as client:
        process = client.info("server")["process_id"]
        holding = holder(own_home / "redis" / "start.lock")
        holding_process = holding.__enter__()
    assert f"process {holding_process.pid} (" in caplog.text
    assert server._answers(), "nobody may stop it meanwhile"
    with pytest.raises(StopIteration):
        next(holding.gen)
    wait_until(lambda: not Path(f"/proc/{process}").exists())


@pytest.mark.parametrize("how", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_the_holders_of_a_lock_are_named_by_the_system(tmp_path, how):
    with (tmp_path / "lock").open("a+") as first, (tmp_path / "lock").open("a+") as other:
        assert file_locks.holders(first.fileno()) == []
        fcntl.flock(other, how)
        assert file_locks.holders(first.fileno()) == [os.getpid()]
        excludes_shared_ones = [os.getpid()] if how == fcntl.LOCK_EX else []
        assert file_locks.holders(first.fileno(), fcntl.LOCK_SH) == excludes_shared_ones


@pytest.mark.processes
async def test_the_log_of_a_reducer_that_a_run_starts_is_its_users_alone(own_home, tmp_path):
    with EmbeddedServer(own_home).attached() as url:
        async with ReducerProcess(url, "run", tmp_path / "root").running():
            pass
    assert (own_home / "runs" / "run" / "reducer.log").is_file()
    assert open_to_others(own_home / "runs" / "run" / "reducer.log") == []
    assert stat.S_IMODE((own_home / "runs").stat().st_mode) == 0o700
