"""Garbage collection in processes that hold large libraries."""

from __future__ import annotations

import gc


def exempt_loaded_objects() -> None:
    """Exempt all objects that exist now from garbage collection.

    A process of a run loads some hundred thousand objects with its libraries, and keeps them. Each
    full collection walks all of them, and a step's samples bring such collections on.
    """
    # First: garbage that is there now would be exempt, too, and stay for ever.
    gc.collect()
    gc.freeze()
