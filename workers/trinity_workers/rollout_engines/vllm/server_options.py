"""Options of the engine `vllm-server`, which rules of configurations read: it imports no torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from ..base import EngineOptionsRefused, RolloutEngineError

NAME = "vllm-server"

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ServerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine `vllm-server`."""

    url: str | list[str]
    """URL of the server; a list has one for each explorer, by rank."""
    api_key_variable: str | None = None
    """Environment variable with the server's API key."""
    request_timeout: Seconds = 600.0
    """Seconds for each request, that of a whole turn or of the load of a version."""
    startup_timeout: Seconds = 600.0
    """Seconds for which a server that is away is waited for."""
    allow_remote: bool = False
    """Accept a URL beyond loopback. The routes that change weights have no key."""


class VLLMServerUnusable(RolloutEngineError):
    """A vLLM server cannot be driven.

    Attributes:
        url: URL of the server.
        fault: ``url`` if it is none of HTTP, ``remote`` beyond loopback, ``rank`` if the explorer
            has none, ``key`` without the variable, ``plugin`` if its workers do not have ours,
            ``setting`` if it was started with another value, ``driven`` by another explorer.
        setting: Setting of the server, or variable.
        value: Value of the setting.
        needed: Value that the run needs.
    """

    url: str
    fault: Literal["url", "remote", "rank", "key", "plugin", "setting", "driven"]
    setting: str = ""
    value: str = ""
    needed: str = ""
    texts: ClassVar = {
        "url": "explorer.engine_options.url is {url}, which is no URL of HTTP, such as "
        "http://127.0.0.1:8000",
        "remote": "explorer.engine_options.url is {url}, which is not on loopback: the routes that "
        "change a server's weights have no key. Let an explorer run on the server's host, or set "
        "allow_remote where nothing else reaches it",
        "rank": "explorer.engine_options.url has no server for explorer-{value}: list one for each",
        "key": "explorer.engine_options.api_key_variable is {setting}, which is not set here",
        "plugin": "the vLLM server at {url} has no worker of trinity-events ({value}): start it as "
        "docs/vllm.md describes",
        "setting": "the vLLM server at {url} has {setting} {value}, and the run needs {needed}: "
        "start it as docs/vllm.md describes",
        "driven": "the vLLM server at {url} is driven by another explorer: give each its own "
        "(explorer.engine_options.url)",
    }


def read_server_options(options: Mapping[str, Any]) -> ServerOptions:
    """Return the engine's own options. Raises EngineOptionsRefused for others."""
    try:
        return msgspec.convert(options, ServerOptions)
    except msgspec.ValidationError as error:
        fields = ServerOptions.__struct_fields__
        raise EngineOptionsRefused(NAME, str(error), fields) from None


def get_url(own: ServerOptions, rank: int) -> str:
    """Return the URL of an explorer's server.

    Raises:
        VLLMServerUnusable: It is none of HTTP, or leads beyond loopback, or the explorer has none.
    """
    url: str
    if isinstance(own.url, str):
        url = own.url
    else:
        if rank >= len(own.url):
            raise VLLMServerUnusable("", "rank", value=str(rank))
        url = own.url[rank]
    try:
        parts = urlsplit(url)
        # `port` is read for its ValueError alone.
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise VLLMServerUnusable(url, "url") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise VLLMServerUnusable(url, "url")
    if not own.allow_remote and not is_loopback(host):
        raise VLLMServerUnusable(url, "remote")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Return True if a name or an address is this host's own, without asking a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
