"""Rules of the ACL file in docs/security.md."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "security.md"


def rules():
    """The lines of the ACL file in the page."""
    [block] = re.findall(r"^```text\n(user .*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return block.splitlines()
