"""Conversions in a process of their own, which must be a rank of no group."""

from functools import partial

import pytest


def convert(rank, source, target, **keywords):
    from trinity_workers.conversion.convert import convert

    return convert(source, target, **keywords)


@pytest.fixture
def converting(rank_processes):
    """Converts in a process of its own."""
    rank_processes.leave()
    rank_processes.start(1)

    def run(source, target, **keywords):
        answer = rank_processes.ask(0, partial(convert, **keywords), source, target)()
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run
