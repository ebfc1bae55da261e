"""Prints pip constraints that hold each direct dependency at the lowest version promised.

python tests/install/lowest.py EXTRA...
"""

import re
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LOWEST = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?(?:>=|==)([0-9][^,;]*)")


def lowest(*extras: str) -> list[str]:
    """Return the constraints of the base and of these extras, by pyproject.toml."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    named = [
        *project["dependencies"],
        *(requirement for extra in extras for requirement in optional[extra]),
    ]
    matches = [
        _LOWEST.match(requirement)
        for requirement in named
        if not requirement.startswith(project["name"])
    ]
    return [f"{match[1]}=={match[2]}" for match in matches]


if __name__ == "__main__":
    print(*lowest(*sys.argv[1:]), sep="\n")
