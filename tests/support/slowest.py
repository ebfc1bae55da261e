"""Print the slowest fifty tests of a report of durations as a table: make slowest.

The report is the output of ``pytest --durations=0``. Its times are those of one run. The name
of a test is its claim.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

SHOWN = 50
_DURATION = re.compile(r"\s*(\d+\.\d+)s (?:setup|call|teardown)\s+tests/(\S+?)::(\w+)")


def slowest(report: Iterable[str]) -> list[tuple[float, str, str]]:
    """Return seconds, file and function of the slowest tests, their cases added up."""
    seconds: Counter[tuple[str, str]] = Counter()
    for line in report:
        if match := _DURATION.match(line):
            seconds[match[2], match[3]] += float(match[1])
    return [(took, *test) for test, took in seconds.most_common(SHOWN)]


def main() -> None:
    """Print the table, of reports that are named or of the standard input."""
    lines = [Path(name).read_text().splitlines() for name in sys.argv[1:]] or [sys.stdin]
    print("| seconds | test | claim |\n|---:|---|---|")
    for seconds, file, function in slowest(chain(*lines)):
        claim = function.removeprefix("test_").replace("_", " ")
        print(f"| {seconds:.0f} | `{file}` | `{claim}` |")


if __name__ == "__main__":
    main()
