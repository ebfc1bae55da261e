"""Scripts that lie beside our modules, on a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import redis
import redis.asyncio


@cache
def _text(name: str, package: str) -> str:
    return files(package).joinpath(f"{name}.lua").read_text()


def lua_script(
    client: redis.Redis | redis.asyncio.Redis, name: str, package: str = __package__
) -> Any:
    """One of the scripts of a package, this one by default, as the client has them."""
    return client.register_script(_text(name, package))


class Scripts:
    """Runs scripts by name; each is sent whole once, and then named by its digest.

    What a call returns is the client's: an awaitable of an asynchronous one.
    """

    def __init__(
        self, client: redis.Redis | redis.asyncio.Redis, package: str = __package__
    ) -> None:
        self._client = client
        self._package = package
        self._made: dict[str, Any] = {}

    def __call__(self, name: str, *, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Run a script."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = lua_script(self._client, name, self._package)
        return made(keys=keys, args=args)
