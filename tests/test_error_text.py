"""Groups of errors are unwrapped in one way."""

import pytest

from trinity_events.error_text import leaf_errors, ungrouped
from trinity_events.errors import TrinityError


def test_the_first_error_of_nested_task_groups_takes_their_place():
    wanted = TrinityError("what is wrong")
    group = BaseExceptionGroup(
        "outer", [ValueError("a symptom"), ExceptionGroup("inner", [KeyError("another"), wanted])]
    )
    assert [type(one) for one in leaf_errors(group)] == [ValueError, KeyError, TrinityError]
    with pytest.raises(TrinityError) as raised, ungrouped():
        raise group
    assert raised.value is wanted
