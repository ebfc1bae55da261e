"""Process that writes a rank's record: ``python -m trinity_workers.record.writer``.

It reads messages from its standard input, and answers each on its standard output. The end of the
input ends it: so it ends with its rank, however that ends.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trinity_events.record.columns import build_schema, import_pyarrow
from trinity_events.record.conversation import Row, build_policy_row, build_row, link_calls
from trinity_events.record.files import EpochMark, RecordFile, list_names, parse_file_name
from trinity_events.record.reader import TRAINED
from trinity_events.rollouts.payloads import PayloadFault
from trinity_events.rollouts.payloads.loading import load_group
from trinity_schemas import ChatMessage, Experience, Turn
from trinity_schemas.codec import decode_experience, decode_reference

from .messages import DiscardedRows, StepRows, WriterSettings, Written, read_message, write_message

_REDACTED = -1
"""Token id in the place of those of a text that was redacted."""

_ROW_GROUP = 64
"""Rows that a reader of one group's tokens decodes: some MiB of answers of 4,096 tokens."""
_PREVIEW = 80
"""Characters of the beginning, and of the end, of an answer that lists show."""

Redact = Callable[[str], str]
Decode = Callable[[list[list[int]]], list[str]]


class _Sample(NamedTuple):
    """Sample with its fate."""

    experience: Experience
    fate: str = TRAINED


class RecordWriter:
    """Writer of the files of one rank.

    Args:
        settings: The rank, its folder and limits.
    """

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._pyarrow = import_pyarrow("the record of rollouts")
        self._folder = Path(settings.folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = EpochMark(settings.epoch, settings.resumed_step)
        # Not exclusively: every rank makes the mark of the epoch.
        os.close(os.open(self._folder / mark.name, os.O_CREAT | os.O_RDONLY, 0o600))
        for name in list_names(self._folder):
            # Of a writer of this rank that was killed.
            if name.endswith(".tmp") and self._owns_name(name[1:].removesuffix(".tmp")):
                (self._folder / name).unlink(missing_ok=True)
        _sync(self._folder)
        self._decode, self._special_texts = _load_decoder(Path(settings.model_folder))
        self._redact: Redact | None = None
        if settings.redact is not None:
            # Named by the configuration of the rank's own side, as rewards are.
            from ..tasks.objects import load_object

            self._redact = load_object(settings.redact, kind="redaction function")

    def write(self, rows: StepRows) -> Written:
        """Write the samples of a step durably, and remove what exceeds the limits."""
        samples = [_Sample(decode_experience(payload)) for payload in rows.experiences]
        for answer in rows.discarded:
            samples += [_Sample(sample, answer.fate) for sample in _decode_discarded(answer)]
        if not samples:
            return Written()
        table = self._build_table(samples, rows)
        file = self._next_file(rows.step)
        path = self._folder / file.name
        # A name that no reader parses (record/files.py, invariant 1).
        temporary = path.with_name(f".{path.name}.tmp")
        # Answers are private: created for the run's user alone, whatever the umask is.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as output:
            self._pyarrow.parquet.write_table(
                table, output, compression="zstd", row_group_size=_ROW_GROUP
            )
            output.flush()
            os.fsync(output.fileno())
        temporary.replace(path)
        _sync(self._folder)
        return Written(samples=len(samples), removed=tuple(self._remove_oldest()))

    def _next_file(self, step: int) -> RecordFile:
        epoch, rank = self._settings.epoch, self._settings.rank
        if rank is not None:
            return RecordFile(epoch, step, rank)
        parts = sum((file.epoch, file.step) == (epoch, step) for file in self._list_own())
        return RecordFile(epoch, step, parts, is_discarded=True)

    def _build_table(self, samples: Sequence[_Sample], rows: StepRows) -> Any:
        shape = len(samples), rows.width
        advantages = _as_array(rows.advantages, shape)  # (samples, width)
        logprobs = _as_array(rows.logprobs, shape)  # (samples, width)
        turns = [turn for sample, _ in samples for turn in sample.turns]
        texts = iter(self._decode([turn.tokens[:] for turn in turns]))
        columns: dict[str, list[Any]] = {}
        for row, (sample, fate) in enumerate(samples):
            contents = [next(texts) for _ in sample.turns]
            values = self._build_row(
                sample,
                contents,
                rows.step,
                fate,
                None if advantages is None else advantages[row],
                None if logprobs is None else logprobs[row],
            )
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
        schema = build_schema({"format": "1"})
        return self._pyarrow.table(
            [
                self._build_token_texts(columns["completion_ids"])
                if field.name == "token_texts"
                else self._pyarrow.array(columns[field.name], field.type)
                for field in schema
            ],
            schema,
        )

    def _build_row(
        self,
        sample: Experience,
        contents: list[str],
        step: int,
        fate: str,
        advantages: np.ndarray[Any, Any] | None,
        logprobs: np.ndarray[Any, Any] | None,
    ) -> dict[str, Any]:
        redacted = [self._redact_text(content) for content in contents]
        is_changed = [old != new for old, new in zip(contents, redacted, strict=True)]
        ids = [
            np.full(len(turn.tokens), _REDACTED, np.int32) if changed else _ids(turn.token_view)
            for turn, changed in zip(sample.turns, is_changed, strict=True)
        ]
        turns = list(zip(sample.turns, redacted, strict=True))
        # (completion tokens), as the arrays of the trainer: what follows the prompt.
        mask = np.concatenate([_filled(turn, turn.role == "policy") for turn, _ in turns[1:]])
        sampled = np.concatenate(
            [
                np.asarray(turn.logprob_view, np.float32)
                if turn.role == "policy"
                else np.zeros(len(turn.tokens), np.float32)
                for turn, _ in turns[1:]
            ]
        )
        count = len(mask)
        # (completion tokens): rows are padded on the right.
        own = None if advantages is None else advantages[:count]
        trained = [] if own is None else own[mask]
        versions = [
            {"epoch": version.epoch, "step": version.step, "tokens": tokens}
            for turn, _ in turns
            for version, tokens in turn.versions
        ]
        completion = "".join(redacted[1:])
        messages = self._build_messages(turns)
        return {
            "run_id": sample.run_id,
            "epoch": self._settings.epoch,
            "step": step if fate == TRAINED else None,
            "for_step": step,
            "fate": fate,
            "rank": self._settings.rank,
            "ordinal": sample.ordinal,
            "attempt": sample.attempt,
            "sample": sample.sample,
            "samples": sample.samples,
            "explorer": sample.explorer,
            "question_set": sample.question_set,
            "prompt": redacted[0],
            "completion": completion,
            "preview": preview_text(completion),
            "turns": [
                {"role": turn.role, "content": content, "tokens": len(turn.tokens)}
                for turn, content in turns
            ],
            "prompt_messages": None if messages is None else messages[0],
            "completion_messages": None if messages is None else messages[1],
            "prompt_ids": ids[0],
            "completion_ids": np.concatenate(ids[1:]),
            "completion_mask": mask,
            "logprobs": sampled,
            "trainer_logprobs": None if logprobs is None else logprobs[:count],
            "advantages": own,
            "versions": versions,
            "reward": sample.reward,
            "reward_parts": list(sample.reward_parts.items()),
            "reward_error": self._redact_text(sample.reward_error),
            "judge_reply": self._redact_text(sample.judge_reply),
            "advantage": float(trained[0]) if len(trained) else None,
            # A step trains on the version of the step before, at best (config/sync_schedule.py).
            "staleness": max(step - 1 - sample.oldest_version.step, 0),
            "proof": sample.proof,
            "is_truncated": not sample.finished,
            "is_redacted": any(is_changed),
            "prompt_tokens": len(ids[0]),
            "completion_tokens": count,
            "version_count": len({(version["epoch"], version["step"]) for version in versions}),
        }

    def _build_messages(
        self, turns: Sequence[tuple[Turn, str]]
    ) -> tuple[list[Row], list[Row]] | None:
        """Return the messages of the prompt and after it; None for an episode of text alone."""
        if not any(turn.messages for turn, _ in turns):
            return None
        rows: list[Row] = []
        for place, (turn, content) in enumerate(turns):
            if turn.role == "policy":
                # Its last token may be the special one of its end, which is no text of it.
                rows.append(build_policy_row(content.removesuffix(self._get_end(turn)), place))
            else:
                given = turn.messages or [ChatMessage(role="user", content=content)]
                rows += [self._redact_row(build_row(message, place)) for message in given]
        link_calls(rows)
        return [row for row in rows if not row["turn"]], [row for row in rows if row["turn"]]

    def _get_end(self, turn: Turn) -> str:
        """Return the text of a turn's last token, if it is special; else none."""
        [text] = self._decode([[*turn.tokens[-1:]]])
        return text if text in self._special_texts else ""

    def _redact_row(self, row: Row) -> Row:
        texts = {name: self._redact_text(row[name]) for name in ("content", "arguments")}
        for call in row["tool_calls"]:
            call["arguments"] = self._redact_text(call["arguments"])
        return row | texts

    def _build_token_texts(self, lists: list[np.ndarray[Any, Any]]) -> Any:
        """Return the text of each token; a text of its own may lack what joins it to the next."""
        pa = self._pyarrow
        # A column of all lists end to end, (completion tokens of all samples), with where each
        # begins; a text is stored once for each distinct token.
        offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        distinct, places = np.unique(np.concatenate(lists), return_inverse=True)
        texts = self._decode([[token] if token >= 0 else [] for token in distinct.tolist()])
        values = pa.DictionaryArray.from_arrays(
            pa.array(places.astype(np.int32)), pa.array(texts, pa.string())
        )
        return pa.ListArray.from_arrays(pa.array(offsets), values)

    def _redact_text(self, text: str) -> str:
        if self._redact is None or not text:
            return text
        redacted = self._redact(text)
        if not isinstance(redacted, str):
            raise TypeError(
                f"the redaction function {self._settings.redact} returned "
                f"{type(redacted).__name__}, not a text"
            )
        return redacted

    def _remove_oldest(self) -> list[int]:
        """Remove the oldest steps of this rank beyond the limits; return their numbers."""
        settings = self._settings
        own = sorted(self._list_own())
        sizes = {file: (self._folder / file.name).stat().st_size for file in own}
        total = sum(sizes.values())
        # Answers that no step trained on are in several files of one step.
        file_counts = Counter((file.epoch, file.step) for file in own)
        removed: dict[tuple[int, int], int] = {}
        # The newest one stays, whatever its size.
        for file in own[:-1]:
            if total <= settings.max_bytes and len(file_counts) <= settings.max_steps:
                break
            step = file.epoch, file.step
            (self._folder / file.name).unlink(missing_ok=True)
            total -= sizes[file]
            removed[step] = file.step
            file_counts[step] -= 1
            if not file_counts[step]:
                del file_counts[step]
        return list(removed.values())

    def _list_own(self) -> Iterable[RecordFile]:
        for name in list_names(self._folder):
            if self._owns_name(name):
                file = parse_file_name(name)
                assert file is not None
                yield file

    def _owns_name(self, name: str) -> bool:
        file = parse_file_name(name)
        return file is not None and self._owns(file)

    def _owns(self, file: RecordFile) -> bool:
        if file.is_discarded or self._settings.rank is None:
            return file.is_discarded and self._settings.rank is None
        # An earlier epoch may have had more ranks, whose files rank 0 looks after.
        rank = file.rank if file.rank < self._settings.ranks else 0
        return rank == self._settings.rank


def _decode_discarded(answer: DiscardedRows) -> list[Experience]:
    """Return the samples of an answer; none if its payload is not as its explorer announced it."""
    if answer.payload is None:
        return [decode_experience(sample) for sample in answer.samples]
    samples = load_group([decode_reference(sample) for sample in answer.samples], answer.payload)
    return [] if isinstance(samples, PayloadFault) else samples


def preview_text(text: str) -> str:
    """Return the beginning and the end of a text."""
    return text if len(text) <= 2 * _PREVIEW else f"{text[:_PREVIEW]} … {text[-_PREVIEW:]}"


def _as_array(values: bytes | None, shape: tuple[int, int]) -> np.ndarray[Any, Any] | None:
    return None if values is None else np.frombuffer(values, np.float32).reshape(shape)


def _ids(view: memoryview) -> np.ndarray[Any, Any]:
    return np.asarray(view).astype(np.int32)


def _filled(turn: Any, value: bool) -> np.ndarray[Any, Any]:
    return np.full(len(turn.tokens), value, np.bool_)


def _load_decoder(folder: Path) -> tuple[Decode, frozenset[str]]:
    """Return the function that decodes lists of tokens, and the texts of special tokens."""
    path = folder / "tokenizer.json"
    if path.is_file():
        # transformers takes seconds to import, and reads the same file.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))

        def decode(lists: list[list[int]]) -> list[str]:
            texts: list[str] = tokenizer.decode_batch(lists, skip_special_tokens=False)
            return texts

        added = tokenizer.get_added_tokens_decoder().values()
        return decode, frozenset(token.content for token in added if token.special)
    from ..learning.policy import load_tokenizer

    other: Any = load_tokenizer(folder)

    def decode_each(lists: list[list[int]]) -> list[str]:
        return [other.decode(tokens, skip_special_tokens=False) for tokens in lists]

    return decode_each, frozenset(other.all_special_tokens)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def serve(inward: BinaryIO, outward: BinaryIO) -> None:
    """Write what comes in until its end, or the first error."""
    writer: RecordWriter | None = None
    while True:
        kind: Any = WriterSettings if writer is None else StepRows
        message = read_message(inward, kind)
        if message is None:
            return
        try:
            if writer is None:
                writer, written = RecordWriter(message), Written()
            else:
                written = writer.write(message)
        # Also of a user's redaction: the rank decides what an error means.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            write_message(outward, Written(error=reason))
            return
        write_message(outward, written)


def main() -> None:
    """Serve the process's own input and output."""
    outward = os.fdopen(os.dup(1), "wb")
    # What a user's redaction prints must not be read as an answer.
    os.dup2(2, 1)
    # The ranks compute on the same cores.
    os.nice(10)
    with suppress(BrokenPipeError):  # the rank is gone
        serve(sys.stdin.buffer, outward)


if __name__ == "__main__":
    main()
