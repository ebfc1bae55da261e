"""Parts that are read while they are still being published."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

from tests.support.published_parts import announcement
from tests.support.tensors import identical
from tests.support.transport_processes import CHUNK, SOME
from tests.support.waits import PATIENCE
from trinity_events.weights import load_version

CHUNKS = 6000 * 4 // CHUNK
"""Whole chunks of SOME; a short one follows."""


@contextmanager
def reading(store, parts, deadline=PATIENCE, on_part=None):
    """Reads along in the block; how it ended is known behind it."""
    prefetch = SimpleNamespace(ended=None, stop=threading.Event())

    def run():
        prefetch.ended = store.prefetch(parts, prefetch.stop, deadline, on_part)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield prefetch
        thread.join(PATIENCE)
    finally:
        prefetch.stop.set()
        thread.join(PATIENCE)


def write(writer, tensors=SOME):
    for name, tensor in tensors:
        writer.add(name, tensor)
    return writer


def follower_of(store):
    """Chunks that the reader has digested so far."""
    seen = [follower.seen for follower in store.followers if follower.seen is not None]
    return len(seen[0].digests) if seen else 0


def has(module, tensors):
    return all(identical(module.get_parameter(name), tensor) for name, tensor in tensors)


def load(store, module, ahead, part, report):
    event = announcement(part, report)
    return load_version(store, part.run_id, event, module, ahead=ahead).manifests
