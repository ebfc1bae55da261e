"""The order in which a command chooses its server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .embedded import EmbeddedServer, trinity_home


@contextmanager
def serving(redis_url: str | None) -> Iterator[str]:
    """The URL given, else ``TRINITY_REDIS_URL``, else that of the embedded server, attached."""
    url = redis_url or os.environ.get("TRINITY_REDIS_URL")
    if url:
        yield url
    else:
        with EmbeddedServer(trinity_home()).attached() as embedded:
            yield embedded
