"""Lua scripts of the packages, run on a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import redis
import redis.asyncio

_INCLUDE = re.compile(r"^--include (\w+)\n", re.MULTILINE)
"""Line of a script in whose place another script of the package is put."""


@cache
def _text(name: str, package: str) -> str:
    text = files(package).joinpath(f"{name}.lua").read_text()
    return _INCLUDE.sub(lambda match: _text(match[1], package), text)


def lua_script(
    client: redis.Redis | redis.asyncio.Redis, name: str, package: str = __package__
) -> Any:
    """Return the source of a script of a package, by default of this one."""
    return client.register_script(_text(name, package))


class Scripts:
    """Runs scripts by name; each is sent once as text, and later called by its digest.

    A call returns the client's result, which an asynchronous client makes an awaitable.
    """

    def __init__(
        self, client: redis.Redis | redis.asyncio.Redis, package: str = __package__
    ) -> None:
        self._client = client
        self._package = package
        self._made: dict[str, Any] = {}

    def __call__(self, name: str, *, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Run a script with its keys and arguments."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = lua_script(self._client, name, self._package)
        return made(keys=keys, args=args)
