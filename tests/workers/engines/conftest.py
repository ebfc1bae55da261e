"""Conversions in a process of their own, which must be a rank of no group."""

from functools import partial

import pytest


def convert(rank, source, target, **keywords):
    from trinity_workers.conversion.convert import convert

    return convert(source, target, **keywords)


@pytest.fixture
def converting(rank_processes):
    """Converts in a process of its own."""

    def run(source, target, **keywords):
        return rank_processes.call_alone(partial(convert, **keywords), source, target)

    return run
