"""Queries of recorded samples: the groups of a step, and one sample with its tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from ..record.files import RecordedStep
from ..record.reader import TRAINED, RecordMissing, RolloutRecord
from .run_reader import RunReader

_COLUMNS = (
    *("fate", "ordinal", "attempt", "sample", "reward", "completion_tokens", "is_truncated"),
    *("explorer", "staleness", "version_count", "advantage", "question_set", "preview"),
    "reward_parts",
)
_LONGEST = 16_384
"""Tokens of a sample that are sent; a page of more is of no use, and of many megabytes."""
_QUESTION = 240
"""Characters of a question in the list, from its end: a system prompt stands before it."""
FILE_STEPS = 6
"""Recorded steps that a file has, the newest ones."""
FILE_GROUPS = 8
"""Trained groups of each step in a file that have their tokens, spread over their rewards."""
FILE_DISCARDED = 2
"""Groups of each other fate that have them: these show why, and the trained ones what is learnt."""


async def get_samples(reader: RunReader, step: int | None) -> dict[str, Any]:
    """Return the groups of a recorded step, by default of the newest one.

    Raises:
        RecordMissing: The step is not recorded.
    """
    record = reader.source.record
    if record is None:
        return {"steps": [], "step": None}
    return await anyio.to_thread.run_sync(partial(read_step, record, step))


async def get_sample(
    reader: RunReader, step: int, ordinal: int, sample: int, fate: str, attempt: int | None
) -> dict[str, Any]:
    """Return one sample with its turns and tokens.

    Raises:
        RecordMissing: It is not recorded.
    """
    record = reader.source.record
    if record is None:
        run_id = reader.source.run_id
        raise RecordMissing(run_id, "run", Path(run_id))
    return await anyio.to_thread.run_sync(
        partial(read_sample, record, step, ordinal, sample, fate, attempt)
    )


def read_step(record: RolloutRecord, step: int | None = None) -> dict[str, Any]:
    """Return the groups of a step, with those that were discarded while it was filled.

    Each has rows of its samples, and the best, the middle and the worst answer. The default is the
    newest step with trained samples.
    """
    steps = record.list_steps(discarded=True)
    if not steps:
        return {"steps": [], "step": None}
    if step is None:
        step = max((listed.step for listed in steps if listed.files), default=steps[-1].step)
    recorded = record.find_step(step, discarded=True)
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    questions = {}
    for discarded in (False, True):
        for row in record.read(recorded, _COLUMNS, discarded=discarded):
            groups[row["fate"] or TRAINED, row["ordinal"], row["attempt"]].append(row)
        # The samples of a group share their prompt.
        columns = ("ordinal", "sample", "prompt")
        for row in record.read(recorded, columns, sample=0, discarded=discarded):
            questions[row["ordinal"]] = _format_question(row["prompt"])
    rows = [row for group in groups.values() for row in group]
    parts = sorted({name for row in rows for name in row["reward_parts"]})
    explorers = sorted({row["explorer"] for row in rows})
    places = {name: place for place, name in enumerate(explorers)}
    fates: Counter[str] = Counter()
    for (fate, *_), group in groups.items():
        fates[fate] += len(group)
    return {
        "steps": [listed.step for listed in steps],
        "step": recorded.step,
        "epoch": recorded.epoch,
        "parts": parts,
        "explorers": explorers,
        "fates": fates,
        "groups": [
            {"fate": fate, "attempt": attempt, "question": questions.get(ordinal, "")}
            | _build_group(group, parts, places)
            for (fate, ordinal, attempt), group in groups.items()
        ],
    }


def _format_question(prompt: str) -> str:
    text = " ".join(prompt.split())
    return text if len(text) <= _QUESTION else f"…{text[-_QUESTION:]}"


def _build_group(
    group: list[dict[str, Any]], parts: list[str], places: dict[str, int]
) -> dict[str, Any]:
    by_reward = sorted(range(len(group)), key=lambda place: group[place]["reward"])
    chosen = (by_reward[-1], by_reward[len(group) // 2], by_reward[0])
    return {
        "ordinal": group[0]["ordinal"],
        "set": group[0]["question_set"],
        "samples": [
            [
                *(row["sample"], row["reward"], row["completion_tokens"], row["is_truncated"]),
                *(places[row["explorer"]], row["staleness"], row["version_count"]),
                row["advantage"],
                [row["reward_parts"].get(name) for name in parts],
            ]
            for row in group
        ],
        "best": chosen[0],
        "middle": chosen[1],
        "worst": chosen[2],
        "previews": [group[place]["preview"] for place in chosen],
    }


def read_sample(
    record: RolloutRecord,
    step: int,
    ordinal: int,
    sample: int,
    fate: str = TRAINED,
    attempt: int | None = None,
) -> dict[str, Any]:
    """Return one sample as the page of samples shows it.

    Args:
        record: The record.
        step: Step that trained on it, or that was being filled when it was discarded.
        ordinal: Its question.
        sample: Its number in the group.
        fate: Its fate.
        attempt: Attempt of the question; None for any, as a step trains on one of them.

    Raises:
        RecordMissing: It is not recorded.
    """
    is_discarded = fate != TRAINED
    recorded = record.find_step(step, discarded=is_discarded)
    for row in record.read(recorded, None, ordinal=ordinal, sample=sample, discarded=is_discarded):
        if (row["fate"] or TRAINED) == fate and attempt in (None, row["attempt"]):
            return _build_sample(row, recorded)
    raise RecordMissing(record.run_id, "ordinal", record.folder, step=step, ordinal=ordinal)


def _build_sample(row: dict[str, Any], recorded: RecordedStep) -> dict[str, Any]:
    shown = slice(_LONGEST)
    return {
        **{name: row[name] for name in ("ordinal", "sample", "reward", "reward_parts")},
        **{name: row[name] for name in ("reward_error", "judge_reply", "explorer", "attempt")},
        **{name: row[name] for name in ("staleness", "is_truncated", "is_redacted", "advantage")},
        "step": recorded.step,
        "epoch": recorded.epoch,
        "fate": row["fate"] or TRAINED,
        "proof": row["proof"],
        "messages": [
            [
                *(message["turn"], message["role"], message["name"], message["content"]),
                [[call["name"], call["arguments"]] for call in message["tool_calls"]],
            ]
            for message in (*(row["prompt_messages"] or ()), *(row["completion_messages"] or ()))
        ],
        "turns": [[turn["role"], turn["content"], turn["tokens"]] for turn in row["turns"]],
        "tokens": row["token_texts"][shown],
        "mask": row["completion_mask"][shown],
        "logprobs": _round(row["logprobs"][shown]),
        "trainer_logprobs": _round((row["trainer_logprobs"] or [])[shown]),
        "advantages": _round((row["advantages"] or [])[shown]),
        "versions": [
            [version["epoch"], version["step"], version["tokens"]] for version in row["versions"]
        ],
        "length": row["completion_tokens"],
    }


def _round(numbers: list[float]) -> list[float]:
    # Four digits are more than a shade shows, and half of the bytes.
    return [round(number, 4) for number in numbers]


def read_for_file(record: RolloutRecord) -> dict[str, Any]:
    """Return the newest steps, and the samples of some of their groups, for a file."""
    steps = record.list_steps(discarded=True)[-FILE_STEPS:]
    data: dict[str, Any] = {"steps": {}, "samples": {}}
    for recorded in steps:
        page = read_step(record, recorded.step)
        page["steps"] = [listed.step for listed in steps]
        data["steps"][str(recorded.step)] = page
        chosen = [
            (group["fate"], group["ordinal"], group["attempt"])
            for fate in page["fates"]
            for group in _choose_groups(page["groups"], fate)
        ]
        for fate, ordinal, attempt in chosen:
            for row in record.read(recorded, None, ordinal=ordinal, discarded=fate != TRAINED):
                if (row["fate"] or TRAINED, row["attempt"]) == (fate, attempt):
                    name = f"{recorded.step}/{fate}/{ordinal}/{attempt}/{row['sample']}"
                    data["samples"][name] = _build_sample(row, recorded)
    return data


def _choose_groups(groups: list[dict[str, Any]], fate: str) -> list[dict[str, Any]]:
    def mean(group: dict[str, Any]) -> float:
        return float(sum(sample[1] for sample in group["samples"]) / len(group["samples"]))

    ordered = sorted((group for group in groups if group["fate"] == fate), key=mean)
    count = min(len(ordered), FILE_GROUPS if fate == TRAINED else FILE_DISCARDED)
    places = {place * (len(ordered) - 1) // max(count - 1, 1) for place in range(count)}
    return [ordered[place] for place in sorted(places)]
