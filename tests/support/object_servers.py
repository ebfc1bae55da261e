"""Object storage for tests: folders, memory, and a server that speaks S3's protocol."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from unittest.mock import patch

from tests.support.waits import wait_until

has_s3 = all(find_spec(package) is not None for package in ("s3fs", "moto", "flask"))
"""True if the client and the server of S3's protocol are installed."""

_AT_ONCE = 1 << 16
_ALL_OF_S3 = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
    }
)


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of an empty bucket on a moto server of its own, which checks nothing."""
    with _moto() as url, environment(url, ("test", "test")):
        _send(f"{url}/checkpoints", "PUT")
        yield "s3://checkpoints/team"


@contextmanager
def guarded_s3_server() -> Iterator[tuple[Relay, tuple[str, str]]]:
    """Yield the way to a moto server that checks signatures, and the key that it knows.

    It has the empty bucket ``checkpoints``.
    """
    import boto3

    with _moto() as url, environment(url, ("test", "test")):
        _send(f"{url}/checkpoints", "PUT")
        users = boto3.client("iam")
        users.create_user(UserName="trainer")
        users.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=_ALL_OF_S3)
        key = users.create_access_key(UserName="trainer")["AccessKey"]
        users.close()
        _send(f"{url}/moto-api/reset-auth", "POST", b"0")
        with Relay(int(url.rpartition(":")[2])) as relay:
            yield relay, (key["AccessKeyId"], key["SecretAccessKey"])


@contextmanager
def environment(url: str, key: tuple[str, str] | None) -> Iterator[None]:
    """Let clients of S3 that are made in the block find this server, with this key or none."""
    import s3fs

    variables = {
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    with patch.dict(os.environ, variables):
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(zip(names, key or (), strict=False))
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


class Relay:
    """Passes connections on to a port of this host, unless it is down.

    A server behind it that goes away in the middle of a request comes back with what it has.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._port = 0
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Relay:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Cut every connection; new ones are refused."""
        with self._lock:
            listener, self._listener = self._listener, None
            cut = {*self._open, *([listener] if listener else [])}
        for connection in cut:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if listener is not None:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with self._lock:
            self._open.add(source)
            is_down = self._listener is None
        with suppress(OSError), source:
            while not is_down and (data := source.recv(_AT_ONCE)):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)


@contextmanager
def _moto() -> Iterator[str]:
    """Yield the URL of a moto server, a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _send(url: str, method: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "text/plain"}  # a form's body would be parsed
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    urllib.request.urlopen(request).close()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url).close()
    except OSError:
        return False
    return True
