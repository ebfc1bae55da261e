"""Client of a vLLM server, with those methods of vLLM's AsyncLLM that the engine calls.

1. Every request has a deadline. One that is not answered, or that is answered by an error of the
   server, loses the server.
2. A connection on which nothing is sent lies open as long as the server's process: its end loses
   the server at once, also while nothing is asked.
3. A server that is lost stays so until :meth:`ServerClient.connect`: no request reaches one that
   took its place unnoticed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
from msgspec import Struct

from trinity_events.system.error_text import ungrouped

from ..base import NotServing, RolloutEngineError

_KEPT_IDLE = 2.0
"""Seconds for which an idle connection is used again; the server closes it after 5."""
_CONNECT_TIMEOUT = 5.0
_LONGEST_REASON = 300

T = TypeVar("T")


class VLLMServerAway(NotServing):
    """A vLLM server does not answer, or not with weights that this explorer has installed.

    Attributes:
        url: URL of the server.
        reason: Error of the last request.
    """

    url: str = ""
    reason: str = ""
    text = "the vLLM server at {url} is away: {reason}"


class VLLMServerRefused(RolloutEngineError):
    """A vLLM server refuses a request.

    Attributes:
        url: URL of the server.
        path: Path of the request.
        status: Status of the answer.
        reason: Begin of the answer.
    """

    url: str
    path: str
    status: int
    reason: str
    text = (
        "the vLLM server at {url} answers {path} with {status}{_reason}: start it as docs/vllm.md "
        "describes"
    )

    @property
    def _reason(self) -> str:
        return f" ({self.reason})" if self.reason else ""


class VersionSpan(Struct, frozen=True):
    """Tokens from ``start`` to ``end`` of an answer, which one version sampled."""

    version: str
    start: int
    end: int


class SampledToken(Struct, frozen=True):
    """Token of an answer, with its log-probability in nats."""

    token_id: int
    logprob: float


class _Logprobs(Struct, frozen=True):
    content: list[SampledToken]


class _AnswerChoice(Struct, frozen=True):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    weight_versions: list[VersionSpan] | None = None


class PromptLogprob(Struct, frozen=True):
    """Log-probability of a token of the prompt, in nats."""

    logprob: float


class _Answer(Struct, frozen=True):
    choices: tuple[_AnswerChoice]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class _Results(Struct, frozen=True):
    results: list[Any]


class ServerCompletion(NamedTuple):
    """Completion of one request, as vLLM's CompletionOutput."""

    token_ids: list[int]
    logprobs: list[dict[int, SampledToken]]
    finish_reason: str
    weight_versions: list[VersionSpan]


class Output(NamedTuple):
    """Answer to one request, as vLLM's RequestOutput."""

    outputs: tuple[ServerCompletion]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    finished: bool = True


class ServerClient:
    """Client of one server. It watches over the server as a CoreWatch does.

    Args:
        url: URL of the server.
        timeout: Seconds for each request.
        api_key: Key of the server; None for none.
    """

    def __init__(self, url: str, timeout: float, api_key: str | None) -> None:
        self.url = url
        self.on_lost: Callable[[], None] = lambda: None
        """Called as the server is lost."""
        self._client = httpx.AsyncClient(
            base_url=url,
            # Without a bound of connections, none is waited for: the engine's slots bound the
            # requests.
            timeout=httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_IDLE),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # It would lead to a server in which nothing was installed.
            follow_redirects=False,
            trust_env=False,  # a proxy would have the routes that change weights
        )
        self._lost = ""
        self._gone: anyio.Event | None = None
        """Set as the server is lost; None before it is reached for the first time."""
        self._watch: asyncio.Transport | None = None

    @property
    def is_connected(self) -> bool:
        """Return True from a connection on, until the server is lost."""
        return self._gone is not None and not self._gone.is_set()

    async def connect(self) -> None:
        """Open the connection that ends with the server.

        Raises:
            VLLMServerAway: It cannot be reached.
        """
        parts = urlsplit(self.url)
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if context else 80)
        self._close_watch()
        try:
            with anyio.fail_after(_CONNECT_TIMEOUT):
                self._watch, _ = await loop.create_connection(
                    lambda: _Watch(self), parts.hostname or "", port, ssl=context
                )
        except (OSError, TimeoutError) as error:
            raise VLLMServerAway(url=self.url, reason=_format_error(error)) from None
        self._gone, self._lost = anyio.Event(), ""

    async def close(self) -> None:
        """Close the connections."""
        self._close_watch()
        await self._client.aclose()

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.abort()

    def ended(self, watch: asyncio.BaseTransport | None, error: Exception | None) -> None:
        """Lose the server, if it ended the connection of the watch."""
        if watch is not None and watch is self._watch:
            self.lose(_format_error(error) if error else "its process has ended")

    def lose(self, reason: str) -> VLLMServerAway:
        """Lose the server, and return the error to raise."""
        if self.is_connected:
            assert self._gone is not None
            self._lost = reason
            self._gone.set()
            self.on_lost()
        return VLLMServerAway(url=self.url, reason=self._lost or reason)

    def give_up(self, reason: str) -> VLLMServerAway:
        """Leave the server, which does not answer; return the error to raise."""
        return self.lose(reason)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """End the block as soon as the server is lost.

        Raises:
            VLLMServerAway: It is lost, or was before the block.
        """
        gone = self._gone
        if gone is None or gone.is_set():
            raise VLLMServerAway(url=self.url, reason=self._lost or "it was not reached")

        async def watch() -> None:
            await gone.wait()
            raise VLLMServerAway(url=self.url, reason=self._lost)

        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                yield
                tasks.cancel_scope.cancel()

    # --- methods of AsyncLLM ---------------------------------------------------------------

    async def generate(
        self, prompt: Mapping[str, Any], params: Mapping[str, Any], name: str
    ) -> AsyncIterator[Output]:
        """Yield the whole answer to a prompt, with the version of each token."""
        body = {
            "token_ids": prompt["prompt_token_ids"],
            "cache_salt": prompt["cache_salt"],
            "sampling_params": params,
            "request_id": name,
        }
        answer = await self._post("/inference/v1/generate", _Answer, body)
        (choice,) = answer.choices
        sampled = choice.logprobs.content
        if [each.token_id for each in sampled] != choice.token_ids:
            raise self.lose("an answer has log-probabilities of other tokens")
        yield Output(
            (
                ServerCompletion(
                    choice.token_ids,
                    [{each.token_id: each} for each in sampled],
                    choice.finish_reason,
                    choice.weight_versions or [],
                ),
            ),
            answer.prompt_logprobs,
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop generation, as AsyncLLM does."""
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._post("/pause", query=query)

    async def resume_generation(self) -> None:
        """Resume generation."""
        await self._post("/resume")

    async def finish_weight_update(self, weight_version: str) -> None:
        """End an update, and label the weights, in one request: no server between has the label."""
        await self._post("/finish_weight_update", body={"weight_version": weight_version})

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of each worker, and return the results."""
        body = {"method": method, "args": args, "kwargs": kwargs or {}}
        results: list[Any] = (await self._post("/collective_rpc", _Results, body)).results
        return results

    async def _post(
        self, path: str, read: type[T] | Any = Any, body: Any = None, query: Any = None
    ) -> Any:
        """Return the answer to a request. Raises VLLMServerAway and VLLMServerRefused."""
        if not self.is_connected:
            raise VLLMServerAway(url=self.url, reason=self._lost or "it was not reached")
        content = msgspec.json.encode({} if body is None else body)
        headers = {"Content-Type": "application/json"}
        try:
            reply = await self._client.post(path, content=content, headers=headers, params=query)
        except (httpx.HTTPError, OSError) as error:
            raise self.lose(f"{path}: {_format_error(error)}") from error
        if reply.is_server_error:
            raise self.lose(f"{path}: {reply.status_code} {_begin(reply)}")
        if not reply.is_success:
            raise VLLMServerRefused(self.url, path, reply.status_code, _begin(reply))
        try:
            return msgspec.json.decode(reply.content or b"null", type=read)
        except msgspec.MsgspecError as error:
            raise self.lose(f"{path}: {error}") from error


class _Watch(asyncio.Protocol):
    """End of the connection that lies open as long as the server's process."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.ended(self._transport, exc)


def _begin(reply: httpx.Response) -> str:
    return " ".join(reply.text.split())[:_LONGEST_REASON]


def _format_error(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, httpx.TimeoutException)):
        return "nothing came in time"
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
