"""The newest checkpoint of a run that other programs load."""

from __future__ import annotations

from contextlib import suppress

from trinity_events.checkpoint_layout import ITERATION_FILES, MODEL_FOLDER, parse_final_name

from ..config import RunConfig
from ..engines.model_folder import has_weights


def get_latest_hf_checkpoint_path(config: RunConfig) -> str | None:
    """Return the run's newest ready Hugging Face folder with weights; None if there is none.

    Checkpoints have such a folder by ``checkpoints.save_hf_checkpoint``, and versions under
    ``sync.method: checkpoint``. Steps without one are passed over, as are those of an epoch that
    was discarded.
    """
    newest = max((_iteration(config, name) for name in ITERATION_FILES.values()), default=-1)
    steps: list[int] = []
    with suppress(FileNotFoundError):
        found = (parse_final_name(one.name) for one in config.checkpoint_folder.iterdir())
        steps = sorted((one for one in found if one is not None and one <= newest), reverse=True)
    for step in steps:
        folder = config.folder_of(step).joinpath(*MODEL_FOLDER)
        if has_weights(folder):
            return str(folder)
    return None


def _iteration(config: RunConfig, name: str) -> int:
    """Return the step that an iteration file names; -1 if there is none."""
    try:
        return int((config.checkpoint_folder / name).read_text())
    except FileNotFoundError:
        return -1
