"""Errors of weight versions that are corrupt, and of those that do not fit a model."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from ..errors import CorruptVersion, IncompatibleWeights, StructuredError
from .slices import CoverageFault


class CorruptChunk(CorruptVersion):
    """A chunk is not the published one.

    Attributes:
        version: The part, with its step.
        harm: State of the model.
    """

    version: str = field(kw_only=True)
    harm: str = field(kw_only=True)
    text = "chunk {chunk} of the {version} is not what was published: {harm}"


class CorruptManifest(CorruptVersion):
    """The manifest of a part is not the announced one.

    Attributes:
        version: The part, with its step.
        fault: What is not as announced.
        reason: The manifest's contradiction, or the part that it is of.
        size: Bytes of the tensors.
        announced: Bytes that were announced.
    """

    version: str = field(kw_only=True)
    fault: Literal["digest", "contradiction", "part", "size"] = field(kw_only=True)
    reason: str = field(default="", kw_only=True)
    size: int = field(default=0, kw_only=True)
    announced: int = field(default=0, kw_only=True)
    texts: ClassVar = {
        "digest": "the manifest of the {version} is not the one that was announced",
        "contradiction": "the manifest of the {version} contradicts itself: {reason}",
        "part": "the manifest of the {version} is of the {reason}",
        "size": "the manifest of the {version} is of {size} bytes, {announced} were announced",
    }


class CorruptFile(CorruptVersion):
    """A file of a checkpoint's weights is not the announced one.

    Attributes:
        file: Name of the file, or path of the list of digests.
        step: Step of the checkpoint.
        fault: ``list`` of digests, ``digest`` of the file, or ``contradiction`` in it.
        reason: The contradiction.
    """

    file: str = field(kw_only=True)
    step: int = field(kw_only=True)
    fault: Literal["list", "digest", "contradiction"] = field(kw_only=True)
    reason: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "list": "{file} is not the list of digests that was announced for step {step}",
        "digest": "{file} of step {step} is not the file that was announced",
        "contradiction": "{file} of step {step} contradicts itself: {reason}",
    }


class CorruptPart(CorruptVersion):
    """A transport has something else than a part.

    Attributes:
        version: The part, with its step.
        fault: What is wrong.
        base: The part that it rests on.
        reason: Error of the decoder.
    """

    version: str = field(default="", kw_only=True)
    fault: Literal[
        "length", "base", "segment", "header", "contents", "empty", "blocks", "location", "objects"
    ] = field(kw_only=True)
    base: str = field(default="", kw_only=True)
    reason: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "length": "the {version} are shorter than what was published",
        "base": "the {version} rest on the {base}, which are not full themselves",
        "segment": "the segment of the {version} is too short",
        "header": "the segment of the {version} has no valid header",
        "contents": "the segment of the {version} is shorter than its header says",
        "empty": "a segment of weights is empty",
        "blocks": "the {version} lie in larger blocks than they need",
        "location": "the location of the {version} cannot be read: {reason}",
        "objects": "the objects of the {version} do not end where its chunks end",
    }


class CorruptTensor(CorruptVersion):
    """A tensor is not the published one.

    Attributes:
        fault: ``delta`` that does not give it, ``base`` that it should rest on, ``installed`` one,
            a ``chunk`` of installed ones, or ``pieces`` that do not lie together.
        tensor: Name of the tensor, if known; of a chunk, that of the first one.
        last: Name of the last tensor of a chunk.
        step: Step of the version.
        begin: First byte of the tensor in its part.
        size: Bytes of the tensor.
    """

    fault: Literal["delta", "base", "installed", "chunk", "pieces"] = field(kw_only=True)
    tensor: str = field(default="", kw_only=True)
    last: str = field(default="", kw_only=True)
    step: int = field(default=0, kw_only=True)
    begin: int = field(default=0, kw_only=True)
    size: int = field(default=0, kw_only=True)
    texts: ClassVar = {
        "delta": "{tensor!r} with its delta applied is not the published tensor",
        "base": "{tensor!r} is not in the version that it is said to rest on",
        "installed": "{tensor!r} of the model is not what was published as step {step}, though all "
        "that was read of it was: something else wrote it",
        "chunk": "one of the tensors from {tensor!r} to {last!r} of the model is not what was "
        "published as step {step}, though all that was read of it was: something else wrote it",
        "pieces": "{size} bytes from {begin} on, which are a tensor, do not lie together",
    }


class ModelDiffers(CorruptVersion):
    """The delta does not give the published tensor: the model is not as it was installed.

    Attributes:
        tensor: Name of the tensor.
        dtype: Dtype of the model's tensor, if no delta can be applied to it.
    """

    tensor: str = field(kw_only=True)
    fault: Literal["delta", "dtype"] = field(kw_only=True)
    dtype: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "delta": "{tensor!r} with its delta applied is not the published tensor",
        "dtype": "{tensor!r} is {dtype} in the model: no delta can be applied to it",
    }


class CorruptDelta(CorruptVersion):
    """Bytes are not a delta of the tensor.

    Attributes:
        fault: Part of the delta that is wrong.
        actual: Size, count or form in the delta.
        expected: Size of the blocks in bytes, or of one block in elements.
    """

    fault: Literal["table", "size", "changes", "form", "positions", "bits", "gaps"] = field(
        kw_only=True
    )
    actual: int = field(default=0, kw_only=True)
    expected: int = field(default=0, kw_only=True)
    texts: ClassVar = {
        "table": "a delta is shorter than the table of its blocks",
        "size": "a delta has {actual} bytes, its blocks {expected}",
        "changes": "a block of {expected} elements has {actual} changed ones",
        "form": "a block of a delta is of form {actual}, which is not known",
        "positions": "the positions of a delta are not those of its values",
        "bits": "a block of {expected} elements has {actual} bytes of bits",
        "gaps": "the gaps of a delta are more than its block has elements",
    }


class AbsentTensor(IncompatibleWeights):
    """A tensor is missing.

    Attributes:
        fault: ``model`` that lacks it, ``version`` that lacks one of the model's or one of the
            ``selection``, or ``folder`` that lacks it.
        folder: The folder.
    """

    fault: Literal["model", "version", "selection", "folder"] = field(kw_only=True)
    folder: Path | None = field(default=None, kw_only=True)
    texts: ClassVar = {
        "model": "the model has no {tensor!r}, which the version brings",
        "version": "the version has no {tensor!r}, which the model needs",
        "selection": "the version has no {tensor!r}, which is wanted",
        "folder": "{folder} has no tensor {tensor}: is its config.json the one of its weights?",
    }


class UnfitTensor(IncompatibleWeights):
    """A tensor of a version has another form than the model's.

    Attributes:
        fault: ``form`` (shape or dtype), ``dtype`` that can be converted, ``device``, or ``file``
            for the shape in a folder.
        in_model: Form or device of the model's tensor.
        in_version: That of the version's, or of the folder's.
        dtype: Dtype of the model's tensor, if the version's can be converted.
        folder: The folder.
    """

    fault: Literal["form", "dtype", "device", "file"] = field(kw_only=True)
    in_model: str = field(kw_only=True)
    in_version: str = field(kw_only=True)
    dtype: str = field(default="", kw_only=True)
    folder: Path | None = field(default=None, kw_only=True)
    texts: ClassVar = {
        "form": "{tensor!r} is {in_model} in the model, {in_version} in the version",
        "dtype": "{tensor!r} is {in_model} in the model, {in_version} in the version: publish it "
        "with dtype={dtype}, or take it with cast=True",
        "device": "{tensor!r} is on {in_model} in the model and on {in_version} in the version: it "
        "has to be copied",
        "file": "{folder}: {tensor} is {in_version}, the model's is {in_model}: is its config.json "
        "the one of these weights?",
    }


class UnfillableTensor(IncompatibleWeights):
    """A tensor of the model cannot be filled.

    Attributes:
        fault: What forbids it.
        other: Name of the tensor that it is tied to.
    """

    fault: Literal["meta", "freed", "spread", "wrapper", "overlap", "torn", "tied"] = field(
        kw_only=True
    )
    other: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "meta": "{tensor!r} has no memory in the model (meta device): materialize it first",
        "freed": "{tensor!r} has no memory in the model (it was freed): bring the model back first",
        "spread": "{tensor!r} is spread over ranks in the model (DTensor): fill a model of what "
        "this rank has of each, with these boxes wanted",
        "wrapper": "{tensor!r} wraps another tensor in the model: it has to be copied",
        "overlap": "{tensor!r} is in the memory of what the version brings, but lies otherwise in "
        "it: only a copy fills both",
        "torn": "{tensor!r} may hold some of a version that never became whole in this model, and "
        "is not brought: load or apply a full version first",
        "tied": "{tensor!r} and {other!r} are one tensor in the model and differ in the version: "
        "is the model tied, and the one that was trained is not?",
    }


class UnassembledTensor(IncompatibleWeights):
    """The pieces of a tensor in a version do not make up the selected slice.

    Attributes:
        fault: What forbids it.
        coverage: What its shards do not cover exactly once.
        forms: Dtypes and shapes in the version.
        selected: Shape and first index of the selected slice.
        shape: Shape in the version.
    """

    fault: Literal["twice", "forms", "selection", "coverage", "shards"] = field(kw_only=True)
    coverage: CoverageFault | None = field(default=None, kw_only=True)
    forms: list[tuple[str, tuple[int, ...]]] | None = field(default=None, kw_only=True)
    selected: tuple[list[int], list[int]] = field(default=([], []), kw_only=True)
    shape: list[int] | None = field(default=None, kw_only=True)
    texts: ClassVar = {
        "twice": "{tensor!r} comes twice in the version, whole once at least",
        "forms": "{tensor!r} is several things in the version: {forms}",
        "selection": "of {tensor!r} {selected[0]} from {selected[1]} is wanted, but it is {shape} "
        "in the version",
        "coverage": "the shards of {tensor!r} do not make it up: {coverage}",
        "shards": "{tensor!r} comes in shards: they have to be copied together",
    }


class UnsupportedWeights(IncompatibleWeights):
    """Weights are of a format or a dtype that is not supported.

    Attributes:
        fault: ``format`` of a state dict, ``dtype`` of a tensor, or one that cannot be ``saved``.
        step: Step of the state dict.
        dtype: The dtype.
    """

    fault: Literal["format", "dtype", "saved"] = field(kw_only=True)
    step: int = field(default=0, kw_only=True)
    dtype: str = field(default="", kw_only=True)
    texts: ClassVar = {
        "format": "the state dict of step {step} has no weights in Hugging Face's format",
        "dtype": "{tensor!r} is of dtype {dtype}, which is not supported",
        "saved": "{tensor} is of {dtype}, which cannot be saved",
    }


class PartClosed(StructuredError, ValueError):
    """A tensor is added to a part that was sealed or given up.

    Attributes:
        version: The part, with its step.
    """

    version: str
    text = "the {version} are sealed or given up: nothing can be added"


class FreedTensor(StructuredError, ValueError):
    """A tensor cannot be copied, since its memory was freed.

    Attributes:
        tensor: Name of the tensor, if known.
    """

    tensor: str = ""
    text = "{_tensor} has no memory (it was freed): bring the model back first"

    @property
    def _tensor(self) -> str:
        return repr(self.tensor) if self.tensor else "a tensor"


class UnpublishableName(StructuredError, ValueError):
    """A tensor's name or number of dimensions is outside the contract.

    Attributes:
        name: Name of the tensor.
        dimensions: Number of its dimensions.
        longest: Maximum characters of a name.
        most: Maximum dimensions.
    """

    name: str
    dimensions: int
    longest: int
    most: int
    text = (
        "{_shown!r} of {dimensions} dimensions cannot be published: a name has 1 to {longest} "
        "characters, and a tensor at most {most} dimensions"
    )

    @property
    def _shown(self) -> str:
        return self.name[:80]


class UnpublishableDtype(StructuredError, TypeError):
    """A dtype is outside the contract, or weights cannot be converted to it.

    Attributes:
        dtype: The dtype.
        fault: ``tensor`` for the dtype of one, ``chosen`` for that to publish in.
    """

    dtype: str
    fault: Literal["tensor", "chosen"]
    texts: ClassVar = {
        "tensor": "tensors of dtype {dtype} cannot be published",
        "chosen": "weights cannot be published as {dtype}: choose a floating-point dtype",
    }


class TransportRefused(StructuredError, ValueError):
    """A transport does not exist, or cannot be used in this way.

    Attributes:
        fault: ``name`` that does not exist, ``rank`` other than 0 in a group, or ``deltas``, which
            no transport over GPU memory sends.
        transport: Name of the transport.
        transports: Names of those that exist.
    """

    fault: Literal["name", "rank", "deltas"]
    transport: str
    transports: tuple[str, ...] = ()
    texts: ClassVar = {
        "name": "there is no transport {transport!r}: {_transports}",
        "rank": "only rank 0 is in the collective group: it sends the full weights",
        "deltas": "what changed is found on the host: {transport} sends full versions",
    }

    @property
    def _transports(self) -> str:
        return ", ".join(self.transports)
