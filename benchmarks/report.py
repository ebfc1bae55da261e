"""Report of a benchmark: printed as a table, stored as JSON, and shown in the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from trinity_schemas.errors import StructuredError

from .measure import Rounds, Row

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- figures: written by python -m benchmarks NAME --keep -->"
END = "<!-- end of figures -->"
_FIGURES = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
_COLUMNS = ("what", "figure", "beside", "its figure", "ratio", "asked", "spread")


class DocumentPlace(NamedTuple):
    """Destination of figures: the page that shows them, and the folder of the JSON files."""

    page: Path
    folder: Path


SPEED = DocumentPlace(ROOT / "docs" / "speed.md", ROOT / "docs" / "benchmarks")
"""Place of the event plane's figures."""
PERFORMANCE = DocumentPlace(
    ROOT / "docs" / "performance.md", ROOT / "docs" / "benchmarks" / "weights"
)
"""Place of the weight plane's figures."""
MEGATRON = DocumentPlace(ROOT / "docs" / "megatron.md", ROOT / "docs" / "benchmarks" / "megatron")
"""Place of the Megatron trainers' figures."""
PROOF = DocumentPlace(ROOT / "docs" / "proof.md", ROOT / "docs" / "benchmarks" / "proof")
"""Place of the figures of the proof of versions."""
GPU = DocumentPlace(ROOT / "docs" / "gpu.md", ROOT / "docs" / "benchmarks" / "gpu")
"""Place of the figures of weights on a GPU."""
ENGINES = DocumentPlace(ROOT / "docs" / "vllm.md", ROOT / "docs" / "benchmarks" / "engines")
"""Place of the figures of rollout engines."""


class Machine(Struct, frozen=True, kw_only=True):
    """Machine on which figures depend; ``load`` is the load average when the benchmark began."""

    cores: int
    python: str
    server: str
    load: float

    def __str__(self) -> str:
        return f"{self.cores} cores, Python {self.python}, {self.server}"


class Report(Struct, frozen=True, kw_only=True):
    """Report of one run of one benchmark."""

    name: str
    title: str
    size: str
    rows: list[Row]
    notes: list[str]
    machine: Machine
    noise: float
    """Excess of the slowest of many equal pieces of work over the fastest, as a share."""
    seconds: float


class PageBroken(StructuredError, RuntimeError):
    """A page lacks what the figures need.

    Attributes:
        fault: ``markers`` between which figures are written, ``figure`` that the page quotes, or
            ``runs`` if it does not name their number.
        page: The page.
        begin: Marker before the figures.
        end: Marker after them.
        quote: Row of the benchmark that is quoted.
    """

    fault: Literal["markers", "figure", "runs"]
    page: Path | None = None
    begin: str = ""
    end: str = ""
    quote: object = None
    texts: ClassVar = {
        "markers": "{page} lacks the markers {begin} and {end}: put them back",
        "figure": "{quote} was not kept: run python -m benchmarks --keep, or quote another",
        "runs": "{page} does not say how many runs had faults: make chaos",
    }


def machine(server: dict[str, Any]) -> Machine:
    """Return the description of this machine and of the server's version."""
    valkey = server.get("valkey_version")
    return Machine(
        cores=os.cpu_count() or 0,
        python=platform.python_version(),
        server=f"Valkey {valkey}" if valkey else f"Redis {server.get('redis_version')}",
        load=round(os.getloadavg()[0], 2),
    )


def show(report: Report) -> None:
    """Print a report."""
    # Wide, so that a pipe or a file gets every column.
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
    """Store a report, and write all stored reports into the page.

    Raises PageBroken if the page lacks the markers.
    """
    page, folder = place
    text = page.read_text()
    if not _FIGURES.search(text):
        raise PageBroken("markers", page, BEGIN, END)
    folder.mkdir(parents=True, exist_ok=True)
    shown = json.dumps(msgspec.to_builtins(report), indent=2)
    (folder / f"{report.name}.json").write_text(f"{shown}\n")
    figures = "\n\n".join(_section(report) for report in read_reports(folder))
    page.write_text(_FIGURES.sub(lambda _: f"{BEGIN}\n\n{figures}\n\n{END}", text))


def read_reports(folder: Path) -> list[Report]:
    """Return all stored reports."""
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
        _format_target(row.target, row.ratio),
        "" if row.spread is None else f"{row.spread:.0%}",
    ]


def _format_target(target: Rounds | None, ratio: float | None) -> str:
    if target is None or ratio is None:
        return ""
    missed = "" if target.met_by(ratio) else " (missed)"
    return f"{target.bound} {target.limit:g}{missed}"


def _conditions(report: Report) -> str:
    return (
        f"size `{report.size}`, {report.seconds:.0f} s in all; {report.machine}; load "
        f"{report.machine.load:g} as it began; equal pieces of work took up to "
        f"{report.noise:.0%} longer than the fastest"
    )
