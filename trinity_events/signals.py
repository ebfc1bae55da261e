"""Which signals ask a process to end."""

from __future__ import annotations

import signal


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, and SIGHUP, which comes when the terminal goes; without what nohup ignores."""
    asked = (signal.SIGTERM, signal.SIGHUP)
    return [one for one in asked if signal.getsignal(one) is not signal.SIG_IGN]
