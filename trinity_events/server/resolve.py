"""The order in which a command chooses its server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .embedded import EmbeddedServer, trinity_home
from .url import LOG_SERVER, WEIGHTS_SERVER


@contextmanager
def serving(redis_url: str | None) -> Iterator[str]:
    """The URL given, else ``TRINITY_REDIS_URL``, else that of the embedded server, attached."""
    url = redis_url or os.environ.get(LOG_SERVER.variable)
    if url:
        yield url
    else:
        with EmbeddedServer(trinity_home()).attached() as embedded:
            yield embedded


@contextmanager
def serving_weights(weights_url: str | None, redis_url: str) -> Iterator[str]:
    """The server of the weight chunks: the URL given, or ``TRINITY_WEIGHTS_REDIS_URL``.

    Else, beside the embedded log server, a second one that keeps no file; beside any other log
    server, that server itself.
    """
    url = weights_url or os.environ.get(WEIGHTS_SERVER.variable)
    embedded = EmbeddedServer(trinity_home())
    if url is None and redis_url == embedded.url:
        with EmbeddedServer(trinity_home(), "weights", durable=False).attached() as own:
            yield own
    else:
        yield url or redis_url
