"""Teacher of an on-policy distillation."""

from __future__ import annotations

from pathlib import Path

from .policy import load_tokenizer
from .pretrained import NoModel, TokenizerRefused


def checked_teacher(folder: Path, policy: Path) -> Path:
    """Return the teacher's folder.

    Args:
        folder: Hugging Face folder of the teacher.
        policy: Hugging Face folder of the policy.

    Raises:
        BadPolicy: if there is no teacher, or it has other tokens, so that it cannot judge the
            policy's samples.
    """
    if not (folder / "config.json").is_file():
        raise NoModel("teacher", folder, "algorithm.teacher.path")
    # By ids, as the teacher reads the tokens that the policy has sampled.
    if load_tokenizer(folder).get_vocab() != load_tokenizer(policy).get_vocab():
        raise TokenizerRefused(folder, "teacher")
    return folder
