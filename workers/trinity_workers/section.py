"""Base of all parts of a configuration."""

from __future__ import annotations

from msgspec import Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a configuration: they refuse unknown names."""
