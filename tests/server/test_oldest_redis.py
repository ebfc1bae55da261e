"""A part of the tests once more, on the oldest server that is promised: Redis 7.0."""

import os
import subprocess
import sys

import pytest

from tests.support.redis_servers import oldest_server
from trinity_events.server import BINARY_VARIABLE

pytestmark = [pytest.mark.server, pytest.mark.processes]

LONG = 540.0
"""Seconds that a part may take, also on a loaded machine; each takes less than half a minute."""

PARTS = {
    "users": ("tests/server/test_acl.py", "-k", "not whole_pipeline"),  # it starts torch and Ray
    "the log": ("tests/log/test_log_contract.py", "-k", "redis or twin"),
}
MORE_PARTS = {
    "groups": ("tests/subscriptions/test_consumer_failures.py", "-k", "redis"),
    "time": ("tests/reducer/test_timekeeper.py", "-k", "any_name or by_an_event or beside_one"),
    "a full disk": ("tests/end_to_end/test_full_disk.py", "-k", "log"),
    "keys of others": ("tests/log/test_key_conflicts.py",),
    "rollouts": ("tests/rollouts", "-k", "not random_histories"),
}


@pytest.mark.timeout(LONG + 30)
@pytest.mark.parametrize(
    "part",
    [*PARTS, *(pytest.param(part, marks=pytest.mark.nightly) for part in MORE_PARTS)],
)
def test_what_rests_on_the_server_holds_on_the_oldest_one_too(part):
    if os.environ.get(BINARY_VARIABLE):
        pytest.skip(f"all tests run on {os.environ[BINARY_VARIABLE]}")
    options = ("-q", "-x", "-p", "no:cacheprovider", "--timeout", "300")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(PARTS | MORE_PARTS)[part]],
        env={**os.environ, BINARY_VARIABLE: str(oldest_server())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
