"""Columns of a recorded sample, under the names of TRL and verifiers where these have one.

TRL (GRPOTrainer): ``prompt``, ``completion``, ``prompt_ids``, ``completion_ids``,
``completion_mask``, ``logprobs``, ``advantages``. Verifiers (GenerateOutputs): ``reward``,
``metrics`` (here ``reward_parts``), ``is_truncated``. Lists of tokens begin after the prompt: they
have the turns of policy and environment, and the mask is true on those of the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PackageMissing

if TYPE_CHECKING:
    import pyarrow

SUMMARY_COLUMNS = (
    *(
        "run_id",
        "epoch",
        "step",
        "for_step",
        "fate",
        "rank",
        "ordinal",
        "attempt",
        "sample",
        "samples",
        "explorer",
    ),
    *("question_set", "reward", "reward_parts", "reward_error", "advantage", "staleness"),
    *("is_truncated", "is_redacted", "prompt_tokens", "completion_tokens", "version_count"),
)
"""Columns without texts and tokens: those of thousands of samples are read in milliseconds."""


MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "arguments")
"""Texts of a chat message; ``arguments`` are those of the call that an environment answers."""


def import_pyarrow(user: str) -> Any:
    """Import pyarrow and its Parquet module.

    Raises:
        PackageMissing: It is not installed.
    """
    # An extra: readers install `samples`, and trainers have it with `workers` (decision 52).
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise PackageMissing(user, "pyarrow", "trinity-events[samples]") from None
    return pyarrow


def build_schema(metadata: dict[str, str] | None = None) -> pyarrow.Schema:
    """Return the schema of a file of the record."""
    pa = import_pyarrow("the record of rollouts")
    version = pa.struct([("epoch", pa.int64()), ("step", pa.int64()), ("tokens", pa.int32())])
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tokens", pa.int32())])
    call = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
    message = pa.struct(
        [
            ("turn", pa.int32()),  # place among the turns
            *((name, pa.string()) for name in MESSAGE_TEXTS),
            ("tool_calls", pa.list_(call)),
        ]
    )
    return pa.schema(
        [
            ("run_id", pa.string()),
            ("epoch", pa.int64()),
            ("step", pa.int64()),  # that trained on it; null if none did
            ("for_step", pa.int64()),  # that was being filled when it came
            ("fate", pa.string()),  # trained, stale, filtered, surplus, ...
            ("rank", pa.int32()),
            ("ordinal", pa.int64()),
            ("attempt", pa.int64()),
            ("sample", pa.int32()),
            ("samples", pa.int32()),
            ("explorer", pa.string()),
            ("question_set", pa.string()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("preview", pa.string()),  # beginning and end of the completion
            ("turns", pa.list_(turn)),
            ("prompt_messages", pa.list_(message)),  # null if the episode has no chat messages
            ("completion_messages", pa.list_(message)),
            ("prompt_ids", pa.list_(pa.int32())),  # (prompt tokens)
            ("completion_ids", pa.list_(pa.int32())),  # (completion tokens), as the five below
            ("completion_mask", pa.list_(pa.bool_())),
            ("token_texts", pa.list_(pa.dictionary(pa.int32(), pa.string()))),
            ("logprobs", pa.list_(pa.float32())),  # of the explorer; 0 where not of the policy
            ("trainer_logprobs", pa.list_(pa.float32())),  # before the update; null if unknown
            ("advantages", pa.list_(pa.float32())),
            ("versions", pa.list_(version)),  # runs of the policy's tokens, in order
            ("reward", pa.float64()),
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            ("reward_error", pa.string()),
            ("judge_reply", pa.string()),
            ("advantage", pa.float32()),  # of the first token that is trained on
            ("staleness", pa.int64()),
            ("proof", pa.string()),
            ("is_truncated", pa.bool_()),
            ("is_redacted", pa.bool_()),
            ("prompt_tokens", pa.int32()),
            ("completion_tokens", pa.int32()),
            ("version_count", pa.int32()),
        ],
        metadata,
    )
