"""Calls of HTTP services: a deadline over all attempts, and bounds on calls and on bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import anyio
import httpx
import msgspec

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter
from trinity_events.errors import StructuredError
from trinity_events.log.retry import backoff_delays
from trinity_schemas import FailedDependency

from .errors import RewardCallFailed, RewardServiceUnusable

T = TypeVar("T")

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no JSON: not all of them are its own."""
LARGEST_REPLY = 1 << 20
"""Bytes of a reply; a service that sends more is not read further."""
_LONGEST_PAUSE = 2.0
"""Seconds between two attempts, at most."""
_START_ATTEMPT = 30.0
"""Seconds within which a service answers anything, before a run begins."""
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which another attempt may succeed."""
_GATEWAY = {502, 503, 504}
"""Status codes with which a proxy or a server says that nothing behind it answers."""
_DIRECT: dict[str, httpx.AsyncBaseTransport | None] = {
    "all://localhost": None,
    "all://127.0.0.1": None,
    "all://[::1]": None,
}
"""Hosts that are asked without a proxy of the environment, which has a localhost of its own."""
_SHOWN = 200
"""Characters of a reply that an error shows."""


class Unusable(StructuredError):
    """A reply is not what was asked for; its text is the end of a sentence.

    Attributes:
        fault: ``status`` for a code after which another attempt may succeed, ``format`` if it is no
            chat completion, ``unclear`` if its grade is.
        reason: Body of the reply, or the error of its reader.
        status: Its code.
    """

    fault: Literal["status", "format", "unclear"]
    reason: str = ""
    status: int = 0
    texts: ClassVar = {
        "status": "answered {status}{reason}",
        "format": "sent what is no chat completion: {reason}",
        "unclear": "{reason}",
    }


class HttpCalls:
    """Client of one HTTP service.

    Args:
        name: Name of the service for messages, such as ``the reward service http://...``.
        deadline: Seconds for all attempts at one call.
        attempts: Attempts at one call.
        calls: Calls in flight.
        token_variable: Environment variable with a bearer token.
        waits: Reporter of long waits for a reply.
    """

    def __init__(
        self,
        name: str,
        *,
        deadline: float,
        attempts: int,
        calls: int,
        token_variable: str | None = None,
        waits: WaitReporter = NO_REPORTS,
    ) -> None:
        self.name = name
        self._deadline = deadline
        self._attempts = attempts
        self._free = anyio.CapacityLimiter(calls)
        self._waits = waits
        # Replies are read raw, for their bound: none may be compressed.
        headers = {"Accept-Encoding": "identity"}
        if token_variable is not None:
            token = os.environ.get(token_variable)
            if not token:
                raise RewardServiceUnusable(name, "token", token_variable)
            headers["Authorization"] = f"Bearer {token}"
        longest = 2 * max(deadline, _START_ATTEMPT)  # the calls have deadlines of their own
        try:
            # No redirects: they would send questions to a host that no setting names.
            self._client = httpx.AsyncClient(
                headers=headers, timeout=longest, follow_redirects=False, mounts=_DIRECT
            )
        except (ImportError, ValueError, httpx.InvalidURL, OSError) as error:
            reason = _format_error(error, longest)
            raise RewardServiceUnusable(name, "environment", reason=reason) from None

    async def reach(self, url: str, setting: str) -> None:
        """Ask for anything at a URL, so that a service that is not there is told at once.

        Raises RewardServiceUnusable, which names the setting.
        """
        status = 0
        try:
            with anyio.fail_after(_START_ATTEMPT):
                async with self._client.stream("GET", url) as reply:
                    status = reply.status_code
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            reason = _format_error(error, _START_ATTEMPT)
            raise RewardServiceUnusable(self.name, "absent", setting, reason) from None
        if status in (401, 403):
            raise RewardServiceUnusable(self.name, "refused", status=status)

    async def post(self, url: str, body: Any, read: Callable[[bytes], T]) -> T:
        """Post JSON, and return what ``read`` makes of the reply's bytes.

        ``read`` raises Unusable for a reply that another attempt may better, and RewardFailed for
        one that is final.

        Raises RewardCallFailed: after the attempts or the deadline, for a refusal, or for a body
        that is no JSON.
        """
        try:
            content = msgspec.json.encode(body)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise RewardCallFailed(self.name, "question", str(error)) from None
        # Before the deadline begins: the wait for a free place is not the service's.
        async with self._free:
            fault: str = ""
            dependency: FailedDependency | None = None
            pauses = backoff_delays(_LONGEST_PAUSE)
            try:
                with (
                    self._waits.waiting(self.name, deadline=self._deadline),
                    anyio.fail_after(self._deadline),
                ):
                    for attempt in range(self._attempts):
                        if attempt:
                            await anyio.sleep(next(pauses))
                        try:
                            return read(await self._exchange(url, content))
                        except Unusable as error:
                            fault, dependency = str(error), self._find_dependency(error)
                        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                            fault = f"did not answer ({_format_error(error, self._deadline)})"
                            dependency = FailedDependency(
                                self.name,
                                # It may have died of the question, unless it took no connection.
                                unreachable=isinstance(error, httpx.ConnectError),
                            )
            except TimeoutError:
                dependency = FailedDependency(self.name)
                raise RewardCallFailed(
                    self.name, "late", fault, self._deadline, dependency=dependency
                ) from None
        raise RewardCallFailed(
            self.name, "attempts", fault, attempts=self._attempts, dependency=dependency
        )

    def _find_dependency(self, error: Unusable) -> FailedDependency | None:
        """Return the service if it failed; None if it answered what cannot be used."""
        if error.fault != "status":
            return None
        # A gateway answers so for the service behind it, whatever the question is.
        return FailedDependency(self.name, unreachable=error.status in _GATEWAY)

    async def _exchange(self, url: str, content: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        async with self._client.stream("POST", url, content=content, headers=headers) as reply:
            received = bytearray()
            async for chunk in reply.aiter_raw():  # raw: a small reply may inflate to a large one
                received += chunk
                if len(received) > LARGEST_REPLY:
                    raise RewardCallFailed(self.name, "large", limit=LARGEST_REPLY)
        if reply.status_code in _TRANSIENT:
            raise Unusable("status", _format_body(received), reply.status_code)
        if reply.status_code != httpx.codes.OK:
            reason = _format_body(received)
            raise RewardCallFailed(self.name, "status", reason, status=reply.status_code)
        return bytes(received)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _format_error(error: BaseException, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s"
    return " ".join(str(error).split()) or type(error).__name__


def _format_body(reply: bytes | bytearray) -> str:
    text = " ".join(reply[:_SHOWN].decode(errors="replace").split())
    return f": {text}" if text else ""
