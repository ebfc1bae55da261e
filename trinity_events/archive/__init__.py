"""Logs in files: export, import, archive segments, and verification."""

from .export import Recording, import_recording, read_recording, record_run
from .format import (
    FORMAT_VERSION,
    ArchiveMissing,
    BadRecording,
    Header,
    Line,
    NotWritten,
    read_lines,
    write_lines,
)
from .segments import Archive
from .verify import Finding, Report, verify

__all__ = [
    "FORMAT_VERSION",
    "Archive",
    "ArchiveMissing",
    "BadRecording",
    "Finding",
    "Header",
    "Line",
    "NotWritten",
    "Recording",
    "Report",
    "import_recording",
    "read_lines",
    "read_recording",
    "record_run",
    "verify",
    "write_lines",
]
