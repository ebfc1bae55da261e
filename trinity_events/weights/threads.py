"""Run jobs that are bound by memory bandwidth in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_WORTH = 8 << 20
"""Bytes from which several threads save time."""
# More threads share the same memory bus, and training needs the other cores.
_MOST = 4
"""Maximum number of threads."""

Job = TypeVar("Job")


def in_threads(do: Callable[[Sequence[Job]], None], jobs: Sequence[Job], nbytes: int) -> None:
    """Run all jobs, divided among threads. Raises the error of a share once all have ended.

    Args:
        do: Runs a share of the jobs, in their order; it releases the GIL while it moves bytes.
        jobs: All jobs.
        nbytes: Number of bytes that all jobs move.
    """
    threads = min(_MOST, len(os.sched_getaffinity(0)))
    if threads == 1 or nbytes < _WORTH:
        do(jobs)
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        # Interleaved, so that shares are about equal where sizes rise or fall.
        others = [pool.submit(do, jobs[index::threads]) for index in range(1, threads)]
        # The caller's thread takes a share too, instead of waiting.
        do(jobs[::threads])
    for other in others:
        # After the pool: all shares have ended before an error leaves, and none writes later.
        other.result()
