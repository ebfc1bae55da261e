"""Hooks of mkdocs: what the pages need that no plugin does."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|data|exc|func|meth|mod):(?=<(?:code|a)\b)")


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of reStructuredText in docstrings, of which code alone is to be seen."""
    return _ROLE.sub("", html)
