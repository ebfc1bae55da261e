"""Verification of what is loaded, by one process or by all ranks together.

Manifests and the comparison with one are in ``trinity_events.checkpoints.verification``.

1. Ranks divide the files among them: each file is read once, whatever the number of ranks.
2. All ranks agree before any of them loads: the damage that one finds is raised on all.
3. A Hugging Face folder with a list of its digests is compared with it where no manifest lists it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from trinity_events.checkpoints.digest_list import digest_file, digested_files, parse_digests
from trinity_events.checkpoints.layout import FILE_DIGESTS
from trinity_events.checkpoints.manifest import (
    SAVER_THREADS,
    FileSum,
    digest_files,
    format_manifest,
    parse_manifest,
    saved_files,
    usable_cores,
    write_manifest,
)
from trinity_events.checkpoints.verification import (
    CheckpointDamaged,
    ListedFile,
    VerifyMode,
    damaged,
    divide,
    read_manifest,
    with_older,
)

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)


class DamageMessage(Struct, frozen=True, array_like=True):
    """Damage that a rank found, as it is sent to the others."""

    path: str
    reason: str
    step: int | None = None
    older: int | None = None

    @classmethod
    def from_error(cls, error: CheckpointDamaged) -> DamageMessage:
        """Make the message of an error."""
        # A path of other bytes than UTF-8 cannot be sent as it is.
        path, reason = (
            text.encode(errors="backslashreplace").decode()
            for text in (str(error.path), error.reason)
        )
        return cls(path, reason, error.step, error.older)

    def error(self) -> CheckpointDamaged:
        """Return the error of the message."""
        return CheckpointDamaged(Path(self.path), self.reason, self.step, self.older)


def verify_checkpoint(
    folder: Path,
    mode: VerifyMode = "full",
    *,
    only: Sequence[str] | None = None,
    warn: bool = True,
) -> None:
    """Verify a checkpoint, or a folder in one, before anything in it is loaded.

    Without a manifest, it warns that the checkpoint cannot be verified.

    Args:
        folder: Folder of a step, or what an engine loads of it.
        mode: ``full`` compares sizes and digests, ``size`` sizes alone, ``off`` nothing.
        only: Names of the files whose digests are compared, where others verify the rest.
        warn: False for a folder that need not be a checkpoint.

    Raises:
        CheckpointDamaged: with the newest older checkpoint that is whole, if there is one.
    """
    try:
        is_verified = _verify_part(folder, mode, only=only)
    except CheckpointDamaged as error:
        raise with_older(error) from None
    if warn and not is_verified:
        _warn(folder)


def verify_whole(folder: Path, mode: VerifyMode = "full") -> None:
    """Verify a checkpoint with the folders that were completed after its manifest.

    Raises CheckpointDamaged, without the older checkpoint.
    """
    _verify_part(folder, mode)


def verify_together(
    folder: Path, mode: VerifyMode = "full", group: dist.ProcessGroup | None = None
) -> None:
    """Verify as :func:`verify_checkpoint`, each rank its part of the files. Collective.

    Raises:
        CheckpointDamaged: on every rank, if any finds damage. Rank 0's names the newest older
            checkpoint that is whole.
    """
    import torch.distributed as dist

    from ..runtime.collectives import gather_bytes, raise_together

    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        verify_checkpoint(folder, mode)
        return
    rank = dist.get_rank(group)
    message = b""
    failure: Exception | None = None
    try:
        is_verified = _verify_part(folder, mode, rank, dist.get_world_size(group))
        if rank == 0 and not is_verified:
            _warn(folder)
    except CheckpointDamaged as error:
        message = msgspec.json.encode(DamageMessage.from_error(error))
    # Any error: a rank that raised alone would leave the others in the gather below.
    except Exception as caught:
        failure = caught
    raise_together(failure, group)
    # The damage of the lowest rank, so that all ranks raise the same error.
    first = next(filter(None, gather_bytes(message, group)), None)
    if first is None:
        return
    # No rank waits for the search of an older checkpoint, which may outlast the group's timeout.
    damage = msgspec.json.decode(first, type=DamageMessage).error()
    raise with_older(damage) if rank == 0 else damage


def _verify_part(
    folder: Path,
    mode: VerifyMode,
    part: int = 0,
    parts: int = 1,
    only: Sequence[str] | None = None,
) -> bool:
    """Verify a part of the files; return False if nothing lists them."""
    if mode == "off":
        return True
    manifest = read_manifest(folder)
    if manifest is None:
        # The first rank reads these lists, of a folder without a manifest.
        return part > 0 or only is not None or verify_model_folders(folder, mode)
    # Sizes first: a file that was cut short shows without a byte being read.
    manifest.check_sizes()
    if mode == "full":
        paths = None if only is None else [manifest.folder / name for name in only]
        manifest.check_digests(part, parts, paths)
    # By one rank: these folders have lists of their own, which no division covers.
    if part == 0 and only is None:
        for later in manifest.later_folders():
            if (later / FILE_DIGESTS).is_file():  # else no engine takes its weights
                _verify_model_folder(later, mode)
    return True


def _warn(folder: Path) -> None:
    logger.warning("%s has no manifest, so it cannot be verified: it is loaded as it is", folder)


def verify_model_folders(folder: Path, mode: VerifyMode = "full") -> bool:
    """Compare Hugging Face folders with their lists of digests; return False without any.

    Raises CheckpointDamaged, without the older checkpoint.
    """
    if mode == "off":
        return True
    lists = sorted(folder.rglob(FILE_DIGESTS))
    for path in lists:
        _verify_model_folder(path.parent, mode)
    return bool(lists)


def _verify_model_folder(folder: Path, mode: VerifyMode) -> None:
    path = folder / FILE_DIGESTS
    try:
        digests = parse_digests(path.read_text())
        names = {file.name for file in digested_files(folder)}
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"cannot be read ({error})", folder) from None
    if not digests or not all(name and digest for name, digest in digests.items()):
        raise damaged(path, "is no list of digests", folder)
    # Names first: a file that is missing or foreign is named before any is read.
    for name in sorted(digests.keys() - names):
        raise damaged(folder / name, f"is not there, and is listed in {path}", folder)
    for name in sorted(names - digests.keys()):
        raise damaged(folder / name, f"is not listed in {path}", folder)
    if mode != "full":
        return
    try:
        with ThreadPoolExecutor(usable_cores()) as pool:
            actual = list(pool.map(digest_file, (folder / name for name in digests)))
    except OSError as error:
        file = Path(error.filename or folder)
        raise damaged(file, f"cannot be read ({error.strerror})", folder) from None
    for (name, expected), digest in zip(digests.items(), actual, strict=True):
        if digest != expected:
            reason = f"was changed: its digest is {digest}, and {expected} was saved"
            raise damaged(folder / name, reason, folder)


def write_manifest_together(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the manifest of a folder that all ranks have written to. Collective.

    Each rank digests its part of the files, and the first one writes the manifest.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
    """
    from ..runtime.collectives import gather_bytes, rank_and_world, together

    rank, world = rank_and_world(group)
    listing = b""
    with together(group):
        if rank == 0:  # for all: on a network file system the ranks may see different listings
            listing = msgspec.json.encode(saved_files(folder))
    if world > 1:
        listing = gather_bytes(listing, group)[0]
    with together(group):
        sizes = msgspec.json.decode(listing, type=dict[str, int])
        files = [ListedFile(folder / name, FileSum("", size)) for name, size in sizes.items()]
        mine = [file.path for file in divide(files, world)[rank]]
        digests = digest_files(mine, threads=SAVER_THREADS)
        names = (path.relative_to(folder).as_posix() for path in mine)
        part = format_manifest(dict(zip(names, digests, strict=True)))
    parts = gather_bytes(part, group) if world > 1 else [part]
    with together(group):
        if rank == 0:
            sums: dict[str, FileSum] = {}
            for listed in parts:
                sums |= parse_manifest(listed)
            write_manifest(folder, sums)
