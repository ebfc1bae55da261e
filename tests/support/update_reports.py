"""Reports of updates that a worker of vLLM sends to a test, so that kills can aim at them."""

import os
import socket
from contextlib import suppress

EXTENSION = "tests.support.vllm_slow_updates.SlowWorker"
"""Extension of vLLM's worker that sends them."""
REPORTS = "TRINITY_TEST_UPDATES"
"""Environment variable with the path of the datagram socket that hears of updates."""
SECONDS = 0.6
"""Seconds that an update lasts at least, from its report on."""


def report(what: bytes) -> None:
    """Send a report with this process's id, unless nothing receives it."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        suppress(OSError),  # the test has ended, or receives no more
    ):
        sender.setblocking(False)
        sender.sendto(b"%s %d" % (what, os.getpid()), os.environ[REPORTS])
