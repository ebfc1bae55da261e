"""Functions that Trinity-RFT's trainer package has, by its names."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trinity_events.checkpoints.layout import (
    ITERATION_FILES,
    MODEL_FOLDER,
    final_name,
    parse_final_name,
)
from trinity_events.errors import TrinityError
from trinity_events.system.error_text import shorten

from ..config.train_config import RunConfig
from ..storage.sealed_folders import has_weights

_FIRST_OF_WORKERS = (0, 8)
"""First version of veRL with the engines that Trinity-RFT's present workers drive."""


class BadIterationFile(TrinityError):
    """An iteration file holds no step.

    Attributes:
        path: The file.
        content: Its content, shortened.
    """

    path: Path
    content: str
    text = (
        "{path} holds {content}, and no step: look which of the checkpoints next to it is whole "
        "(trinity-events verify --files), and write its step"
    )


def get_latest_hf_checkpoint_path(config: RunConfig) -> str | None:
    """Return the newest checkpoint's Hugging Face folder with weights; None if there is none.

    The file ``latest_checkpointed_iteration.txt`` names the newest checkpoint. Folders of later
    steps do not count: they are of an epoch that was discarded, or of a step without a checkpoint.
    A folder with configuration and tokenizer alone does not count either.

    Raises:
        BadIterationFile: The file holds no step.
    """
    root = config.checkpoint_folder
    iteration_file = root / ITERATION_FILES["checkpoint"]
    try:
        text = iteration_file.read_text(errors="replace")
    except FileNotFoundError:
        return None
    # Not int() alone, which takes signs and underscores.
    if not text.strip().isdecimal():
        raise BadIterationFile(iteration_file, shorten(repr(text), 60))
    newest = int(text)
    steps = [parse_final_name(entry.name) for entry in root.iterdir()]
    for step in sorted(
        (step for step in steps if step is not None and step <= newest), reverse=True
    ):
        folder = root.joinpath(final_name(step), *MODEL_FOLDER)
        if has_weights(folder):
            return str(folder)
    return None


def is_verl_legacy() -> bool:
    """Return True if the installed veRL is older than 0.8; False without veRL."""
    from packaging.version import Version  # not in the base, with which a wheel is built

    try:
        installed = version("verl")
    except PackageNotFoundError:
        return False
    return Version(installed).release < _FIRST_OF_WORKERS
