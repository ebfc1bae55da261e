"""Signals that ask a process to end."""

from __future__ import annotations

import signal


def ending_signals() -> list[signal.Signals]:
    """Return SIGTERM and SIGHUP (a closed terminal), without those that are ignored (nohup)."""
    asked = (signal.SIGTERM, signal.SIGHUP)
    return [one for one in asked if signal.getsignal(one) is not signal.SIG_IGN]
