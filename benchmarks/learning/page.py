"""Page of the runs: its tables and pictures, from the results that are kept."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from ..chart import Line, Panel, line_chart
from ..report import ROOT, PageBroken
from .plan import ALONE, BOUNDS, FAMILIES, SEEDS, STUDIED, STYLES, bound_way, plan
from .results import LearningResult
from .statistics import band, level, paired_differences, t_interval

PAGE = ROOT / "docs" / "learning.md"
KEPT = ROOT / "docs" / "benchmarks" / "learning" / "runs.jsonl"
BEGIN = "<!-- runs: written by python -m benchmarks.learning --keep -->"
END = "<!-- end of runs -->"
_SECTION = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
_Y = "held-out answers exactly right"

ByWay = Mapping[tuple[str, str], Sequence[LearningResult]]


def keep(results: Iterable[LearningResult]) -> None:
    """Store results, and write the page of all that are stored."""
    stored = {result.name: result for result in read_stored()} | {
        result.name: result for result in results
    }
    order = {run.name: place for place, run in enumerate(plan())}
    lines = [msgspec.json.encode(stored[name]) for name in sorted(stored, key=order.__getitem__)]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_bytes(b"".join(line + b"\n" for line in lines))
    for path, text in written(read_stored()).items():
        path.write_text(text)


def read_stored() -> list[LearningResult]:
    """Return all stored results."""
    if not KEPT.exists():
        return []
    lines = KEPT.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=LearningResult) for line in lines]


def written(results: Sequence[LearningResult]) -> dict[Path, str]:
    """Return every file that follows from the results, as it should be."""
    text = PAGE.read_text()
    if not _SECTION.search(text):
        raise PageBroken("markers", PAGE, BEGIN, END)
    grouped: defaultdict[tuple[str, str], list[LearningResult]] = defaultdict(list)
    for result in results:
        grouped[result.family, result.way].append(result)
    section = f"{BEGIN}\n\n{_sections(grouped)}\n\n{END}"
    folder = PAGE.parent
    return {
        PAGE: _SECTION.sub(lambda _: section, text),
        folder / "learning-families.svg": _families_chart(grouped),
        folder / "learning-styles.svg": _ways_chart(grouped, "Styles", [ALONE, *STYLES]),
        folder / "learning-staleness.svg": _bounds_chart(grouped),
    }


def _sections(runs: ByWay) -> str:
    pairs = [(family, way) for family in FAMILIES for way in (ALONE, "fixed", "fully_async")]
    styles = [(STUDIED, way) for way in (ALONE, *STYLES)]
    bounds = [
        (STUDIED, bound_way(bound, corrected=is_)) for bound in BOUNDS for is_ in (True, False)
    ]
    return "\n\n".join(
        (
            "## Three families",
            "![Held-out reward over training steps, three families](learning-families.svg)",
            _table(runs, pairs),
            "## Styles",
            "![Held-out reward over training steps, four styles](learning-styles.svg)",
            _table(runs, styles),
            "## Staleness",
            "![Held-out reward over training steps, bounds of staleness](learning-staleness.svg)",
            _table(runs, [(STUDIED, ALONE), *bounds]),
            "## Runs that are in",
            _runs_in(runs),
        )
    )


def _table(runs: ByWay, pairs: Sequence[tuple[str, str]]) -> str:
    rows = [
        ("family", "way", "seeds", "start", "end", "difference", "staleness"),
        ("---", "---", "---", "---", "---", "---", "---"),
    ]
    for family, way in pairs:
        results = runs.get((family, way), ())
        if not results:
            rows.append((family, _way_shown(way), "not yet", "", "", "", ""))
            continue
        stale = [result.staleness for result in results if result.staleness is not None]
        rows.append(
            (
                family,
                _way_shown(way),
                ", ".join(str(result.seed) for result in results),
                f"{fmean(result.curve[0].exact for result in results):.3f}",
                f"{fmean(map(level, results)):.3f}",
                _difference(runs, family, way),
                f"{fmean(stale):.2f}" if stale else "",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _difference(runs: ByWay, family: str, way: str) -> str:
    if way == ALONE:
        return ""
    differences = paired_differences(runs[family, way], runs.get((family, ALONE), ()))
    return t_interval(differences).shown(signed=True) if differences else "not yet"


def _runs_in(runs: ByWay) -> str:
    ways: dict[tuple[str, str], None] = {(run.family, run.way): None for run in plan()}
    rows = [("family", "way", *(f"seed {seed}" for seed in SEEDS)), ("---",) * (2 + len(SEEDS))]
    for family, way in ways:
        has = {result.seed for result in runs.get((family, way), ())}
        cells = ("in" if seed in has else "not yet" for seed in SEEDS)
        rows.append((family, _way_shown(way), *cells))
    count = sum(len(results) for results in runs.values())
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{count} of {len(list(plan()))}.\n\n{table}"


def _way_shown(way: str) -> str:
    return way if way == ALONE or way.startswith("bound") else f"`{way}`"


def _families_chart(runs: ByWay) -> str:
    panels = [
        Panel(family, _lines(runs, family, (ALONE, "fixed", "fully_async"))) for family in FAMILIES
    ]
    return line_chart("Learning through the pipeline and without it", panels, "training step", _Y)


def _ways_chart(runs: ByWay, title: str, ways: Sequence[str]) -> str:
    return line_chart(
        f"{title}, {STUDIED}",
        [Panel(way, _lines(runs, STUDIED, (ALONE, way))) for way in ways if way != ALONE],
        "training step",
        _Y,
    )


def _bounds_chart(runs: ByWay) -> str:
    panels = []
    for bound in BOUNDS:
        lines = []
        for corrected in (True, False):
            label = "with correction" if corrected else "without correction"
            way = bound_way(bound, corrected=corrected)
            if results := runs.get((STUDIED, way)):
                lines.append(Line(label, band(results)))
        panels.append(Panel(f"bound {bound}", lines))
    return line_chart(f"fully_async, {STUDIED}", panels, "training step", _Y)


def _lines(runs: ByWay, family: str, ways: Sequence[str]) -> list[Line]:
    return [Line(way, band(results)) for way in ways if (results := runs.get((family, way)))]
