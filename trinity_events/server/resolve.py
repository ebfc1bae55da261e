"""Choice of the server that a command uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .embedded import EmbeddedServer, trinity_home
from .url import LOG_SERVER, WEIGHTS_SERVER


@contextmanager
def serving(redis_url: str | None) -> Iterator[str]:
    """Yield the given URL, else ``TRINITY_REDIS_URL``, else that of the embedded server."""
    url = redis_url or os.environ.get(LOG_SERVER.variable)
    if url:
        yield url
    else:
        with EmbeddedServer(trinity_home()).attached() as embedded:
            yield embedded


@contextmanager
def serving_weights(weights_url: str | None, redis_url: str) -> Iterator[str]:
    """Yield the URL of the weights server: as given, or ``TRINITY_WEIGHTS_REDIS_URL``.

    Without either, an embedded log server gets a second embedded server, which keeps no file. Any
    other log server also takes the chunks.
    """
    url = weights_url or os.environ.get(WEIGHTS_SERVER.variable)
    embedded = EmbeddedServer(trinity_home())
    # Chunks in the log's server would be written to its append-only file, and slow it down.
    if url is None and redis_url == embedded.url:
        with EmbeddedServer(trinity_home(), "weights", durable=False).attached() as own:
            yield own
    else:
        yield url or redis_url
