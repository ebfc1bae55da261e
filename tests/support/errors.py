"""Expectations of errors: their type and attributes, never their text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from trinity_events.errors import StructuredError

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises(error: type[E], /, **attributes: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this type that has these attributes.

    A pattern is searched for: it is for the text of another program in an attribute.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert_attributes(caught.value, **attributes)


@contextmanager
def raises_from(cause: type[BaseException], /, **attributes: object) -> Iterator[None]:
    """Expect an error that was caused by one of this type, with these attributes."""
    with pytest.raises(StructuredError) as caught:
        yield
    assert isinstance(caught.value.__cause__, cause)
    assert_attributes(caught.value.__cause__, **attributes)


def assert_attributes(error: BaseException, /, **attributes: object) -> None:
    """Assert that an error has these attributes."""
    actual = {name: getattr(error, name) for name in attributes}
    assert actual == {name: _expected(value, actual[name]) for name, value in attributes.items()}


def _expected(value: object, actual: Any) -> object:
    if isinstance(value, re.Pattern) and value.search(str(actual)):
        return actual
    return value
