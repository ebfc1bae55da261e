"""Object storage for tests: folders, memory, and a server that speaks S3's protocol."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

from tests.support.waits import wait_until

has_s3 = all(find_spec(one) is not None for one in ("s3fs", "moto", "flask"))
"""True if the client and the server of S3's protocol are installed."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of an empty bucket on a moto server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    try:
        wait_until(lambda: _answers(url))
        with patch.dict(os.environ, environment):
            request = urllib.request.Request(f"{url}/checkpoints", method="PUT")
            urllib.request.urlopen(request).close()
            yield "s3://checkpoints/team"
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url).close()
    except OSError:
        return False
    return True
