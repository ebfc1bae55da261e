"""Recorded samples as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..record.files import RecordedStep
from ..system.counts import format_count

_LONGEST_ANSWER = 60
"""Characters of an answer in a table, of which the end is shown too: it has the result."""


def build_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return samples as a table, in their order."""
    parts = sorted({name for row in rows for name in row["reward_parts"]})[:4]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("question", "sample", "reward", *parts, "tokens", "advantage", "stale"):
        table.add_column(title, justify="right")
    fates = any(row["step"] is None for row in rows)
    for title in (*(["fate"] if fates else []), "versions", "explorer", "answer"):
        table.add_column(title)
    for row in rows:
        cut = " cut" if row["is_truncated"] else ""
        table.add_row(
            str(row["ordinal"]),
            str(row["sample"]),
            _format_number(row["reward"]),
            *(_format_number(row["reward_parts"].get(name)) for name in parts),
            f"{row['completion_tokens']}{cut}",
            _format_number(row["advantage"]),
            str(row["staleness"]),
            *([row["fate"]] if fates else []),
            str(row["version_count"]),
            row["explorer"],
            _shorten(row["preview"]),
        )
    return table


def format_step(
    run_id: str, recorded: RecordedStep, rows: Sequence[dict[str, Any]], fate: str = "trained"
) -> str:
    """Return a line about the samples of a step, or about those that it did not train on."""
    if not rows:
        return f"run {run_id}, step {recorded.step}: no samples"
    rewards = [row["reward"] for row in rows]
    groups = len({row["ordinal"] for row in rows})
    cut = sum(row["is_truncated"] for row in rows)
    subject = format_count(len(rows), "sample" if fate == "trained" else f"{fate} sample")
    if fate != "trained":
        subject += ", which no step trained on,"
    return (
        f"run {run_id}, step {recorded.step} (epoch {recorded.epoch}): "
        f"{subject} of {format_count(groups, 'question')}, "
        f"reward {sum(rewards) / len(rewards):.3g} "
        f"({min(rewards):.3g} to {max(rewards):.3g}), {cut} cut off"
    )


def format_sample(row: dict[str, Any]) -> list[str]:
    """Return the lines of one sample with its turns."""
    parts = "".join(f", {name} {part:.4g}" for name, part in row["reward_parts"].items())
    versions = ", ".join(
        f"{version['tokens']} tokens of step {version['step']}"
        + (f" (epoch {version['epoch']})" if version["epoch"] != row["epoch"] else "")
        for version in row["versions"]
    )
    lines = [
        f"question {row['ordinal']}, sample {row['sample']} of {row['samples']}: reward "
        f"{row['reward']:.4g}{parts}, advantage {_format_number(row['advantage'])}, staleness "
        f"{row['staleness']}, {row['completion_tokens']} tokens"
        + (f", {row['fate']}" if row["step"] is None else "")
        + (", cut off" if row["is_truncated"] else "")
        + (", redacted" if row["is_redacted"] else ""),
        f"  by {row['explorer']}, attempt {row['attempt']}: {versions}",
    ]
    if row["reward_error"]:
        lines.append(f"  error of the reward: {row['reward_error']}")
    if row["prompt_messages"] is None:
        for turn in row["turns"]:
            lines += _indent(turn["role"], turn["content"])
    else:
        for message in (*row["prompt_messages"], *row["completion_messages"]):
            lines += _format_message(message)
    if row["judge_reply"]:
        lines += _indent("judge", row["judge_reply"])
    return lines


def _format_message(message: dict[str, Any]) -> list[str]:
    title = " ".join(filter(None, (message["role"], message["name"])))
    lines = _indent(title, message["content"]) if message["content"] else [f"  [{title}]"]
    for call in message["tool_calls"]:
        lines += [f"    calls {call['name']}({call['arguments']})"]
    return lines


def _indent(role: str, text: str) -> list[str]:
    return [f"  [{role}]", *(f"    {line}" for line in text.split("\n"))]


def _format_number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONGEST_ANSWER:
        return line
    half = (_LONGEST_ANSWER - 3) // 2
    return f"{line[:half]}...{line[-half:]}"
