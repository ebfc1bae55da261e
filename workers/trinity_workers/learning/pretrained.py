"""Loading of Hugging Face models, without values that come from nowhere.

1. Every tensor of a loaded model is read from its folder, or shares the memory of one that is. A
   head that the caller replaces is the exception.
2. A folder that lacks a tensor, or has one of another shape, is refused by the tensor's name. The
   folder's headers are enough to find that out: ``train --check`` does, and a run's ranks do when
   they load the folder.
3. The configuration says that the output head is the embedding only where it is.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trinity_events.errors import TrinityError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ATTENTION = "sdpa"
"""Attention of torch: the one that packs samples, and runs on any device."""
_LOADING = threading.Lock()
"""Held while transformers loads a model: see :func:`_loading_alone`."""
_LISTED = 3
"""Names in a warning: a folder of another model may have thousands that nothing reads."""


class BadPolicy(TrinityError):
    """A folder holds no policy that can be used."""


class PolicyUnreadable(BadPolicy):
    """transformers cannot read a folder, or its template refuses a prompt.

    Attributes:
        what: Clause that says what failed.
        reason: First line of the error.
    """

    what: str
    reason: str
    text = "{what}: {reason}"


class NoModel(BadPolicy):
    """A folder has no configuration of a model.

    Attributes:
        model: Model that the run takes from it.
        folder: The folder.
        setting: Setting that names it.
    """

    model: str
    folder: Path
    setting: str
    text = "no {model} in {folder}: config.json is missing: set {setting} to a Hugging Face folder"


class FilesUnreadable(BadPolicy):
    """A file of a policy is another user's.

    Attributes:
        user: Id of this user.
        path: The file.
        folder: Folder of the policy.
    """

    user: int
    path: Path
    folder: Path
    text = "user {user} cannot read {path}: its owner allows it by chmod -R a+rX {folder}"


class TokenizerRefused(BadPolicy):
    """The tokenizer of a folder is not one of the policy.

    Attributes:
        folder: The folder.
        fault: ``size`` if it has more tokens than the model, ``end`` without an end of sequence,
            ``teacher`` if a teacher's has other tokens than the policy's.
        tokens: Number of its tokens.
        vocabulary: Number of tokens that the model knows.
    """

    folder: Path
    fault: Literal["size", "end", "teacher"]
    tokens: int = 0
    vocabulary: int = 0
    texts: ClassVar = {
        "size": "the tokenizer in {folder} has {tokens} tokens, and its model knows {vocabulary}: "
        "they are not of one model",
        "end": "the tokenizer in {folder} has no end of sequence (eos_token): set it in "
        "tokenizer_config.json",
        "teacher": "the teacher in {folder} has other tokens than the policy, whose samples it is "
        "to judge: set algorithm.teacher.path to a model with the policy's tokenizer",
    }


class HeadRefused(BadPolicy):
    """A model has no head of rewards or values, or another one.

    Attributes:
        folder: Its folder.
        fault: ``score`` if it is none of transformers' classifiers, ``outputs`` if it has several,
            ``none`` without a head.
        outputs: Outputs that it gives a token.
    """

    folder: Path
    fault: Literal["score", "outputs", "none"]
    outputs: int = 0
    texts: ClassVar = {
        "score": "the reward model in {folder} has no linear head called score, as transformers' "
        "classifiers of causal language models have: take one of those",
        "outputs": "the model in {folder} gives {outputs} outputs a token, and a critic or a "
        "reward model gives one: take a model with num_labels 1",
        "none": "the model in {folder} has no head of rewards: take a Hugging Face folder of a "
        "model for sequence or token classification",
    }


class AdapterTargetRefused(BadPolicy):
    """A layer that is to take adapters is none that can.

    Attributes:
        folder: Folder of the model.
        layer: Name of the layer.
        fault: ``absent``, or ``no linear layer`` below the output head.
    """

    folder: Path
    layer: str
    fault: Literal["absent", "no linear layer"]
    texts: ClassVar = {
        "absent": "the model in {folder} has no linear layer {layer}: name others in "
        "model.lora.target_modules",
        "no linear layer": "{layer} of the model in {folder} is no linear layer below the output "
        "head, and only those take adapters: leave it out of model.lora.target_modules",
    }


class FusedLossRefused(BadPolicy):
    """A model computes its logits otherwise than the fused loss does.

    Attributes:
        fault: ``head`` if it has no linear one, ``logits`` if it changes them after its head.
        head: Class of its head.
    """

    fault: Literal["head", "logits"]
    head: str = ""
    texts: ClassVar = {
        "head": "the model has no linear head but {head}: set trainer.fused_loss false",
        "logits": "the model changes logits after its head: set trainer.fused_loss false",
    }


class NoChatTemplate(BadPolicy):
    """A prompt has chat messages, and the tokenizer has no template for them."""

    text = (
        "a prompt has chat messages, and the model's tokenizer has no chat template: ask questions "
        "of text, or add chat_template.jinja to the model's folder"
    )


class ReplyRefused(BadPolicy):
    """The chat template refuses the reply of an environment.

    Attributes:
        role: Role of the reply; None if the template leaves out the turn before it.
        reason: Error of the template.
    """

    role: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.role is None:
            return "the chat template leaves out the policy's turn before a reply"
        return (
            f"the chat template refuses a reply of the role {self.role!r}: {self.reason}; let the "
            "environment return a message with a role that the template knows"
        )


class MissingTensors(BadPolicy):
    """A folder lacks tensors of the model that its configuration describes.

    Attributes:
        path: The folder.
        names: Names of the tensors.
    """

    path: Path
    names: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} other tensors" if len(self.names) > 1 else ""
        return (
            f"the model in {self.path} lacks {self.names[0]}{more}, which its config.json asks "
            "for: copy the whole folder again, or correct config.json"
        )


class MismatchedTensor(BadPolicy):
    """A tensor of a folder has another shape than its configuration describes.

    Attributes:
        path: The folder.
        name: Name of the tensor.
        shape: Its shape in the folder.
        expected: Its shape in the model.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    text = (
        "the model in {path} has {name} of the shape {shape}, and its config.json asks for "
        "{expected}: take config.json and weights of one model"
    )


def load_pretrained(
    kind: Any, folder: Path, dtype: torch.dtype, *, without_head: bool = False
) -> Any:
    """Load a model (on the CPU, for evaluation) of a class of transformers; the hub is never asked.

    Args:
        kind: Class of transformers with ``from_pretrained``.
        folder: Hugging Face folder.
        dtype: Data type of the parameters.
        without_head: Accept a folder without the output head, because the caller replaces it.

    Raises:
        BadPolicy: in one sentence, if the folder does not hold the model.
    """
    with raising_bad_policy(f"the model in {folder} cannot be loaded"), _loading_alone():
        model, report = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    _check_report(folder, model, report, without_head=without_head)
    # A warning, not an error: a policy's folder may hold a further head that nothing reads.
    unused = sorted(report["unexpected_keys"])
    if unused:
        names = ", ".join(unused[:_LISTED]) + ", ..." * (len(unused) > _LISTED)
        logger.warning(
            "the model in %s does not use %d of the tensors in its files: %s",
            folder,
            len(unused),
            names,
        )
    _set_tie(model)
    return model


def check_pretrained(kind: Any, folder: Path, *, without_head: bool = False) -> None:
    """Check that a folder has the tensors of its model, by the headers of its files.

    transformers computes which tensors it would miss, from tensors without values. It needs
    accelerate for that. Without accelerate, for quantised models and for folders without
    safetensors files, nothing is checked before the model is loaded.

    Raises as :func:`load_pretrained`.
    """
    import torch
    from transformers import AutoConfig

    if find_spec("accelerate") is None or not any(folder.glob("*.safetensors")):
        return
    with raising_bad_policy(f"the model in {folder} cannot be loaded"), _loading_alone():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            return  # its tensors are made by a kernel, which may need the ranks' device
        shapes = tensor_shapes(folder)
        with torch.device("meta"):
            outline = kind.from_config(
                config, attn_implementation=_ATTENTION, trust_remote_code=False
            )
        concrete: Any = type(outline)
        model, report = concrete.from_pretrained(
            None,
            config=config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    _check_report(folder, model, report, without_head=without_head)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the files that transformers would read, by name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {
            # The bare name: an index must not lead out of its folder.
            folder / Path(file).name
            for file in json.loads(index.read_bytes())["weight_map"].values()
        }
    elif (folder / "model.safetensors").is_file():
        files = {folder / "model.safetensors"}
    else:
        files = {*folder.glob("*.safetensors")}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dictionary
    return shapes


def _check_report(folder: Path, model: Any, report: Any, *, without_head: bool) -> None:
    """Raise BadPolicy for tensors that transformers would fill with random values."""
    missing, mismatched = set(report["missing_keys"]), sorted(report["mismatched_keys"])
    if without_head:
        replaced = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
        missing -= {name for name, value in model.named_parameters() if id(value) in replaced}
    if missing:
        raise MissingTensors(folder, tuple(sorted(missing)))
    if mismatched:
        name, shape, expected = mismatched[0]
        raise MismatchedTensor(folder, name, tuple(shape), tuple(expected))


def _set_tie(model: Any) -> None:
    """Correct a configuration that says tied of a model whose head differs from the embedding.

    transformers loads such a folder without the tie, and leaves the configuration as it is. What
    is made from the configuration later, such as an export, would lose the head.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings()
    if head is None or table is None or head.weight is table.weight:
        return
    configs = (model.config, model.config.get_text_config())
    for config in {id(config): config for config in configs}.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


@contextmanager
def raising_bad_policy(what: str) -> Iterator[None]:
    """Raise the errors of transformers in a block as BadPolicy, by their first line."""
    try:
        yield
    except BadPolicy:
        raise
    # transformers, safetensors and jinja2 raise classes without a common base.
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PolicyUnreadable(what, text) from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from printing progress bars in a block."""
    from transformers.utils import logging as bars

    # They take milliseconds here, and would be printed into the log of every worker.
    untyped: Any = bars  # its functions have no annotations
    shown = untyped.is_progress_bar_enabled()
    untyped.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            untyped.enable_progress_bar()


@contextmanager
def _loading_alone() -> Iterator[None]:
    """Load in one thread at a time, without progress bars and what is raised here as one sentence.

    ``from_pretrained`` replaces ``PreTrainedModel.tie_weights`` while it makes a model
    (``transformers.initialization.no_tie_weights``), in the whole process. A second thread saves
    the replacement as the original, and so puts it back for good: from then on the heads of tied
    models count as missing.
    """
    source = logging.getLogger("transformers.modeling_utils")
    with _LOADING:
        source.addFilter(_is_wanted)
        try:
            with no_progress_bars():
                yield
        finally:
            source.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return False for transformers' table of missing and unused tensors, and for its tie."""
    text = record.getMessage()
    return "LOAD REPORT" not in text and "we will NOT tie them" not in text
