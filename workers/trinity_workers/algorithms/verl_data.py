"""Batches to and from veRL's `DataProto` (`verl/protocol.py`), by the names of its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch import Batch, at_last_token
from .errors import DataProtoIncomplete

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
        # veRL's trainers sum scores over the response, so that the sum is the row's reward.
        "token_level_scores": at_last_token(batch.rewards, batch.response_mask),
        "finished": batch.finished,
    }
    fields = batch.known()
    tensors |= {name: fields[ours] for ours, name in _NAMES.items() if ours in fields}
    import numpy as np

    uid = np.array([str(group) for group in batch.groups.tolist()], dtype=object)
    made: Any = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    return made


def from_data_proto(data: DataProto, *, needs_groups: bool = True) -> Batch:
    """Return a batch of veRL's.

    `uid` becomes the group: numbers as they are, other names by first appearance. Without
    `response_mask` all tokens of the response are trained on, as in veRL. Without `finished` every
    row counts as finished, for veRL does not say it.

    Args:
        data: Rows of prompts and responses.
        needs_groups: False if rows without `uid` may be groups by themselves.

    Raises:
        AlgorithmError: A field that every batch has is missing.
    """
    tensors = dict(data.batch.items())
    missing = [name for name in _NEEDED if name not in tensors]
    uid = data.non_tensor_batch.get("uid")
    if uid is None and needs_groups:
        missing.append("uid")
    if missing:
        raise DataProtoIncomplete(tuple(missing))
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
        groups=(torch.arange(rows) if uid is None else _groups(uid.tolist())).to(mask.device),
        rewards=torch.zeros(rows, device=mask.device) if scores is None else scores.sum(dim=-1),
        finished=tensors.get("finished", torch.ones(rows, device=mask.device)).bool(),
        **{ours: tensors[name] for ours, name in _NAMES.items() if name in tensors},
    )


def result_to_data_proto(result: dict[str, Any], batch: Batch) -> DataProto:
    """Return a role's result as veRL's: tensors of rows by its names, or metrics in `meta_info`.

    Scores of rows are `rm_scores`, and stand at each row's last token.
    """
    from verl import DataProto

    tensors = {
        _NAMES.get(name, name): value for name, value in result.items() if isinstance(value, Tensor)
    }
    made: Any
    if not tensors:
        made = DataProto(meta_info={"metrics": result})
        return made
    if "rewards" in tensors:
        tensors["rm_scores"] = at_last_token(tensors.pop("rewards"), batch.response_mask)
    made = DataProto.from_dict(tensors=tensors)
    return made


def read_prompts(data: DataProto) -> list[list[int]]:
    """Return the tokens of each row's prompt: `raw_prompt_ids`, or `input_ids` without padding.

    Raises:
        AlgorithmError: The rows have neither.
    """
    raw = data.non_tensor_batch.get("raw_prompt_ids")
    if raw is not None:
        return [[int(token) for token in tokens] for tokens in raw]
    tensors = {} if data.batch is None else dict(data.batch.items())
    if not {"input_ids", "attention_mask"} <= tensors.keys():
        raise DataProtoIncomplete()
    rows = zip(tensors["input_ids"], tensors["attention_mask"].bool(), strict=True)
    return [tokens[mask].tolist() for tokens, mask in rows]


def _groups(names: list[Any]) -> Tensor:
    try:
        return torch.tensor([int(name) for name in names])
    except ValueError:
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([places[name] for name in names])
