"""Teacher of an on-policy distillation."""

from __future__ import annotations

from pathlib import Path

from .policy import BadPolicy, load_tokenizer


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
        raise BadPolicy(
            f"no teacher in {folder}: config.json is missing: set algorithm.teacher.path to a "
            "Hugging Face folder"
        )
    if load_tokenizer(folder).get_vocab() != load_tokenizer(policy).get_vocab():
        raise BadPolicy(
            f"the teacher in {folder} has other tokens than the policy, whose samples it is to "
            "judge: set algorithm.teacher.path to a model with the policy's tokenizer"
        )
    return folder
