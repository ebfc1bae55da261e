"""Groups of errors are unwrapped in one way."""

import pytest

from trinity_events.errors import TrinityError
from trinity_events.system.error_text import format_cause, leaf_errors, ungrouped


def test_the_first_error_of_nested_task_groups_takes_their_place():
    cause = TrinityError("what is wrong")
    group = BaseExceptionGroup(
        "outer", [ValueError("a symptom"), ExceptionGroup("inner", [KeyError("another"), cause])]
    )
    assert [type(error) for error in leaf_errors(group)] == [ValueError, KeyError, TrinityError]
    with pytest.raises(TrinityError) as raised, ungrouped():
        raise group
    assert raised.value is cause


def test_what_torch_wraps_with_the_stacks_of_all_ranks_is_told_as_its_cause():
    class CheckpointException(BaseException):
        failures = {3: (OSError("no space left"), None), 5: (ValueError("late"), None)}  # noqa: RUF012

    assert format_cause(CheckpointException()) == "OSError: no space left"
