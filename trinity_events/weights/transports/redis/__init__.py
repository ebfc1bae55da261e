"""Through a Redis server, to any host."""

from .store import RedisChunkStore

__all__ = ["RedisChunkStore"]
