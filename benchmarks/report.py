"""What a benchmark found: printed as a table, kept as JSON, and shown in the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from .measure import Rounds, Row

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- figures: written by python -m benchmarks NAME --keep -->"
END = "<!-- end of figures -->"
_FIGURES = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
_COLUMNS = ("what", "figure", "beside", "its figure", "ratio", "asked", "spread")


class DocumentPlace(NamedTuple):
    """Where figures are kept: the page that shows them, and a folder with each benchmark's."""

    page: Path
    folder: Path


SPEED = DocumentPlace(ROOT / "docs" / "speed.md", ROOT / "docs" / "benchmarks")
"""Of the event plane."""
PERFORMANCE = DocumentPlace(
    ROOT / "docs" / "performance.md", ROOT / "docs" / "benchmarks" / "weights"
)
"""Of the weight plane."""
MEGATRON = DocumentPlace(ROOT / "docs" / "megatron.md", ROOT / "docs" / "benchmarks" / "megatron")
"""Of Megatron trainers."""
GPU = DocumentPlace(ROOT / "docs" / "gpu.md", ROOT / "docs" / "benchmarks" / "gpu")
"""Of weights that lie on a GPU."""


class Machine(Struct, frozen=True, kw_only=True):
    """What a figure depends on. ``load`` is what others used when the benchmark began."""

    cores: int
    python: str
    server: str
    load: float

    def __str__(self) -> str:
        return f"{self.cores} cores, Python {self.python}, {self.server}"


class Report(Struct, frozen=True, kw_only=True):
    """One run of one benchmark."""

    name: str
    title: str
    size: str
    rows: list[Row]
    notes: list[str]
    machine: Machine
    noise: float
    """By how much the slowest of many equal pieces of work exceeded the fastest."""
    seconds: float


class PageBroken(RuntimeError):
    """The page lacks the place for the figures."""


def machine(server: dict[str, Any]) -> Machine:
    """This machine, and what the server says of itself."""
    valkey = server.get("valkey_version")
    return Machine(
        cores=os.cpu_count() or 0,
        python=platform.python_version(),
        server=f"Valkey {valkey}" if valkey else f"Redis {server.get('redis_version')}",
        load=round(os.getloadavg()[0], 2),
    )


def show(report: Report) -> None:
    """Print it."""
    # Wide, so that a pipe or a file loses nothing.
    console = Console(width=None if os.isatty(1) else 170, highlight=False)
    table = Table(title=f"{report.name}: {report.title}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for note in report.notes:
        console.print(f"- {note}", markup=False)
    console.print(f"- {_conditions(report)}", markup=False)


def keep(report: Report, place: DocumentPlace) -> None:
    """Write the figures, beside those of the other benchmarks that were kept, into the page.

    Raises PageBroken when the page has no place for them.
    """
    page, folder = place
    text = page.read_text()
    if not _FIGURES.search(text):
        raise PageBroken(f"{page} lacks the markers {BEGIN} and {END}: put them back")
    folder.mkdir(parents=True, exist_ok=True)
    shown = json.dumps(msgspec.to_builtins(report), indent=2)
    (folder / f"{report.name}.json").write_text(f"{shown}\n")
    figures = "\n\n".join(_section(one) for one in kept(folder))
    page.write_text(_FIGURES.sub(lambda _: f"{BEGIN}\n\n{figures}\n\n{END}", text))


def kept(folder: Path) -> list[Report]:
    """Every report that was kept."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Report)
        for path in sorted(folder.glob("*.json"))
    ]


def _section(report: Report) -> str:
    lines = [
        f"### {report.name}: {report.title}",
        "",
        _line(_COLUMNS),
        _line(["---"] * len(_COLUMNS)),
        *(_line(_cells(row)) for row in report.rows),
        "",
        *(f"- {note}" for note in report.notes),
        f"- {_conditions(report)}",
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    return [
        row.what,
        row.figure,
        row.peer,
        row.peer_figure,
        "" if row.ratio is None else f"{row.ratio:.3g}",
        _asked(row.asked, row.ratio),
        "" if row.spread is None else f"{row.spread:.0%}",
    ]


def _asked(asked: Rounds | None, ratio: float | None) -> str:
    if asked is None or ratio is None:
        return ""
    missed = "" if asked.met_by(ratio) else " (missed)"
    return f"{asked.bound} {asked.limit:g}{missed}"


def _conditions(report: Report) -> str:
    return (
        f"size `{report.size}`, {report.seconds:.0f} s in all; {report.machine}; load "
        f"{report.machine.load:g} as it began; equal pieces of work took up to "
        f"{report.noise:.0%} longer than the fastest"
    )
