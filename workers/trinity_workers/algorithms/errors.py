"""Errors of algorithms: settings that cannot be used, and batches that lack a field."""

from __future__ import annotations

from typing import Literal

from trinity_events.errors import TrinityError


class AlgorithmError(TrinityError):
    """An algorithm's settings contradict each other, or its batch lacks a field."""


class UnknownPreset(AlgorithmError):
    """There is no preset of a name.

    Attributes:
        name: The name.
        nearest: Most similar preset, if one is similar.
        choices: Presets that there are.
    """

    name: str
    nearest: str | None
    choices: tuple[str, ...]
    text = "unknown preset {name!r}: {_nearest}the presets are {_choices}"

    @property
    def _nearest(self) -> str:
        return "" if self.nearest is None else f"did you mean {self.nearest!r}? "

    @property
    def _choices(self) -> str:
        return ", ".join(self.choices)


class AlgorithmSettingRefused(AlgorithmError):
    """A setting of an algorithm is unknown, or has a wrong value.

    Attributes:
        path: Path of the setting, or of its section.
        reason: What is wrong.
    """

    path: str
    reason: str
    text = "{path} cannot be used: {reason}"


class AlgorithmContradiction(AlgorithmError):
    """Settings of an algorithm do not go together.

    Attributes:
        settings: Their paths.
        values: Their values.
        sentence: Sentence of the rule, with the reason and the way out.
    """

    settings: tuple[str, ...]
    values: tuple[object, ...]
    sentence: str
    text = "{sentence}"


class FieldMissing(AlgorithmError):
    """A batch lacks a field that a computation needs.

    Attributes:
        purpose: The computation.
        field: Name of the field.
    """

    purpose: str
    field: str
    text = "{purpose} needs {field}, which the batch does not have"


class LoneSample(AlgorithmError):
    """Advantages of rloo compare the samples of a prompt, and there is one.

    Attributes:
        group: Number of the prompt's group.
    """

    group: int
    text = "advantage rloo needs at least two samples of each prompt, and group {group} has one"


class LengthMissing(AlgorithmError):
    """A setting counts in shares of a length that is not set.

    Attributes:
        setting: Setting of the length.
    """

    setting: Literal["normalisation_length", "overlong.limit"]

    def __str__(self) -> str:
        if self.setting == "overlong.limit":
            return "overlong.buffer is a share of a limit: set overlong.limit"
        return "normalisation constant divides by a length: set normalisation_length"


class RewardPartMissing(AlgorithmError):
    """Groups are filtered by a part of the reward that it does not have.

    Attributes:
        part: Value of filters.part.
        ordinal: Ordinal of the question.
        parts: Parts that the reward has.
    """

    part: str
    ordinal: int
    parts: tuple[str, ...]
    text = (
        "filters.part is {part!r}, and the reward of ordinal {ordinal} has no such part: its parts "
        "are {_parts}"
    )

    @property
    def _parts(self) -> str:
        return ", ".join(self.parts) or "none"


class DataProtoIncomplete(AlgorithmError):
    """A DataProto of veRL lacks a field.

    Attributes:
        missing: Fields that every batch needs; empty if it has no prompts.
    """

    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.missing:
            return f"the DataProto has no {', '.join(self.missing)}: a batch needs them"
        return "the DataProto has no prompts: give raw_prompt_ids, or input_ids and attention_mask"
