"""Verification of a log against the announcements, snapshot and files derived from it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from trinity_schemas import ContractError, EnvelopeReader, encode

from ..checkpoints.layout import final_name
from ..core import FilePlan, Monitor, MonitorState, decode_state, plan_files
from ..core.fold import decode_entry
from ..core.refusals import format_refusal, suspects
from ..core.state import SnapshotVersion
from ..log import ORIGIN, Entry, position
from ..system.error_text import shorten
from .checkpoint_digests import SavedFiles
from .export import Recording

Severity = Literal["mismatch", "anomaly", "open"]


class Finding(Struct, frozen=True, kw_only=True):
    """One finding of :func:`verify`.

    A ``mismatch`` is derived data that the log does not give, which must not happen. An
    ``anomaly`` is in the log itself and changed nothing, such as a duplicate or a gap. An
    ``open`` finding is a save or step that began and never ended.
    """

    severity: Severity
    what: str


class Report(Struct, frozen=True, kw_only=True):
    """Checked items and findings of :func:`verify`."""

    run_id: str
    entries: int
    announcements: int
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """True if no derived data contradicts the log."""
        return all(finding.severity != "mismatch" for finding in self.findings)


def verify(
    recording: Recording,
    snapshot: bytes | None = None,
    run_folder: Path | None = None,
    *,
    files: bool = False,
) -> Report:
    """Fold the log from its beginning, and compare the result with the derived data.

    Args:
        recording: The log.
        snapshot: The reducer's last snapshot; None without a server.
        run_folder: The run's checkpoint directory; None to skip the files.
        files: True to compare the checkpoint files with the digests in the log too.
    """
    findings: list[Finding] = []
    checked = ["announcements"]
    stored_state = _decoded(snapshot, findings)
    monitor = Monitor(MonitorState(run_id=recording.header.run_id))
    announcements = _Announcements(recording.announcements)
    plan = plan_files(monitor.state)
    reached = position(recording.header.position)
    entries, end = 0, ORIGIN
    for entry in recording.events:
        entries, end = entries + 1, entry.id
        envelopes, _ = monitor.fold([entry])
        # The reducer has written no announcement of a later entry yet.
        if position(entry.id) <= reached:
            for envelope in envelopes:
                announcements.expect(encode(envelope))
            # The files follow the position that was folded, not the end of the log.
            if entry.id == recording.header.position:
                plan = plan_files(monitor.state)
        if stored_state is not None and entry.id == stored_state.position:
            checked.append("snapshot")
            if stored_state != monitor.state:
                what = f"the snapshot at {entry.id} differs from the folded log"
                findings.append(_mismatch(what))
    if position(end) < reached:
        findings.append(
            _mismatch(
                f"the log ends at {end}, before {recording.header.position}, to which it was "
                "folded: the file was cut off, or the server lost its data"
            )
        )
    findings += announcements.findings()
    if run_folder is not None:
        checked.append("iteration files")
        findings += _compare_files(plan, run_folder)
        if files:
            checked.append(_check_digests(recording, run_folder, findings))
    findings += [
        Finding(
            severity="anomaly", what=f"{anomaly.name}: {anomaly.detail} (entry {anomaly.entry_id})"
        )
        for anomaly in monitor.state.anomalies
    ]
    counted = sum(monitor.state.anomaly_counts.values())
    if counted > len(monitor.state.anomalies):
        counts = ", ".join(f"{n} {name}" for name, n in monitor.state.anomaly_counts.items())
        findings.append(Finding(severity="anomaly", what=f"{counted} anomalies in all: {counts}"))
    findings += _refusals(monitor.state)
    findings += _orphans(monitor.state)
    return Report(
        run_id=recording.header.run_id,
        entries=entries,
        announcements=announcements.count,
        checked=tuple(checked),
        findings=tuple(findings),
    )


def _mismatch(what: str) -> Finding:
    return Finding(severity="mismatch", what=what)


def _decoded(snapshot: bytes | None, findings: list[Finding]) -> MonitorState | None:
    if snapshot is None:
        return None
    try:
        return decode_state(snapshot)
    # No mismatch: a snapshot saves time, and the log can rebuild it.
    except SnapshotVersion as error:
        why = f"{error}; the next reducer rebuilds the state from the log"
        what = f"the snapshot is not compared: {why}"
        findings.append(Finding(severity="open", what=what))
        return None
    except msgspec.DecodeError as error:
        findings.append(_mismatch(f"the snapshot cannot be read: {error}"))
        return None


class _Announcements:
    """Comparison of the stored announcements with the folded ones, in their order."""

    def __init__(self, there: Iterable[Entry]) -> None:
        self.count = 0
        self._there = iter(there)
        self._expected = 0
        self._differs: int | None = None

    def expect(self, payload: bytes) -> None:
        """Compare the next stored announcement with one that the fold made."""
        self._expected += 1
        entry = next(self._there, None)
        if entry is not None:
            self.count += 1
            # Byte for byte: a replay of the log gives what the reducer wrote (invariant 1).
            if entry.payload != payload and self._differs is None:
                self._differs = self._expected

    def findings(self) -> list[Finding]:
        """Return the mismatches, after the last entry of the log."""
        self.count += sum(1 for _ in self._there)
        if self._differs is not None:
            return [_mismatch(f"announcement {self._differs} is not the one that the log gives")]
        if self._expected != self.count:
            return [
                _mismatch(f"the log gives {self._expected} announcements, {self.count} are there")
            ]
        return []


def _check_digests(recording: Recording, folder: Path, findings: list[Finding]) -> str:
    """Compare checkpoint files with the log; return the number of files, in words."""
    saved, decode = SavedFiles(), EnvelopeReader().decode
    for entry in recording.events:
        with suppress(ContractError):
            saved.add(decode_entry(recording.header.run_id, entry.payload, decode))
    result = saved.check(folder)
    findings += map(_mismatch, result.mismatches)
    return (
        f"{result.digests} files by digest and {result.sizes} saves by size ({result.gone} saves "
        f"are of folders that are deleted), {result.manifests} checkpoints by manifest"
    )


def _compare_files(plan: FilePlan, folder: Path) -> list[Finding]:
    findings: list[Finding] = []
    for iteration in plan.iterations:
        path, step = folder / iteration.name, iteration.at.step
        final = folder / final_name(step)
        if not final.is_dir():
            # The reducer names no folder that is not there.
            what = f"{final} is not there, and the log has step {step} as ready"
            findings.append(
                _mismatch(what) if iteration.has_folder else Finding(severity="open", what=what)
            )
            continue
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            findings.append(_mismatch(f"{path} cannot be read: {error}"))
            continue
        if text != str(step):
            findings.append(_mismatch(f"{path} says {shorten(text, 40)!r}, the log {step}"))
    return findings


def _refusals(state: MonitorState) -> list[Finding]:
    sentences = [format_refusal(refusal) for refusal in state.refusals]
    if state.refused > len(sentences):
        sentences.append(f"{state.refused} refusals of weights in all")
    sentences += suspects(state.refusals)
    return [
        Finding(severity="anomaly", what=f"refused-version: {sentence}") for sentence in sentences
    ]


def _orphans(state: MonitorState) -> list[Finding]:
    findings: list[Finding] = []
    for step, step_state in sorted(state.steps.items()):
        for kind, kind_state in step_state.kinds.items():
            findings += [
                Finding(severity="open", what=f"step {step} {kind}: {key} started, never ended")
                for key, slot in kind_state.slots.items()
                if slot.running and slot.proof is None
            ]
            if kind_state.outcome is None:
                findings.append(
                    Finding(severity="open", what=f"step {step} {kind} never became ready")
                )
    return findings
