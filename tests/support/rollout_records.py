"""Records of rollouts, as the writing process writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from trinity_events.record.files import RECORD
from trinity_events.record.reader import RolloutRecord
from trinity_schemas import ChatMessage, Experience, StepRef, Turn, encode
from trinity_workers.record.messages import DiscardedRows, StepRows, WriterSettings
from trinity_workers.record.writer import RecordWriter


def make_episode(model_folder: Path, run_id: str = "r", ordinal: int = 0) -> Experience:
    """Return an episode with a tool: a chat, a call, its result, and an answer."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def encode_text(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def answer(text: str) -> Turn:
        tokens = encode_text(text)
        return Turn(
            role="policy",
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[(StepRef(1, 0), len(tokens))],
        )

    question = [
        ChatMessage(role="system", content="use tools"),
        ChatMessage(role="user", content="what is tea"),
    ]
    result = ChatMessage(role="tool", content="a drink", name="lookup", arguments='{"word": "tea"}')
    return Experience(
        run_id=run_id,
        epoch=1,
        ordinal=ordinal,
        attempt=1,
        sample=0,
        samples=1,
        explorer="explorer-0",
        turns=[
            Turn(role="prompt", tokens=encode_text("what is tea"), messages=question),
            answer("look up tea"),
            Turn(role="environment", tokens=encode_text("a drink"), messages=[result]),
            answer("drink"),
        ],
        reward=1.0,
    )


def write_record(
    folder: Path,
    model_folder: Path,
    steps: Mapping[int, Sequence[Sequence[Experience]]],
    *,
    epoch: int = 1,
    resumed_step: int = 0,
    discarded: Mapping[int, Sequence[tuple[str, Sequence[Experience]]]] | None = None,
) -> RolloutRecord:
    """Write a run's record with these groups of each step; advantages count up from 0.

    Args:
        folder: Folder of the run.
        model_folder: Folder of its tokenizer.
        steps: Trained groups of each step.
        epoch: Epoch of the steps.
        resumed_step: Step that the epoch began with.
        discarded: Groups with their fates, by the step that was being filled.
    """
    settings = WriterSettings(
        run_id=folder.name,
        epoch=epoch,
        resumed_step=resumed_step,
        folder=str(folder / RECORD),
        model_folder=str(model_folder),
        rank=0,
        ranks=1,
        max_bytes=2**30,
        max_steps=100,
    )
    writer = RecordWriter(settings)
    for step, groups in steps.items():
        samples = [sample for group in groups for sample in group]
        width = max(sum(len(turn.tokens) for turn in sample.turns[1:]) for sample in samples)
        numbers = np.arange(len(samples) * width, dtype=np.float32)
        rows = StepRows(
            step=step,
            experiences=[encode(sample) for sample in samples],
            width=width,
            advantages=numbers.tobytes(),
        )
        writer.write(rows)
    if discarded:
        writer = RecordWriter(msgspec.structs.replace(settings, rank=None))
        for step, answers in discarded.items():
            fates = [
                DiscardedRows(fate=fate, samples=[encode(sample) for sample in group])
                for fate, group in answers
            ]
            writer.write(StepRows(step=step, experiences=[], discarded=fates))
    return RolloutRecord(folder, folder.name)
