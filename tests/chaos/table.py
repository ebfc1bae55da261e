"""The matrix as a table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from .matrix import VICTIMS, Cell, Result
from .scenarios import Scenario

BEGIN = "<!-- matrix: written by make chaos -->"
END = "<!-- end of matrix -->"


def table(cells: Sequence[Cell], others: Sequence[Scenario], results: dict[str, Result]) -> str:
    """Boundaries down, victims across; each field says before and after."""
    lines = []
    if cells:
        lines += [f"| boundary | {' | '.join(VICTIMS)} |", "|---" * (len(VICTIMS) + 1) + "|"]
    for boundary in dict.fromkeys(cell.boundary for cell in cells):
        fields = [_field(boundary, victim, results) for victim in VICTIMS]
        lines.append(f"| `{boundary}` | {' | '.join(fields)} |")
    if others:
        lines += ["", "| disturbance | outcome |", "|---|---|"]
    for other in others:
        lines.append(f"| {other.name} | {_mark(results.get(other.name))} |")
    return "\n".join(lines) + "\n"


def _field(boundary: str, victim: str, results: dict[str, Result]) -> str:
    pair = [results.get(f"{victim}/{boundary}/{place}") for place in ("before", "after")]
    return " ".join(_mark(result) for result in pair)


def _mark(result: Result | None) -> str:
    if result is None:
        return "-"
    return "**fails**" if result.faults else "ok"


def summary(results: Sequence[Result], seconds: float) -> str:
    """One line: how many, how many failed, how long."""
    failed = sum(1 for result in results if result.faults)
    return f"\n{len(results)} runs, {failed} with faults, {seconds:.0f} seconds.\n"


def with_matrix(page: str, text: str) -> str:
    """The page with its matrix replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}{END}{after}"
