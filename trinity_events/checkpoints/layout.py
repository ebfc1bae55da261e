"""Names of the folders and files in a run's directory. No I/O, no clock, no randomness.

::

    RUN/
      .belongs_to                          the log that the directory belongs to
      .reducer                             the reducer that uses the directory
      latest_checkpointed_iteration.txt    newest step whose checkpoint is ready
      latest_state_dict_iteration.txt      newest step whose state dict is ready
      global_step_STEP/                    files of a ready step
        .made_from                         staged folder that these files were saved to
        .saved_in_place                    epoch and step of saves that were written right here
        .verified                          epoch, step and kinds that the reducer checked them for
        SHA256SUMS                         manifest: size and digest of each file, for sha256sum too
        actor/                             files of model and optimizer
          huggingface/                     configuration, tokenizer and, if they were saved, weights
            XXH128SUMS                     digests of its files, which xxhsum -c reads too
        critic/                            the same of the critic, if the algorithm has one
        trainer_state.json                 state of the trainer's loop
      .staging/
        epoch_EPOCH_step_STEP_TOKEN/       files of a step that is not ready yet
          .sums/                           size and digest of the files of each save
        FOLDER.replaced_global_step_STEP/  earlier files of a step that FOLDER replaced
      .trash/
        FOLDER.NANOSECONDS.FENCE/          folder that the reducer is about to remove
      profiles/
        step_STEP_ROLE_RANK.json.gz        trace of a training step on one rank
      log/
        STREAM.FIRST.LAST.COUNT.jsonl      archive segment
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from trinity_schemas import Kind

STAGING = ".staging"
"""Folder for the saves of steps that are not ready yet."""
TRASH = ".trash"
"""Folder for what the reducer is about to remove, so that no reader sees half a checkpoint."""
ARCHIVE = "log"
"""Folder for archive segments."""
MADE_FROM = ".made_from"
"""File in a final folder with the relative path of the staged folder that it was."""
SAVED_IN_PLACE = ".saved_in_place"
"""File in a final folder with epoch and step of the saves that were not staged, by their savers."""
VERIFIED = ".verified"
"""File in a final folder with the evidence that the folder counts as a checkpoint."""
MANIFEST = "SHA256SUMS"
"""File of a checkpoint with the size and the digest of each of its files."""
MANIFEST_PARTS = ".sums"
"""Folder in a staged folder with the part of the manifest that each save wrote."""
REDUCER_FILES = frozenset({MADE_FROM, SAVED_IN_PLACE, VERIFIED, MANIFEST})
"""Files about a folder of saves: they are part of no save."""
BELONGS_TO = ".belongs_to"
"""File that identifies the log of the run."""
MODEL_FOLDER = ("actor", "huggingface")
"""Folder of a step with the model in Hugging Face's format, by the names on the way to it."""
FILE_DIGESTS = "XXH128SUMS"
"""File of a folder with the digest of each of its other files; its own digest seals the folder."""
COMPLETING = ".completing.tmp"
"""File of a Hugging Face folder that is being completed in place: its weights do not count yet."""
TRAINER_STATE = "trainer_state.json"
"""File of a checkpoint with the state of the trainer's loop."""
FILES_DIGEST = "sha256files"
"""Algorithm of the digest of several files: the sha256 of their sorted lines of sha256sum."""
REDUCER_MARK = ".reducer"
"""File that identifies the reducer that uses the directory; the log's server holds a copy."""

# Trinity-RFT and veRL read these names, with a decimal step and no newline.
ITERATION_FILES: dict[Kind, str] = {
    "state_dict": "latest_state_dict_iteration.txt",
    "checkpoint": "latest_checkpointed_iteration.txt",
}
"""File that names the newest ready step of a kind."""

_UNFINISHED = re.compile(r"\..+\.(?:tmp|part)")
"""Names under which files are written, until they are whole and get their own."""
_AFTER_GAP = "after-gap"
_FINAL = re.compile(r"global_step_(\d+)")
_STAGED = re.compile(r"epoch_(\d+)_step_(\d+)_[0-9a-f]+(?:\.replaced_global_step_(\d+))?")
_TRASHED = re.compile(rf"(?:{_FINAL.pattern}|{_STAGED.pattern})\.\d+\.(?P<fence>\d+)")
# Content of a file, so the numbers are bounded: 18 digits fit into 64 bits.
_MADE_FROM = re.compile(rf"{re.escape(STAGING)}/epoch_(\d{{1,18}})_step_(\d{{1,18}})_[0-9a-f]+")


def profile_path(step: int, role: str, rank: int) -> str:
    """Return the path of a training step's trace on one rank, relative to the run's directory."""
    return f"profiles/step_{step}_{role}_{rank}.json.gz"


def final_name(step: int) -> str:
    """Format the name of a ready step's folder, which Trinity-RFT and veRL read."""
    return f"global_step_{step}"


def parse_final_name(name: str) -> int | None:
    """Return the step of a ready step's folder; None for any other name."""
    # The whole name: `global_step_5.replaced` is no checkpoint.
    match = _FINAL.fullmatch(name)
    return int(match[1]) if match else None


class StagedFolder(NamedTuple):
    """Folder below :data:`STAGING`, by its name."""

    name: str
    epoch: int
    step: int
    replaced: int | None = None
    """Step whose earlier files the folder holds; None for a folder that saves write to."""


def staged_name(epoch: int, step: int, token: str) -> str:
    """Format the name of a staged folder; the hexadecimal token tells attempts apart."""
    return f"epoch_{epoch}_step_{step}_{token}"


def replaced_name(staged: str, final: str) -> str:
    """Format the name below :data:`STAGING` for a final folder that a staged one replaces."""
    return f"{staged}.replaced_{final}"


def parse_staged_name(name: str) -> StagedFolder | None:
    """Parse the name of a folder below :data:`STAGING`; None for a foreign name."""
    match = _STAGED.fullmatch(name)
    if match is None:
        return None
    replaced = None if match[3] is None else int(match[3])
    return StagedFolder(name, int(match[1]), int(match[2]), replaced)


def format_staged_path(name: str) -> str:
    """Return the path of a staged folder, relative to the run's directory."""
    return f"{STAGING}/{name}"


def parse_staged_folder(path: str | None) -> str | None:
    """Return the staged folder that a relative path lies in; None outside of :data:`STAGING`."""
    parts = path.split("/") if path else []
    # The path comes from an event: no part of it may lead out of the folder.
    staged = len(parts) > 1 and parts[0] == STAGING and parts[1] not in ("", ".", "..")
    return "/".join(parts[:2]) if staged else None


def is_in_place(path: str, step: int) -> bool:
    """Return True for a relative path that is, or lies in, the final folder of a step."""
    return path.split("/", 1)[0] == final_name(step)


def format_in_place(epoch: int, step: int) -> str:
    """Return the content of a :data:`SAVED_IN_PLACE` file."""
    return f"epoch_{epoch}_step_{step}"


def is_saved_file(path: PurePosixPath) -> bool:
    """Return True if a file in a folder of saves is part of a save.

    Args:
        path: Its path, relative to the folder.
    """
    return (
        path.name not in REDUCER_FILES
        and path.parts[0] != MANIFEST_PARTS
        and not _UNFINISHED.fullmatch(path.name)
    )


def parse_made_from(mark: str) -> StagedFolder | None:
    """Parse the content of a :data:`MADE_FROM` file; None for a path of another form."""
    match = _MADE_FROM.fullmatch(mark)
    if match is None:
        return None
    return StagedFolder(mark.removeprefix(f"{STAGING}/"), int(match[1]), int(match[2]))


def trashed_name(name: str, nanoseconds: int, fence: int) -> str:
    """Format the name below :data:`TRASH` for a folder that the leader with ``fence`` moves."""
    return f"{name}.{nanoseconds}.{fence}"


def parse_trashed_name(name: str) -> int | None:
    """Return the fencing token of the leader that moved a folder; None for a foreign name."""
    match = _TRASHED.fullmatch(name)
    return int(match["fence"]) if match else None


class SegmentName(NamedTuple):
    """Parts of an archive segment's name; entries are given by their ids."""

    stream: str
    first: str
    last: str
    entries: int | None
    """Number of entries; None in a name of an older format."""
    after_gap: bool = False
    """True if entries before ``first`` may be missing from the archive."""

    def __str__(self) -> str:
        gap = f".{_AFTER_GAP}" if self.after_gap else ""
        return f"{self.stream}.{self.first}.{self.last}.{self.entries}{gap}.jsonl"


def parse_segment_name(name: str) -> SegmentName:
    """Parse the name of an archive segment. Raises ValueError for a foreign name."""
    stream, first, last, *more, _ = name.split(".")
    after_gap = more[-1:] == [_AFTER_GAP]
    # An older format has no count.
    counts = more[:-1] if after_gap else more
    if len(counts) > 1:
        raise ValueError(f"{name} is not the name of an archive segment")
    return SegmentName(stream, first, last, int(counts[0]) if counts else None, after_gap)


def segment_pattern(stream: str) -> str:
    """Return the glob pattern for the segments of a stream."""
    return f"{stream}.*.jsonl"


def is_unfinished_segment(name: str, stream: str) -> bool:
    """Return True if the name is that of a stream's segment that a writer left unfinished."""
    return name.startswith(f".{stream}.") and ".jsonl." in name


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return one digest of several files, given their sha256 by relative path."""
    # Sorted: the digest must not depend on the order in which a file system lists files.
    lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items()))
    return f"{FILES_DIGEST}:{hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()}"
