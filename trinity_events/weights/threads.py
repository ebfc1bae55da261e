"""Doing what takes as long as its bytes take to be moved, in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_WORTH = 8 << 20
"""Bytes from which on threads are worth their start."""
_MOST = 4

Job = TypeVar("Job")


def in_threads(do: Callable[[Sequence[Job]], None], jobs: Sequence[Job], nbytes: int) -> None:
    """Do all jobs, in shares; raises what one of the shares raised, once all have ended.

    Args:
        do: Does some of them, in their order; it lets other threads go on while it moves bytes.
        jobs: All of them.
        nbytes: What they move together.
    """
    threads = min(_MOST, len(os.sched_getaffinity(0)))
    if threads == 1 or nbytes < _WORTH:
        do(jobs)
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(do, jobs[index::threads]) for index in range(1, threads)]
        do(jobs[::threads])
    for other in others:
        other.result()
