"""Policies: any causal language model in a Hugging Face folder, and the built-in one.

The built-in one is a Qwen2 of 129,728 parameters with a tokenizer of one token a character. It is
an ordinary `transformers` model, so that everything that carries its weights (FSDP, checkpoints,
the Synchronizer) meets the names, tied embeddings and grouped key-value heads of a real one.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ..storage.huggingface_files import add_older_names
from ..tasks import Message
from .pretrained import BadPolicy as BadPolicy  # noqa: PLC0414 - users import it from here
from .pretrained import (
    FilesUnreadable,
    NoChatTemplate,
    NoModel,
    TokenizerRefused,
    check_pretrained,
    load_pretrained,
    no_progress_bars,
    raising_bad_policy,
    tensor_shapes,
)

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )


PAD = "<pad>"
END = "<eos>"
UNKNOWN = "<unk>"

# Every character of the tasks' prompts and answers is a token of its own.
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "

_MAX_POSITIONS = 128
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files of tokenizers that transformers converts to a ``tokenizer.json``."""


@contextmanager
def isolated_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators for the block, then put them back as they were.

    That is the CPU's, and the one of `device` where it is a CUDA device. For code that draws from
    the global generator and takes no other: weight initialisation, Hugging Face `generate`. There
    is one for the whole process, so only one thread at a time may be in such a block.
    """
    import torch  # loaded here, since prompts are encoded without it

    cuda = device is not None and device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
        # Not torch.manual_seed: it also seeds the CUDA devices that fork_rng does not put back.
        torch.default_generator.manual_seed(seed)
        if cuda:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.manual_seed(seed)
        yield


def create_policy(folder: Path, seed: int, **shape: int) -> None:
    """Write a random policy and its tokenizer into `folder`: the same weights for the same seed.

    Args:
        folder: Folder that is made.
        seed: Seed of the weights.
        shape: Settings of Qwen2's configuration in the place of the built-in ones.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_built_in_tokenizer()
    small: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": _MAX_POSITIONS,
    }
    config = Qwen2Config(
        tie_word_embeddings=True,
        # At this width the usual 0.02 leaves the logits nearly flat and the warm-up slow to begin.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **{**small, **shape},
    )
    with isolated_rng(seed):
        model = Qwen2ForCausalLM(config)
    save_policy(model, folder)
    tokenizer.save_pretrained(folder)


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's weights and configuration into `folder`, whose tokenizer stays as it is."""
    with no_progress_bars():
        model.save_pretrained(folder)
    add_older_names(folder)


def load_policy(
    folder: Path, dtype: str = "float32", *, without_head: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (on the CPU, for evaluation) and tokenizer; the hub is never asked.

    Args:
        folder: Hugging Face folder of any causal language model.
        dtype: Data type of the parameters, `float32` or `bfloat16`.
        without_head: Accept a folder without the output head, because the caller replaces it.

    Raises:
        BadPolicy: in one sentence, if the folder does not hold them, every tensor included.
        NonFiniteWeights: if parameters have values that are not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .finite import check_finite_model

    tokenizer = load_tokenizer(folder)
    model: PreTrainedModel = load_pretrained(
        AutoModelForCausalLM, folder, getattr(torch, dtype), without_head=without_head
    )
    check_finite_model(model, str(folder))
    table: Any = model.get_input_embeddings()
    vocabulary_size = int(table.weight.shape[0])
    if len(tokenizer) > vocabulary_size:
        raise TokenizerRefused(folder, "size", len(tokenizer), vocabulary_size)
    return model, tokenizer


def check_policy(folder: Path) -> None:
    """Check that a folder has a tokenizer and every tensor of a policy, without loading these.

    Raises:
        BadPolicy: as :func:`load_policy`.
    """
    from transformers import AutoModelForCausalLM

    load_tokenizer(folder)
    check_pretrained(AutoModelForCausalLM, folder)


def check_policy_files(folder: Path) -> None:
    """Check what can be said of a policy's folder without torch, whose import takes seconds.

    The files are there, whole and readable, and the tokenizer loads and ends sequences. The ranks
    compare the tensors with the model when they load it; :func:`check_policy` does so without them.

    Raises:
        BadPolicy: in one sentence, if a file is missing or damaged.
    """
    _require_config(folder)
    with raising_bad_policy(f"config.json in {folder} cannot be read"):
        if "model_type" not in json.loads((folder / "config.json").read_bytes()):
            raise ValueError("it has no model_type")
    with raising_bad_policy(f"the tokenizer in {folder} cannot be loaded"):
        if (folder / "tokenizer.json").is_file():
            Tokenizer.from_file(str(folder / "tokenizer.json"))
            names = ("tokenizer_config.json", "special_tokens_map.json")
            files = [folder / name for name in names if (folder / name).is_file()]
            # Without an end of sequence no answer ends before its limit of tokens.
            if not any(json.loads(file.read_bytes()).get("eos_token") for file in files):
                raise TokenizerRefused(folder, "end")
        elif not any((folder / name).is_file() for name in _VOCABULARIES):
            raise FileNotFoundError(f"it has none of tokenizer.json, {', '.join(_VOCABULARIES)}")
    with raising_bad_policy(f"the model in {folder} cannot be loaded"):
        if any(folder.glob("*.safetensors*")):
            tensor_shapes(folder)
        elif not any(folder.glob("*.bin*")):
            raise FileNotFoundError("it has neither *.safetensors nor *.bin")


def context_length(folder: Path) -> int | None:
    """Return the maximum tokens of an episode of a policy; None if its configuration names none."""
    from transformers import AutoConfig

    with raising_bad_policy(f"config.json in {folder} cannot be read"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Models of text and images have the positions in a configuration below their own.
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy. One without a padding token pads with its end of sequence.

    Raises BadPolicy if there is none, or if a file of the folder cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    _require_config(folder)
    with raising_bad_policy(f"the tokenizer in {folder} cannot be loaded"):
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # The file as it is: AutoTokenizer takes the class of the model's type, with its own rules
        # of splitting (a Qwen2's tokenizer of single characters loses its spaces).
        whole = (folder / "tokenizer.json").is_file()
        kind: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise TokenizerRefused(folder, "end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_tokens(
    defaults: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, and those of the model's defaults."""
    ends = getattr(defaults, "eos_token_id", None)
    more = ends if isinstance(ends, list) else [ends]
    return frozenset(int(token) for token in (tokenizer.eos_token_id, *more) if token is not None)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[Message],
    *,
    answered: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return a prompt's token ids: text as it is, chat messages by the chat template.

    Text gets what its tokenizer puts before a text, such as a beginning of sequence, once. It gets
    nothing after it: a policy that reads an end of sequence begins another text.

    Pass ``answered`` if the last message is the answer, so that no other one is begun, or if text
    has its answer, so that its tokenizer may end it. ``template_kwargs`` are further arguments of
    the chat template.

    Raises BadPolicy if the tokenizer has no template, or the template refuses the messages.
    """
    tokens: list[int]
    if isinstance(prompt, str):
        return _encode_text(tokenizer, prompt, ended=answered)
    if not tokenizer.chat_template:
        raise NoChatTemplate()
    with raising_bad_policy("the chat template refuses a prompt"):
        template: Any = tokenizer.apply_chat_template
        tokens = template(
            prompt,
            add_generation_prompt=not answered,
            tokenize=True,
            return_dict=False,
            **(template_kwargs or {}),
        )
    return tokens


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, ended: bool) -> list[int]:
    """Return the tokens of a text, between those that its tokenizer adds and the text lacks."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    whole: list[int] = tokenizer.encode(text)
    # Special tokens before and after a text are known only by comparing both encodings: a
    # post-processor may add them, whatever bos_token says.
    places = range(len(whole) - len(tokens) + 1)
    begin = next((at for at in places if whole[at : at + len(tokens)] == tokens), None)
    if begin is None:  # such as a tokenizer that splits a text in another way at its begin
        before = whole[:1] if whole[:1] == [tokenizer.bos_token_id] else []
        after = whole[-1:] if whole[-1:] == [tokenizer.eos_token_id] else []
    else:
        before, after = whole[:begin], whole[begin + len(tokens) :]
    if tokens[: len(before)] == before:
        before = []
    if not ended or (after and tokens[-len(after) :] == after):
        after = []
    return [*before, *tokens, *after]


def _require_config(folder: Path) -> None:
    _require_readable(folder)
    if not (folder / "config.json").is_file():
        # transformers would take a missing folder for the name of a repository on the hub.
        raise NoModel("policy", folder, "model.path")


def _require_readable(folder: Path) -> None:
    # transformers calls weights of another user, which are written for that user alone, missing.
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            # Opened, not only looked up: an access list or a mount may forbid what the mode allows.
            for file in folder.iterdir():
                if file.is_file():
                    file.open("rb").close()
    except PermissionError as error:
        raise FilesUnreadable(os.geteuid(), Path(error.filename), folder) from error


def make_built_in_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the built-in policy."""
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, END, UNKNOWN, *_CHARACTERS]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without a decoder tokens are joined by spaces.
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
    )
    return tokenizer
