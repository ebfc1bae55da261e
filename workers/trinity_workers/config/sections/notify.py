"""Section `notify`: messages about alarms and the end of a run."""

from __future__ import annotations

from typing import Literal

from ...section import Section
from ..types import Seconds

NotifiedEvent = Literal["failed", "interrupted", "finished", "alarm"]


class NotifyConfig(Section, frozen=True, kw_only=True):
    """Messages about alarms and the end of a run, to a URL and to a command."""

    webhook: str | None = None
    """URL that gets each message as JSON by POST. `$NAME` takes it from that environment variable,
    so that the log does not have it."""
    command: tuple[str, ...] = ()
    """Program and arguments that get each message as JSON on standard input, such as
    `[./page.sh, ops]`. No shell reads them."""
    events: tuple[NotifiedEvent, ...] = ("failed", "interrupted", "finished", "alarm")
    """Ends of which a message is sent, and `alarm` for each alarm."""
    deadline: Seconds = 10.0
    """Seconds for a message. Of a run that was interrupted, 3 at most."""
