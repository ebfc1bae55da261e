"""Teacher of an on-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..learning.policy import BadPolicy, load_tokenizer


def teacher_folder(config: TrainConfig, tokenizer: Any) -> Path:
    """Return the teacher's folder, for a policy with this tokenizer.

    Raises:
        BadPolicy: if it has other tokens, so that it cannot judge the policy's samples.
    """
    path = config.algorithm.teacher.path
    assert path is not None, "checked when the file was read"
    if load_tokenizer(Path(path)).get_vocab() != tokenizer.get_vocab():
        raise BadPolicy(
            f"the teacher in {path} has other tokens than the policy, whose samples it is to "
            "judge: set algorithm.teacher.path to a model with the policy's tokenizer"
        )
    return Path(path)
