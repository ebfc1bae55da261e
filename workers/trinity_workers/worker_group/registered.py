"""Marks on methods of workers that a worker group may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .dispatch import Dispatch

Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "_trinity_registered"


class Registered(NamedTuple):
    """Way in which a group calls a method."""

    dispatch_mode: Dispatch
    blocking: bool = True
    """True if a call returns its result; False if it returns an object to wait on."""
    settles: bool = False
    """True if every rank has ended before an error is raised, of which the lowest rank's is; False
    if the first error is raised at once."""
    all_answer: bool = False
    """True if the answers of all ranks are returned, by rank, also where rows are dealt out: those
    of peers that have the same rows may differ."""


def register(
    dispatch_mode: Dispatch,
    *,
    blocking: bool = True,
    settles: bool = False,
    all_answer: bool = False,
) -> Callable[[Method], Method]:
    """Mark a method of a worker, so that groups of such workers have it.

    Called on a worker itself, the method stays as it is.

    Args:
        dispatch_mode: The mode in which arguments reach the ranks, and answers come back.
        blocking: See :class:`Registered`, as for the others.
        settles: See there.
        all_answer: See there.
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, Registered(dispatch_mode, blocking, settles, all_answer))
        return method

    return mark


class MethodTable(NamedTuple):
    """Methods of workers that a group may call."""

    kind: str
    """Class of the workers."""
    methods: dict[str, Registered]
    """Registered methods by name."""


def make_method_table(kind: type) -> MethodTable:
    """Return the table of a class of workers."""
    return MethodTable(kind.__name__, registered_methods(kind))


def registered_methods(kind: type) -> dict[str, Registered]:
    """Return the registered methods of a class by name.

    A method that overrides a registered one without a mark of its own is called as that one.
    """
    methods: dict[str, Registered] = {}
    # From the base on: a mark of a subclass wins, and an override without one keeps its base's.
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            mark = getattr(value, _MARK, None)
            if isinstance(mark, Registered):
                methods[name] = mark
    return methods
