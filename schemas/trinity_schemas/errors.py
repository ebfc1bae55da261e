"""Errors with typed attributes, and those of messages that contradict the contract.

An error has its data as typed attributes. Its class formats the text from them, and
``tests/snapshots/errors.py`` holds each text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import get_annotations
from types import MappingProxyType
from typing import Any, ClassVar, Literal, dataclass_transform


class _Attributes:
    """Attributes of an error by name, properties too, for a template."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getitem__(self, name: str) -> Any:
        return getattr(self._error, name)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class StructuredError(Exception):
    """Error whose text is formatted from its attributes.

    A subclass that annotates attributes is a dataclass. Its text is a template over them: ``text``,
    or that of ``texts`` which its attribute ``fault`` names. An error survives pickling, however
    its attributes were given.
    """

    text: ClassVar[str] = ""
    texts: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not get_annotations(cls):
            return
        dataclass(eq=False)(cls)
        # Ray raises an instance of a subclass that it makes, and forwards to the error what that
        # class lacks: a default on the class would hide the error's own value.
        for attribute in fields(cls):  # type: ignore[arg-type]
            if attribute.init and attribute.name in vars(cls):
                delattr(cls, attribute.name)

    def __str__(self) -> str:
        template = self.texts[_Attributes(self)["fault"]] if self.texts else self.text
        return template.format_map(_Attributes(self)) if template else super().__str__()

    def __reduce__(self) -> Any:
        if not hasattr(self, "__dataclass_fields__"):
            return super().__reduce__()
        state = dict(vars(self))
        # As keywords: an exception's own ``args`` lack what was given by keyword.
        names = [each.name for each in fields(self) if each.init]  # type: ignore[arg-type]
        data = {name: state.pop(name) for name in names}
        return partial(type(self), **data), (), state or None


class ContractError(StructuredError, ValueError):
    """Bytes or a message that contradict the contract; each subclass is one kind of fault."""


class MessageUndecodable(ContractError):
    """Bytes are not the message that they should be.

    The error is caused by the message's own error, such as :class:`RangesOverlap`, if it has one.

    Attributes:
        expected: Message that they should be.
        reason: Error of the decoder.
    """

    expected: str
    reason: str
    text = "not {expected}: {reason}"


class MessageTooLarge(ContractError):
    """A message has more bytes than its limit.

    Attributes:
        size: Its bytes.
        limit: Maximum bytes.
    """

    size: int
    limit: int
    text = "{size} bytes, above the limit of {limit}"


class MessageUnencodable(ContractError):
    """A message holds a value that cannot be encoded.

    Attributes:
        message: Name of the message.
        fault: ``text`` that is not UTF-8, or a ``value`` of another type than the contract's.
        reason: The text, or the error of the encoder.
    """

    message: str
    fault: Literal["text", "value"]
    reason: str
    texts: ClassVar = {
        "text": "{message} holds text that is not UTF-8: {reason!r}",
        "value": "{message} holds a value that is no plain number or text ({reason}): for an "
        "element of a tensor or an array, give item()",
    }


class ForeignEvent(ContractError):
    """An event is of another run than the log that it is in.

    Attributes:
        run_id: Run of the event.
        expected: Run of the log.
    """

    run_id: str
    expected: str
    text = "an event of run {run_id!r}, not of {expected!r}"


class MalformedRunId(StructuredError, ValueError):
    """A run id is not a slug.

    Attributes:
        run_id: The text.
    """

    run_id: str
    text = (
        "run id {_shown!r} is not a slug: use 1 to 63 letters, digits, dots, dashes and "
        "underscores, beginning with a letter or a digit"
    )

    @property
    def _shown(self) -> str:
        return self.run_id[:80]


class RangesOverlap(StructuredError, ValueError):
    """Ranges of ordinals do not ascend, or overlap.

    Attributes:
        first: First ordinal of a range.
        last: Last ordinal of the range.
        before: Last ordinal of the range before it.
    """

    first: int
    last: int
    before: int
    text = "ordinals {first} to {last} after {before}: ranges must ascend without overlap"


class ResumeContradiction(StructuredError, ValueError):
    """A run resumes a step from the checkpoint of another step.

    Attributes:
        step: Step that is resumed.
        checkpoint: Step of the checkpoint.
    """

    step: int
    checkpoint: int
    text = "the run resumes step {step} from a checkpoint of {checkpoint}"


class ArrayDamaged(StructuredError, ValueError):
    """Bytes of an array are more or fewer than its length says.

    Attributes:
        dtype: Type of its values.
        length: Number of its values.
        size: Number of its bytes.
    """

    dtype: str
    length: int
    size: int
    text = "an array of {length} values of {dtype} has {size} bytes"


class ArrayValuesRefused(StructuredError, ValueError):
    """Values are no numbers of the types that an array may have.

    Attributes:
        dtypes: The types.
        reason: Reason in words.
    """

    dtypes: tuple[str, ...]
    reason: str
    text = "no array of {_dtypes} has these values: {reason}"

    @property
    def _dtypes(self) -> str:
        return " or ".join(self.dtypes)


class ExperienceContradiction(StructuredError, ValueError):
    """An experience contradicts itself.

    Attributes:
        fault: Part of it that does.
        sample: Index of the sample.
        samples: Samples of its group.
    """

    fault: Literal["sample", "prompt", "policy", "logprobs", "versions", "reference"]
    sample: int
    samples: int
    texts: ClassVar = {
        "sample": "sample {sample} is not one of {samples}",
        "prompt": "the first turn must be a prompt of at least one token, or of none where it is "
        "shared with sample 0",
        "policy": "at least one turn must be the policy's",
        "logprobs": "every token of the policy, and no other, needs a log-probability",
        "versions": "every token of the policy, and no other, needs a version",
        "reference": "sample {sample} has other tokens or versions than its reference says",
    }


class LedgerContradiction(StructuredError, ValueError):
    """A ledger of fates contradicts itself.

    Attributes:
        fault: Field of it that does.
        ordinal: Value of the field.
    """

    fault: Literal["mark", "next"]
    ordinal: int
    texts: ClassVar = {
        "mark": "the mark {ordinal} has a fate: the mark is the first without one",
        "next": "an ordinal has a fate that is not below the next one, {ordinal}",
    }


class ProbesContradiction(StructuredError, ValueError):
    """Probes of a version contradict themselves.

    Attributes:
        fault: What contradicts.
        actual: Value of the probes.
        expected: Value that would fit the rest of them.
    """

    fault: Literal["size", "digest", "shapes", "count", "tokens", "logprobs"]
    actual: object = None
    expected: object = None
    texts: ClassVar = {
        "size": "an array of the probes has {actual} bytes, and its shape takes {expected}",
        "digest": "an array of the probes has the digest {actual}, and {expected} was sealed",
        "shapes": "the arrays of the probes are {actual}, and must be {expected}",
        "count": "there are {actual} probes, and at most {expected} are allowed",
        "tokens": "a token of the probes is below 0",
        "logprobs": "a log-probability of the probes is no number of at most 0",
    }


class ManifestContradiction(StructuredError, ValueError):
    """A weight manifest contradicts itself.

    Attributes:
        fault: What contradicts.
        tensor: Name of the tensor; empty for the sizes of all.
        actual: Value of the manifest.
        expected: Value that would fit the rest of it.
        begins: First index in each dimension, for a shard.
    """

    fault: Literal[
        "sizes", "dtype", "offset", "shard", "twice", "stored", "base", "digest", "skip", "delta"
    ]
    tensor: str = ""
    actual: object = None
    expected: object = None
    begins: tuple[int, ...] | None = None
    texts: ClassVar = {
        "sizes": "tensors take {actual} bytes, chunks hold {expected}",
        "dtype": "tensor {tensor!r} has unknown dtype {actual!r}",
        "offset": "tensor {tensor!r} begins at {actual}, not at {expected} or the next multiple of "
        "64",
        "shard": "tensor {tensor!r} is {actual} from {begins}, which is no part of a tensor of "
        "shape {expected}",
        "twice": "tensor {tensor!r} appears twice",
        "stored": "tensor {tensor!r} is dense and has a stored size",
        "base": "tensor {tensor!r} is a {actual} in a part without a base",
        "digest": "tensor {tensor!r} is a {actual} without the digest of its tensor",
        "skip": "tensor {tensor!r} is skipped and has a stored size",
        "delta": "tensor {tensor!r} is a delta of {actual} bytes of a tensor of {expected}",
    }
