"""Sources of questions: files, data sets, reasoning-gym and Python objects.

Each source gives records, which become questions by the names of their fields. Libraries that only
one source needs are imported when it is read.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec
from msgspec import Struct

from trinity_events.errors import PackageMissing

from .base import Answer, Question, RewardFunction
from .errors import AnswersMissing, RecordRefused, SourceUnreadable, TaskOptionsRefused
from .fields import ABSENT, propose_field, read_field
from .objects import load_object

REASONING_GYM = "reasoning-gym:"
DATASETS = "datasets:"


class QuestionOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a task that takes its questions from a source."""

    chat: bool = False
    """If true, a prompt of text is sent as one message of the user, by the chat template."""
    system: str | None = None
    """System message before each prompt."""
    shuffle: bool = True
    """If false, every pass over the questions has the order of their source."""
    evaluation: str | None = None
    """Source of the questions to measure on; without one, a tenth of the questions is held out."""
    source: dict[str, Any] = {}
    """Options of the source: those of `datasets.load_dataset`, or of the reasoning-gym family."""

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> QuestionOptions:
        """Return the options of a task, checked. Raises TaskError if there is no such option."""
        try:
            return msgspec.convert(dict(options or {}), cls)
        except msgspec.ValidationError as error:
            raise TaskOptionsRefused(str(error), cls.__struct_fields__) from None


def read_questions(
    source: str,
    options: QuestionOptions,
    *,
    prompt: str = "prompt",
    answer: str | None = "answer",
    folder: Path = Path(),
) -> list[Question]:
    """Return the questions of a source.

    Args:
        source: JSONL or Parquet file, `datasets:NAME`, `reasoning-gym:NAME`, `module:attribute` or
            `./file.py:attribute`.
        options: Options of the task.
        prompt: Field that holds the prompt, or the path to it.
        answer: Field that holds the right answer, or the path to it; None if the questions have
            none. A record may lack it, but not all of them: the field is then another one.
        folder: Directory that relative paths start from.

    Raises:
        TaskError: naming the source, and the record or field that is at fault.
        PackageMissing: The source needs a package that is not installed.
    """
    records: Iterable[object]
    if source.startswith(REASONING_GYM):
        records = _reasoning_gym(source, options.source)
        # The entries of every family have these names.
        prompt, answer = "question", "answer"
    elif source.startswith(DATASETS):
        records = _datasets(source, options.source)
    elif source.endswith((".jsonl", ".ndjson")):
        records = _jsonl(folder / source)
    elif source.endswith(".parquet"):
        records = _parquet(folder / source)
    elif ":" in source:
        records = _python_object(source, folder)
    else:
        raise SourceUnreadable(source, "form")
    questions = []
    unanswered: Mapping[str, object] | None = None
    answered = answer is None
    for number, record in enumerate(records, 1):
        question = _question(source, number, record, prompt, answer)
        questions.append(_with_chat(question, options))
        if isinstance(record, Mapping):
            answered = answered or question.answer is not None
            unanswered = unanswered or record
    if unanswered is not None and answer is not None and not answered:
        absent = read_field(unanswered, answer) is ABSENT
        reason = propose_field(unanswered, answer) if absent else "it is null in each"
        raise AnswersMissing(source, answer, reason)
    return questions


def _question(
    source: str, number: int, record: object, prompt: str, answer: str | None
) -> Question:
    if isinstance(record, Question):
        return _checked(source, number, record)
    if not isinstance(record, Mapping):
        raise RecordRefused(source, number, "kind", type(record).__name__)
    text = read_field(record, prompt)
    if text is ABSENT:
        raise RecordRefused(source, number, "field", propose_field(record, prompt), prompt)
    right = ABSENT if answer is None else read_field(record, answer)
    if not _is_finite(right):
        raise RecordRefused(source, number, "number", repr(right))
    data = {str(key): value for key, value in record.items() if key not in {prompt, answer}}
    question: Any = Question(
        prompt=text,  # type: ignore[arg-type]  # checked next
        answer=None if right is ABSENT else right,
        data=data,
    )
    return _checked(source, number, question)


def _checked(source: str, number: int, question: Question) -> Question:
    """Return the question as it arrives in another process, so that it is the same everywhere."""
    try:
        # There and back through JSON: tuples become lists, and keys text, as a reward will see
        # them.
        sent = msgspec.to_builtins(question, str_keys=True, enc_hook=_plain)
        checked = msgspec.convert(msgspec.json.decode(msgspec.json.encode(sent)), Question)
    except msgspec.ValidationError as error:
        raise RecordRefused(source, number, "prompt", str(error)) from None
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RecordRefused(source, number, "JSON", str(error)) from None
    empty = not checked.prompt or any(
        "role" not in message for message in checked.prompt if isinstance(message, dict)
    )
    if empty:
        raise RecordRefused(source, number, "empty")
    if kinds := _find_other_parts(checked):
        raise RecordRefused(source, number, "parts", " and ".join(kinds))
    return checked


def _find_other_parts(question: Question) -> list[str]:
    """Return the types of parts of chat messages that are no text, such as `image_url`."""
    contents = (message.get("content") for message in question.prompt if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    kinds = (
        str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        for part in parts
    )
    return sorted({kind for kind in kinds if kind != "text"})


def _is_finite(value: object) -> bool:
    """Return False for NaN and infinity, also within others: JSON has null in their place."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return _is_finite(value.tolist())
    # Decimals, too; text has no __float__, and an integer may be too large for one.
    return isinstance(value, int) or not isinstance(value, SupportsFloat) or math.isfinite(value)


def _plain(value: Any) -> Any:
    """Return arrays as lists, and numbers of NumPy as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def _with_chat(question: Question, options: QuestionOptions) -> Question:
    if isinstance(question.prompt, str) and not options.chat and options.system is None:
        return question
    messages = question.messages()
    if options.system is not None:
        messages = [{"role": "system", "content": options.system}, *messages]
    return msgspec.structs.replace(question, prompt=messages)


def _jsonl(path: Path) -> Iterator[object]:
    def lines() -> Iterator[object]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Windows writes UTF-16 where it is not told otherwise; the error names it.
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise SourceUnreadable(str(path), "UTF-16")
                # Editors on Windows begin UTF-8 with a mark, which JSON does not have.
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield _decoded(text, path, number)

    return _from_file(path, lines)


def _decoded(text: bytes, path: Path, line: int) -> object:
    try:
        return msgspec.json.decode(text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SourceUnreadable(str(path), "encoding", line, f"0x{byte:02x}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceUnreadable(str(path), "JSON", line, str(error)) from None


def _parquet(path: Path) -> Iterator[object]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise PackageMissing(str(path), "pyarrow", "pyarrow") from None

    def rows() -> Iterator[object]:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                # In batches: all rows of a file at once would be a second copy as Python objects.
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except pyarrow.lib.ArrowException as error:
            raise SourceUnreadable(str(path), "Parquet", reason=str(error)) from None
        except UnicodeDecodeError as error:
            raise SourceUnreadable(str(path), "text", reason=str(error)) from None

    return _from_file(path, rows)


def _from_file(path: Path, read: Callable[[], Iterable[object]]) -> Iterator[object]:
    try:
        yield from read()
    except FileNotFoundError:
        raise SourceUnreadable(str(path), "absent") from None
    except OSError as error:
        raise SourceUnreadable(str(path), "file", reason=error.strerror or str(error)) from None


def _datasets(source: str, options: Mapping[str, Any]) -> Iterator[object]:
    try:
        import datasets
    except ImportError:
        raise PackageMissing(source, "datasets", "datasets") from None
    name = source.removeprefix(DATASETS)
    try:
        # Without a split the library returns a mapping of splits, and no records.
        yield from datasets.load_dataset(name, **{"split": "train", **options})
    except Exception as error:
        raise SourceUnreadable(source, "load", reason=_first_line(error)) from None


def family_reward(source: str, options: Mapping[str, Any]) -> RewardFunction:
    """Return the reward of a reasoning-gym family, which judges by its own verifier.

    An answer without an end earns nothing.
    """
    family = _family(source, QuestionOptions.of(options).source)

    def reward(question: Question, answer: Answer) -> float:
        if not answer.finished:
            return 0.0
        # The record as the family made it: verifiers read its metadata.
        entry = {"question": question.prompt, "answer": question.answer, **question.data}
        return float(family.score_answer(answer.text.strip(), entry))

    return reward


def _reasoning_gym(source: str, options: Mapping[str, Any]) -> Iterator[object]:
    family = _family(source, options)
    for index in range(len(family)):
        yield family[index]


def _family(source: str, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise PackageMissing(source, "reasoning-gym", "reasoning-gym") from None
    name = source.removeprefix(REASONING_GYM)
    try:
        # A fixed seed: without one, each process would draw other questions.
        return reasoning_gym.create_dataset(name, **{"seed": 0, **options})
    except Exception as error:
        raise SourceUnreadable(source, "family", reason=_first_line(error)) from None


def _python_object(source: str, folder: Path) -> Iterator[object]:
    questions = load_object(source, kind="source of questions", folder=folder)
    try:
        yield from questions() if callable(questions) else questions
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SourceUnreadable(source, "object", reason=reason) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
