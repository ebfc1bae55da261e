"""The embedded server and the choice of a server, with real server processes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.errors import raises
from tests.support.redis_servers import Server
from tests.support.scripted_server import scripted_server
from tests.support.waits import PATIENCE, child, wait_until
from trinity_events.errors import (
    EmbeddedServerUnusable,
    InvalidUrl,
    ServerTooOld,
    ServerUnreachable,
)
from trinity_events.server import (
    EmbeddedServer,
    connect,
    connect_sync,
    open_client,
    reaper,
    redacted,
    serving,
    serving_weights,
)
from trinity_events.server.embedded import ServerTimeouts
from trinity_events.server.url import parse

pytestmark = pytest.mark.server


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_HOME", str(tmp_path))
    return tmp_path


def alive(server: EmbeddedServer) -> bool:
    return server._answers()


def test_the_last_user_to_leave_stops_the_server(own_home):
    server = EmbeddedServer(own_home)
    with server.attached():
        with EmbeddedServer(own_home).attached():
            pass
        assert alive(server)
    assert not alive(server)


def test_what_was_written_is_there_when_it_starts_again(own_home):
    for expected in (1, 2):
        with serving(None) as url, connect_sync(url) as client:
            assert client.incr("counter") == expected


def test_a_server_without_durability_keeps_no_file(own_home):
    with (
        EmbeddedServer(own_home, "weights", durable=False).attached() as url,
        connect_sync(url) as client,
    ):
        client.set("chunk", b"x")
    with (
        EmbeddedServer(own_home, "weights", durable=False).attached() as url,
        connect_sync(url) as client,
    ):
        assert client.get("chunk") is None


USE = (
    "import sys, time; from pathlib import Path\n"
    "from trinity_events.server import EmbeddedServer\n"
    "with EmbeddedServer(Path(sys.argv[1]), sys.argv[2], durable=False).attached():\n"
    "    print('ready', flush=True); time.sleep(60)\n"
)


@contextmanager
def user_to_kill(home, name):
    """A process that uses a server; it ends without a word."""
    command = [sys.executable, "-c", USE, str(home), name]
    with child(command, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout.readline() == "ready\n"
        yield user


def keepers(home):
    """Processes that watch over a server of the home."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            if b"reaper.py" in command and os.fsencode(home) in command:
                pids.append(path.parent.name)
    return pids


@pytest.mark.processes
@pytest.mark.parametrize("name", ["redis", "weights"])
def test_a_server_ends_with_its_last_user_although_all_were_killed(own_home, name):
    server = EmbeddedServer(own_home, name)
    with user_to_kill(own_home, name):
        with user_to_kill(own_home, name):
            assert alive(server)
            assert len(keepers(own_home)) == 1, "one, although there are two users"
        time.sleep(2.5 * reaper.LOOK)
        assert alive(server), "one user is left"
    wait_until(lambda: not alive(server) and not keepers(own_home))


def test_a_server_that_starts_again_at_once_outlives_the_keeper_of_the_one_before(own_home):
    server = EmbeddedServer(own_home)
    with server.attached():
        before = set(keepers(own_home))
    with server.attached():
        wait_until(lambda: len(keepers(own_home)) == 1 and not before & set(keepers(own_home)))
        assert alive(server)
    assert not alive(server), "who leaves in order stops it before it goes on"
    wait_until(lambda: not keepers(own_home))


def test_many_who_start_at_once_share_one_server(own_home):
    pids = []

    def use():
        with EmbeddedServer(own_home).attached() as url, connect_sync(url) as client:
            pids.append(client.info("server")["process_id"])
            started.wait(PATIENCE)

    started = threading.Barrier(4)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == 1
    assert len(pids) == 4


@pytest.mark.processes
@pytest.mark.parametrize("temporary", ["", "temporary" * 8])
def test_a_home_with_a_long_path_gets_a_socket_elsewhere(tmp_path, monkeypatch, temporary):
    if temporary:
        (tmp_path / temporary).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    home = tmp_path / ("long" * 30)
    server = EmbeddedServer(home)
    assert len(os.fsencode(server.socket)) <= 100
    with server.attached() as url, connect_sync(url) as client:
        assert client.ping()
    assert not server.socket.parent.exists(), "it is gone with the server"
    with user_to_kill(home, "redis"):
        assert alive(server)
    wait_until(lambda: not alive(server) and not keepers(home))
    assert not server.socket.parent.exists(), "also where the keeper stopped it"


def test_a_socket_that_cannot_be_made_elsewhere_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    server = EmbeddedServer(tmp_path / ("long" * 30))
    with raises(EmbeddedServerUnusable, fault="socket", where=re.compile("^/proc/trinity-events-")):
        server.attached().__enter__()


def test_jobs_with_temporary_folders_of_their_own_share_the_server_of_a_long_path(
    tmp_path, monkeypatch
):
    server = EmbeddedServer(tmp_path / ("long" * 30))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        monkeypatch.setattr(tempfile, "tempdir", first)
        with server.attached() as url, connect_sync(url) as client:
            process = client.info("server")["process_id"]
            monkeypatch.setattr(tempfile, "tempdir", second)
            with server.attached() as same, connect_sync(same) as another:
                assert same == server.url == url
                assert another.info("server")["process_id"] == process, "and none on its file"
        shutil.rmtree(first)
        with server.attached() as url, connect_sync(url) as client:
            assert client.ping(), "it starts where the temporary folder is by now"
        Path(first).mkdir()


def test_a_server_whose_socket_was_removed_gets_no_second_one_beside_it(own_home):
    server = EmbeddedServer(own_home)
    with server.attached() as url, connect_sync(url) as client:
        process = client.info("server")["process_id"]
        client.set("counter", 7)
        server.socket.unlink()
        with raises(EmbeddedServerUnusable, fault="silent", process=process):
            EmbeddedServer(own_home, timeouts=ServerTimeouts(free=0.2)).attached().__enter__()
        assert client.get("counter") == b"7", "who is connected goes on"
    wait_until(lambda: not keepers(own_home) and not Path(f"/proc/{process}").exists())
    with server.attached() as url, connect_sync(url) as client:
        assert client.get("counter") == b"7"


def test_a_socket_is_not_put_where_others_can_replace_it(tmp_path, monkeypatch):
    server = EmbeddedServer(tmp_path / ("long" * 30))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        server.socket.parent.mkdir()
        server.socket.parent.chmod(0o777)
        with raises(EmbeddedServerUnusable, fault="shared", where=str(server.socket.parent)):
            server.attached().__enter__()
        server.socket.parent.rmdir()
        with server.attached() as url, connect_sync(url) as client:
            assert client.ping()


@pytest.mark.parametrize("name", ["with space", "a#b", "a?b", "a%41"])
def test_a_home_may_have_any_name(tmp_path, name):
    with EmbeddedServer(tmp_path / name).attached() as url, connect_sync(url) as client:
        assert client.ping()


def test_a_home_that_cannot_be_written_is_one_sentence():
    server = EmbeddedServer(Path("/proc/home")).attached()
    with raises(EmbeddedServerUnusable, fault="home", where="/proc/home"):
        server.__enter__()


def test_the_url_given_comes_before_the_environment_and_before_the_embedded(own_home, monkeypatch):
    with serving(None) as url:
        assert url == EmbeddedServer(own_home).url
        with serving_weights(None, url) as weights:
            assert weights == EmbeddedServer(own_home, "weights").url
    monkeypatch.setenv("TRINITY_REDIS_URL", "redis://from-environment")
    with serving(None) as url:
        assert url == "redis://from-environment"
    with serving("redis://given") as url:
        assert url == "redis://given"
        with serving_weights(None, url) as weights:
            assert weights == "redis://given"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "localhost:6379",
        "",
        "redis:localhost",
        "redis://localhost:0",
        "redis://localhost:port",
        "redis://one:1,two:2",  # several nodes are a cluster's
        "redis+cluster://one:1,two:0",
        "unix+cluster:///socket",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url):
    with raises(InvalidUrl, fault="form"):
        open_client(url)


def test_a_password_is_never_shown():
    for scheme in ("redis", "rediss", "redis+cluster"):
        shown = redacted(f"{scheme}://me:se:cret@one:1,two:2/0?ssl_ca_certs=ca.pem")
        assert shown == f"{scheme}://me:***@one:1,two:2/0?ssl_ca_certs=ca.pem"
    with pytest.raises(InvalidUrl) as caught:
        open_client("http://me:secret@localhost")
    assert "secret" not in str(caught.value)
    assert redacted("unix:///tmp/socket") == "unix:///tmp/socket"


def test_the_nodes_of_a_cluster_are_told_from_its_url():
    parsed = parse("rediss+cluster://me:secret@one:1,two,[::1]:3?ssl_check_hostname=false")
    assert parsed.url == "rediss://me:secret@one:1?ssl_check_hostname=false"
    assert parsed.cluster
    assert parsed.more == (("two", 6379), ("::1", 3))
    assert not parse("redis://one:1/3").cluster


@pytest.mark.parametrize(
    "url", ["redis://user:secret@127.0.0.1:1/0", "redis+cluster://:secret@127.0.0.1:1"]
)
def test_a_worker_without_a_server_is_told_so(url):
    with raises(ServerUnreachable, where=url.replace("secret", "***")) as caught:
        open_client(url, patience=0.1)
    assert "secret" not in str(caught.value)


async def test_a_server_that_is_just_starting_is_waited_for(tmp_path):
    server = Server(tmp_path)
    starting = threading.Timer(0.3, server.start)
    starting.start()
    try:
        async with connect(server.url, patience=PATIENCE) as client:
            assert await client.ping()
        with connect_sync(server.url) as sync_client:
            assert sync_client.ping()
    finally:
        starting.join()
        server.kill()


async def test_an_unreachable_server_is_one_sentence_without_the_password():
    url = "redis://user:secret@127.0.0.1:1/0"
    with raises(ServerUnreachable, where=url.replace("secret", "***")) as caught:
        async with connect(url, patience=0.1):
            pass
    assert "secret" not in str(caught.value)


@pytest.fixture
def old_server():
    """Answers INFO as Redis 6.2 does; nothing else is asked of a server that is too old."""
    text = b"redis_version:6.2.14\r\n"
    info = b"$%d\r\n%s\r\n" % (len(text), text)
    with scripted_server(lambda command: info if b"INFO\r\n" in command else b"+OK\r\n") as url:
        yield url


async def test_a_server_that_is_too_old_is_one_sentence(old_server):
    with raises(ServerTooOld, where=old_server, version="6.2.14"):
        connect_sync(old_server).__enter__()
    with raises(ServerTooOld, where=old_server, variable=""):
        async with connect(old_server):
            pass
