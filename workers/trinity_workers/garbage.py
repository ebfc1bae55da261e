"""Garbage collection in processes that hold large libraries."""

from __future__ import annotations

import gc


def exempt_loaded_objects() -> None:
    """Exempt all objects that exist now from garbage collection.

    A process of a run loads some hundred thousand objects with its libraries, and keeps them. Each
    full collection walks all of them, and a step's samples bring such collections on.
    """
    gc.collect()
    gc.freeze()


def collect_exempted_objects() -> None:
    """Collect garbage among exempted objects too, once those of an ended run are no longer used."""
    gc.unfreeze()
    gc.collect()
