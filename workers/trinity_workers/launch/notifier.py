"""Messages about alarms and the end of a run, to the webhook and the command of its configuration.

1. URL and program come from the configuration of the command alone, and never from the log.
2. A message that cannot be delivered is reported, and changes nothing about the run.
3. Every delivery ends within its deadline; a program is killed then, with all that it started.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import ClassVar, Literal

import anyio
import msgspec
from msgspec import Struct

from trinity_events.errors import TrinityError

from ..config.sections.notify import NotifiedEvent, NotifyConfig
from ..runtime.process_groups import kill_group

INTERRUPTED_DEADLINE = 3.0
"""Seconds for a message about an interrupted run: supervisors kill after ten."""
_LONGEST = 3600.0
"""Seconds of a call, beyond any deadline that is of use."""
_SHOWN = 200
"""Characters of a fault that a warning shows."""

logger = logging.getLogger(__name__)


class Message(Struct, frozen=True, kw_only=True):
    """Message about a run, as a webhook and a command get it."""

    run: str
    event: NotifiedEvent
    sentence: str
    """One sentence about what happened."""
    command: str | None
    """Command that continues the run; null if there is nothing to continue."""

    @property
    def text(self) -> str:
        """Return both in words, as chat services show it."""
        return self.sentence if self.command is None else f"{self.sentence}\n{self.command}"


class NotDelivered(TrinityError):
    """A message was not delivered; its text is the end of a sentence.

    Attributes:
        fault: ``variable`` if the environment has no URL, ``status`` of the server's answer, or
            ``exit`` of the program.
        name: Name of the environment variable.
        status: Status of the answer, or of the program.
    """

    fault: Literal["variable", "status", "exit"]
    name: str = ""
    status: int = 0
    texts: ClassVar = {
        "variable": "is to be in the environment variable {name}, which is not set",
        "status": "answered {status}",
        "exit": "ended with {status}",
    }


async def notify(
    settings: NotifyConfig, message: Message, report: Callable[[str], None] = lambda _: None
) -> None:
    """Deliver a message, if the settings ask for its event. Never raises for a fault of it.

    Args:
        settings: The section of the run's own configuration.
        message: The message.
        report: Receives a sentence about each delivery that failed.
    """
    if message.event not in settings.events:
        return
    deadline = settings.deadline
    if message.event == "interrupted":
        deadline = min(deadline, INTERRUPTED_DEADLINE)
    content = msgspec.json.encode(msgspec.structs.asdict(message) | {"text": message.text})

    async def deliver(target: str, send: Callable[[], Awaitable[None]]) -> None:
        try:
            with anyio.fail_after(deadline):
                await send()
            return
        except TimeoutError:
            fault = f"did not take it within {deadline:g} s"
        except NotDelivered as error:
            fault = str(error)
        except Exception as error:  # of the client, its proxies, or the system
            fault = f"cannot be reached ({type(error).__name__}: {error})"
        sentence = f"run {message.run}: {target} {' '.join(fault.split())[:_SHOWN]}: not notified"
        logger.warning("%s", sentence)
        report(sentence)

    async with anyio.create_task_group() as tasks:
        if settings.webhook is not None:
            url = settings.webhook
            # Without the URL: its path is often a secret.
            tasks.start_soon(deliver, "the webhook", lambda: _post(url, content))
        if settings.command:
            program = settings.command
            tasks.start_soon(deliver, f"the command {program[0]}", lambda: _run(program, content))


async def _post(webhook: str, content: bytes) -> None:
    import httpx

    url: str | None = webhook
    if webhook.startswith("$"):
        url = os.environ.get(webhook[1:])
        if not url:
            raise NotDelivered("variable", name=webhook[1:])
    assert url is not None
    headers = {"Content-Type": "application/json"}
    async with (
        # No redirects: they would send the message to a host that no setting names. The caller's
        # deadline is shorter than this one.
        httpx.AsyncClient(timeout=_LONGEST, follow_redirects=False) as client,
        # Streamed: the body of the reply is not read.
        client.stream("POST", url, content=content, headers=headers) as reply,
    ):
        if not reply.is_success:
            raise NotDelivered("status", status=reply.status_code)


async def _run(command: tuple[str, ...], content: bytes) -> None:
    process = await anyio.open_process(
        [*command], stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )
    try:
        assert process.stdin is not None
        # A program that does not read its input is none that failed.
        with suppress(anyio.BrokenResourceError, OSError):
            await process.stdin.send(content)
            await process.stdin.aclose()
        status = await process.wait()
        if status:
            raise NotDelivered("exit", status=status)
    finally:
        with anyio.CancelScope(shield=True):
            await kill_group(process)
