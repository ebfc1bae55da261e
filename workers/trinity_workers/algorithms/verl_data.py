"""Batches to and from veRL's `DataProto` (`verl/protocol.py`), by the names of its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch import Batch, at_last_token
from .errors import AlgorithmError

if TYPE_CHECKING:
    from verl import DataProto

_NAMES = {
    "behaviour_logprobs": "rollout_log_probs",
    "proximal_logprobs": "old_log_probs",
    "reference_logprobs": "ref_log_prob",
    "teacher_logprobs": "teacher_log_probs",
    "logprobs": "log_probs",
    "values": "values",
    "token_rewards": "token_level_rewards",
    "advantages": "advantages",
    "returns": "returns",
}
"""Optional fields, and their names in veRL; `teacher_log_probs` and `log_probs` are ours."""
_NEEDED = ("input_ids", "attention_mask", "position_ids", "responses")


def to_data_proto(batch: Batch) -> DataProto:
    """Return the batch as veRL's: masks are int64, and a row's reward stands at its last token.

    `finished` and the groups (`uid`, as text) travel beside.
    """
    from verl import DataProto

    tensors = {
        "prompts": batch.input_ids[:, : batch.prompt_width],
        "responses": batch.responses,
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "response_mask": batch.response_mask.long(),
        "token_level_scores": at_last_token(batch.rewards, batch.response_mask),
        "finished": batch.finished,
    }
    fields = batch.known()
    tensors |= {name: fields[ours] for ours, name in _NAMES.items() if ours in fields}
    import numpy as np

    uid = np.array([str(group) for group in batch.groups.tolist()], dtype=object)
    made: Any = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    return made


def from_data_proto(data: DataProto) -> Batch:
    """Return a batch of veRL's.

    `uid` becomes the group: numbers as they are, other names by first appearance. Without
    `response_mask` all tokens of the response are trained on, as in veRL. Without `finished` every
    row counts as finished, for veRL does not say it.

    Raises AlgorithmError if a field that every batch has is missing.
    """
    tensors = dict(data.batch.items())
    missing = [name for name in _NEEDED if name not in tensors]
    if "uid" not in data.non_tensor_batch:
        missing.append("uid")
    if missing:
        raise AlgorithmError(f"the DataProto has no {', '.join(missing)}: a batch needs them")
    width = tensors["responses"].shape[1]
    attention = tensors["attention_mask"].long()
    mask = tensors.get("response_mask", attention[:, -width:]).bool()
    scores = tensors.get("token_level_scores", tensors.get("token_level_rewards"))
    rows = mask.shape[0]
    return Batch(
        input_ids=tensors["input_ids"].long(),
        attention_mask=attention,
        position_ids=tensors["position_ids"].long(),
        response_mask=mask,
        groups=_groups(data.non_tensor_batch["uid"].tolist()).to(mask.device),
        rewards=torch.zeros(rows, device=mask.device) if scores is None else scores.sum(dim=-1),
        finished=tensors.get("finished", torch.ones(rows, device=mask.device)).bool(),
        **{ours: tensors[name] for ours, name in _NAMES.items() if name in tensors},
    )


def _groups(names: list[Any]) -> Tensor:
    try:
        return torch.tensor([int(name) for name in names])
    except ValueError:
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([places[name] for name in names])
