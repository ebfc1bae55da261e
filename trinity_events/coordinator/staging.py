"""Where a step's saves are written until they are ready."""

from __future__ import annotations

import secrets
from pathlib import Path

from ..core.completeness import STAGING


def staged_path(run_folder: Path | str, epoch: int, step: int) -> Path:
    """A folder for one attempt at one step, which becomes ``global_step_N`` when it is ready.

    All workers of the attempt write below the same one, so the trainer makes the name.
    """
    return Path(run_folder) / STAGING / f"epoch_{epoch}_step_{step}_{secrets.token_hex(4)}"
