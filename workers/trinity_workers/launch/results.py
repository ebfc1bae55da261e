"""Standard output for the results of a run alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from msgspec import Struct

Outcome = Literal["finished", "failed", "interrupted"]


class RunFailure(Struct, frozen=True, kw_only=True):
    """A run that did not finish, and of which there is no summary."""

    run_id: str
    outcome: Outcome
    error: str


@contextmanager
def results_alone() -> Iterator[TextIO]:
    """Yield standard output, to which nothing else writes in the block.

    What anything else prints there, Ray's own threads and child processes too, goes to standard
    error.
    """
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    encoding = getattr(sys.stdout, "encoding", None)
    errors = getattr(sys.stdout, "errors", None)
    with os.fdopen(descriptor, "w", encoding=encoding, errors=errors) as results:
        # At the descriptor: Ray's native threads and child processes write past sys.stdout.
        os.dup2(2, 1)
        try:
            yield results
        finally:
            # Before the descriptor is put back: what is buffered was printed in the block.
            sys.stdout.flush()
            results.flush()
            os.dup2(descriptor, 1)
