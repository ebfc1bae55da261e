"""Hooks of mkdocs: what the pages need that no plugin does."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from trinity_workers.documents import schema_files

_ROLE = re.compile(r":(?:class|data|exc|func|meth|mod):(?=<(?:code|a)\b)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the JSON Schemas, which no commit has, and the page that links to them."""
    page = ["# JSON Schemas", ""]
    for name, text in sorted(schema_files().items()):
        files.append(File.generated(config, f"schemas/{name}", content=text))
        page.append(f"- [{name}]({name})")
    files.append(File.generated(config, "schemas/index.md", content="\n".join(page)))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Give the start page the whole width: it lists the pages itself."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of reStructuredText in docstrings, of which code alone is to be seen."""
    return _ROLE.sub("", html)
