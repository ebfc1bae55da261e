"""What fails in another process of the run, as one sentence."""

import errno

import pytest
import redis

ray = pytest.importorskip("ray.exceptions", reason="Ray is not installed")

from tests.support.errors import assert_attributes  # noqa: E402
from trinity_events.errors import DeadlineExceeded  # noqa: E402
from trinity_schemas import Process  # noqa: E402
from trinity_workers.launch.actors import ProcessFailed, find_death, format_ray_error  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.heavy]


def nested_error(cause):
    """As Ray raises it: of two classes at once, and nested where one task called another."""
    inner = ray.RayTaskError("inner", "a traceback\n" * 40, cause).as_instanceof_cause()
    return ray.RayTaskError("outer", "another\n" * 40, inner).as_instanceof_cause()


@pytest.mark.parametrize(
    "cause", [DeadlineExceeded("no weights came", 1.0), redis.ConnectionError("gone")]
)
def test_what_fails_for_a_known_reason_is_that_error_itself(cause):
    error = format_ray_error(nested_error(cause))
    assert type(error) is type(cause)
    assert str(error) == str(cause)


def test_a_disk_that_is_full_is_one_sentence():
    error = format_ray_error(
        nested_error(OSError(errno.ENOSPC, "No space left on device", "/models/a"))
    )
    assert isinstance(error, ProcessFailed)
    assert error.reason == "[Errno 28] No space left on device: '/models/a'"


def test_a_defect_keeps_its_traceback():
    error = nested_error(KeyError("layer"))
    assert format_ray_error(error) is error


def test_a_dead_process_is_named_with_its_end():
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Explorer\n"
        "\tactor_id: 0123\n\tpid: 77\n\tnamespace: x\nSome common causes are many."
    )
    assert_attributes(
        find_death(message, "explorer-0"),
        process="explorer-0 (process 77)",
        how="The actor died unexpectedly before finishing this task.",
    )
    process = Process(host="here", pid=77, started=0)
    assert_attributes(
        find_death(message, "explorer-0", process, "killed by SIGKILL"),
        process="explorer-0 (process 77 on here)",
        how="killed by SIGKILL",
    )
    assert find_death("", "trainer-0").process == "trainer-0"
