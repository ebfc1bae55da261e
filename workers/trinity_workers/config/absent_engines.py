"""Trainers of Trinity-RFT that are not here, and the answer to a configuration that names one."""

from __future__ import annotations

from typing import Any

_REASONS = {
    "tinker": "Tinker's service holds model and optimizer itself, so there are no weights to "
    "publish: publish the steps of such a loop by trinity_events.training_run",
    "verl_legacy": "veRL before 0.8 is not driven: install veRL 0.8 or later, and write verl",
    "monkey_patch": "no function of veRL is replaced: write verl, which goes through veRL's own "
    "extension points",
}
_SETTING = "trainer.engine"


def format_absent_engine(path: str, value: Any) -> str:
    """Return the reason and the way out for an engine that is not here; else empty text."""
    if path != _SETTING or not isinstance(value, str):
        return ""
    # A module's path names it too, such as trinity.trainer.verl.monkey_patch.
    parts = value.lower().split(".")
    return next((f": {reason}" for name, reason in _REASONS.items() if name in parts), "")
