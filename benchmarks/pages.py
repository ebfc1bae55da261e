"""Charts and short tables at the top of pages, from kept figures alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .chart import Bar, bar_chart
from .report import MEGATRON, PERFORMANCE, ROOT, SPEED, PageBroken, read_reports

_DOCS = ROOT / "docs"
BEGIN = "<!-- summary: written by python -m benchmarks --pages -->"
END = "<!-- end of summary -->"
_SUMMARY = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
_CHAOS = re.compile(r"^(\d+) runs, (\d+) with faults", re.MULTILINE)
_LARGE = "512 MiB in 200 tensors"


class Quote(NamedTuple):
    """One kept figure: a row of a benchmark, or what the row is held against."""

    benchmark: str
    what: str
    peer: str | None = None
    of_peer: bool = False


def _beside(benchmark: str, what: str, peer: str) -> Quote:
    return Quote(benchmark, what, peer, of_peer=True)


_READY = Quote("latency", "publish to step-ready, median")
_READY_P99 = Quote("latency", "publish to step-ready, p99")
_HOPS = _beside("latency", "publish to step-ready, median", "two bare hops, median")
_POLLED = Quote("latency", "the original's design, save's end to seen, median")
_FOLDED = Quote("fold", "live reducer, 55,000 entries")
_READ = _beside("fold", "live reducer, 55,000 entries", "client's read and decode loop")
_FASTSTREAM = _beside("fold", "live reducer, 55,000 entries", "FastStream subscriber")
_CPU_64 = Quote("control_plane", "CPU of the reducer, 64 ranks")
_CPU_8 = Quote("control_plane", "CPU of the reducer, 8 ranks")
_GROWN = Quote("growth", "memory of the reducer, 100,000 steps, 1,740,001 events")
_YOUNG = _beside("growth", "memory of the reducer, 100,000 steps, 1,740,001 events", "1,000 steps")
_REPLAY = Quote("replay", "replay RUN, peak memory, 1,000,000 entries")
_REPLAY_SHORT = _beside("replay", "replay RUN, peak memory, 1,000,000 entries", "100,000 entries")

_SHARED = Quote("weights", f"{_LARGE}, shared memory")
_AT_REST = Quote("weights", f"{_LARGE}, shared memory, into a model at rest")
_PIPELINE = _beside("weights", f"{_LARGE}, shared memory", "bare two-process pipeline")
_ORIGINAL = _beside("weights", f"{_LARGE}, shared memory", "the original's path")
_CAREFUL = _beside("weights", f"{_LARGE}, shared memory", "Ray, used with care")
_OVER_REDIS = _beside("weights", f"{_LARGE}, shared memory", "Redis")
_STALL = Quote("weights", f"{_LARGE}, stall of a snapshot")
_COPY = _beside("weights", f"{_LARGE}, stall of a snapshot", "one memory copy")
_NODE = Quote("weights_transports", f"{_LARGE}, Ray's object store, to another node")
_NODE_ORIGINAL = _beside("weights_transports", _NODE.what, "the original's path")
_NODE_CAREFUL = _beside("weights_transports", _NODE.what, "Ray, used with care")
_DELTA = Quote("weights_delta", f"{_LARGE}, 1.0% changed, bytes of a version")
_FULL = _beside("weights_delta", _DELTA.what, "in full")

_ROW = "bytes kept of 4,096 columns, "
_LONG_ROW = {
    "one rank": Quote("megatron_memory", f"{_ROW}one rank"),
    "`context_parallel: 2`": Quote("megatron_memory", f"{_ROW}CP 2"),
    "`context_parallel: 4`": Quote("megatron_memory", f"{_ROW}CP 4"),
    "`tensor_parallel: 2`": Quote("megatron_memory", f"{_ROW}TP 2"),
    "the same with `sequence_parallel`": Quote("megatron_memory", f"{_ROW}TP 2 with SP"),
    "both, with `context_parallel: 2`": Quote("megatron_memory", f"{_ROW}TP 2 x CP 2 with SP"),
}
_LONG_ROW_PEER = _beside(
    "megatron_memory", f"{_ROW}one rank", "megatron-core's attention, one rank"
)


class Figures:
    """Every figure that was kept, by what it is of."""

    def __init__(self) -> None:
        reports = [
            report
            for place in (SPEED, PERFORMANCE, MEGATRON)
            for report in read_reports(place.folder)
        ]
        self._reports = {report.name: report for report in reports}

    def __getitem__(self, quote: Quote) -> str:
        """Return the figure as it was measured, without the speed that follows it."""
        report = self._reports.get(quote.benchmark)
        for row in report.rows if report else ():
            if row.what == quote.what and quote.peer in {None, row.peer}:
                figure = row.peer_figure if quote.of_peer else row.figure
                return figure.split(", ")[0] if "iB/s" in figure else figure
        raise PageBroken("figure", quote=quote)

    def machine(self, benchmark: str) -> str:
        """Return what a benchmark ran on."""
        return str(self._reports[benchmark].machine)


def _chart_of(figures: Figures, title: str, *bars: tuple[str, Quote, bool]) -> str:
    return bar_chart(
        title,
        [
            Bar(label, figures[quote], float(figures[quote].split()[0].replace(",", "")), ours)
            for label, quote, ours in bars
        ],
    )


def speed_chart(figures: Figures) -> str:
    """Draw how soon a waiting job hears that a step is ready."""
    return _chart_of(
        figures,
        "From the end of a save until a waiting job hears of it, median",
        ("two bare messages over Redis: the limit", _HOPS, False),
        ("Trinity Events", _READY, True),
        ("Trinity-RFT's design, a small model of it", _POLLED, False),
    )


def performance_chart(figures: Figures) -> str:
    """Draw how soon another process has new weights."""
    return _chart_of(
        figures,
        "512 MiB of weights, from publish to applied in another process, median",
        ("two bare copies, nothing checked", _PIPELINE, False),
        ("Trinity Events, shared memory, model at rest", _AT_REST, True),
        ("Trinity Events, shared memory", _SHARED, True),
        ("Ray used with care, nothing checked", _CAREFUL, False),
        ("Trinity Events, over Redis", _OVER_REDIS, True),
        ("Trinity-RFT's path, a small model of it", _ORIGINAL, False),
    )


def _table(*rows: tuple[str, ...]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def speed_summary(figures: Figures) -> str:
    """Write the first screen of the page of speed."""
    of = figures
    return "\n\n".join(
        (
            "![How soon a waiting job hears that a step is ready](speed.svg)",
            _table(
                ("question", "Trinity Events", "for comparison"),
                ("---", "---", "---"),
                (
                    "How soon does a waiting job hear that a step is ready?",
                    f"{of[_READY]}; 99 of 100 within {of[_READY_P99]}",
                    f"two bare messages over Redis: {of[_HOPS]}; "
                    f"Trinity-RFT's design: {of[_POLLED]}",
                ),
                (
                    "How many events does one reducer fold?",
                    of[_FOLDED],
                    f"a loop that only reads and decodes: {of[_READ]}; "
                    f"FastStream: {of[_FASTSTREAM]}",
                ),
                (
                    "What CPU does a step of 64 ranks cost the reducer?",
                    of[_CPU_64],
                    f"a step of 8 ranks: {of[_CPU_8]}",
                ),
                (
                    "How much memory has the reducer after 100,000 steps?",
                    of[_GROWN],
                    f"after 1,000 steps: {of[_YOUNG]}",
                ),
                (
                    "How much memory does it take to replay a million events?",
                    of[_REPLAY],
                    f"a hundred thousand: {of[_REPLAY_SHORT]}",
                ),
            ),
            f"Medians, on {of.machine('latency')}. Trinity-RFT's design is a small model of it: "
            "a call to a Ray actor for each save, and a file that is read once a second.",
        )
    )


def performance_summary(figures: Figures) -> str:
    """Write the first screen of the page of weights."""
    of = figures
    return "\n\n".join(
        (
            "![How soon another process has new weights](performance.svg)",
            _table(
                ("question, for 512 MiB of weights", "Trinity Events", "for comparison"),
                ("---", "---", "---"),
                (
                    "How soon does another process of the host serve them, verified?",
                    f"{of[_SHARED]}",
                    f"Trinity-RFT's path: {of[_ORIGINAL]}; Ray, used with care: {of[_CAREFUL]}",
                ),
                (
                    "How long is the training loop held?",
                    of[_STALL],
                    f"one copy in memory: {of[_COPY]}",
                ),
                (
                    "How soon does a process on another node serve them?",
                    f"{of[_NODE]}, through Ray's object store",
                    f"Trinity-RFT's path: {of[_NODE_ORIGINAL]}; "
                    f"Ray, used with care: {of[_NODE_CAREFUL]}",
                ),
                (
                    "How many bytes travel where 1 % changed?",
                    of[_DELTA],
                    f"in full: {of[_FULL]}",
                ),
            ),
            f"Medians, on {of.machine('weights')}; nothing but ours verifies what arrives. "
            "Trinity-RFT's path is a small model of it: a Ray actor is sent the whole state dict, "
            "and it is fetched from there tensor by tensor.",
        )
    )


def memory_summary(figures: Figures) -> str:
    """Write what a rank keeps of a long row for its backward pass."""
    return "\n\n".join(
        (
            _table(
                ("a row of 4,096 tokens on Megatron", "kept by a rank for the backward pass"),
                ("---", "---"),
                ("megatron-core's own attention, one rank", figures[_LONG_ROW_PEER]),
                *((layout, figures[quote]) for layout, quote in _LONG_ROW.items()),
            ),
            "Counted on a small model without Transformer Engine: two layers, a width of 256, "
            "float32, the fused loss ([how](megatron.md#what-a-version-costs-rank-0)).",
        )
    )


def comparison(figures: Figures, docs: str) -> str:
    """Write what the project replaces, and why, in three lines; ``docs`` begins every link."""
    page = _DOCS / "reliability.md"
    match = _CHAOS.search(page.read_text())
    if match is None:
        raise PageBroken("runs", page)
    runs, faults = match.groups()
    of = figures
    return "\n\n".join(
        (
            _table(
                ("", "Trinity-RFT, veRL", "Trinity Events"),
                ("---", "---", "---"),
                (
                    "A version is ready: explorers hear of it",
                    f"Trinity-RFT reads a file once a second: {of[_POLLED]}",
                    f"an announcement: [{of[_READY]}]({docs}speed.md)",
                ),
                (
                    "512 MiB of weights reach another process",
                    f"Trinity-RFT pickles them through a Ray actor: {of[_ORIGINAL]}",
                    f"shared memory, every byte verified: [{of[_SHARED]}]({docs}performance.md)",
                ),
                (
                    "A process is killed in the middle",
                    "an iteration file that is cut short ends veRL's resume with an error; a save "
                    "that failed keeps its place in Trinity-RFT, whose step is never recorded",
                    f"[{faults} of {runs} runs]({docs}reliability.md#the-chaos-matrix), in which "
                    "something was killed or disturbed at a chosen instant, ended wrong",
                ),
            ),
            f"Medians on one machine ({of.machine('weights')}), beside small models of "
            f"Trinity-RFT's ways. Its failures were seen in its own classes: "
            f"[what happens where]({docs}reliability.md).",
        )
    )


def written(figures: Figures) -> dict[Path, str]:
    """Return every file that follows from the figures, as it should be."""
    summaries = {
        SPEED.page: speed_summary(figures),
        PERFORMANCE.page: performance_summary(figures),
        _DOCS / "memory.md": memory_summary(figures),
        ROOT / "README.md": comparison(figures, "docs/"),
        _DOCS / "index.md": comparison(figures, ""),
    }
    files = {
        _DOCS / "speed.svg": speed_chart(figures),
        _DOCS / "performance.svg": performance_chart(figures),
    }
    for page, summary in summaries.items():
        text = page.read_text()
        if not _SUMMARY.search(text):
            raise PageBroken("markers", page, BEGIN, END)
        section = f"{BEGIN}\n\n{summary}\n\n{END}"
        files[page] = _SUMMARY.sub(lambda _, section=section: section, text)  # type: ignore[misc]
    return files


def write() -> None:
    """Write them."""
    for path, text in written(Figures()).items():
        path.write_text(text)
