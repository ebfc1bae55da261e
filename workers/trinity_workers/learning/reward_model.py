"""Reward models: their inputs, of their own tokens, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..algorithms.batch import NO_GROUP, Batch
from ..tasks import Message, Question
from .finite import check_finite_model
from .policy import encode_prompt, load_tokenizer
from .pretrained import HeadRefused, NoModel, check_pretrained, load_pretrained
from .value_head import checked_head, head_tensors
from .values import ValueModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a reward model.

    Raises:
        BadPolicy: in one sentence, if the folder holds no reward model.
    """
    if not (folder / "config.json").is_file():
        raise NoModel("reward model", folder, "rewards.reward_model")
    tokenizer = load_tokenizer(folder)
    checked_head(_config(folder), folder, required=True)
    return tokenizer


def load_reward_model(
    folder: Path, dtype: str = "float32"
) -> tuple[ValueModel, PreTrainedTokenizerBase]:
    """Load a model for sequence or token classification with one output, and its tokenizer.

    Raises:
        BadPolicy: in one sentence, if the folder does not hold them.
        NonFiniteWeights: if parameters have values that are not finite.
    """
    tokenizer, config = reward_tokenizer(folder), _config(folder)
    model = load_pretrained(_model_class(config), folder, getattr(torch, dtype))
    check_finite_model(model, str(folder))
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise HeadRefused(folder, "score")
    return ValueModel(model.base_model, config, model.score, model._no_split_modules), tokenizer


def check_reward_model(folder: Path) -> None:
    """Check that a folder has a tokenizer and every tensor of a reward model, without loading it.

    Raises:
        BadPolicy: as :func:`load_reward_model`.
    """
    reward_tokenizer(folder)
    check_pretrained(_model_class(_config(folder)), folder)


def _model_class(config: Any) -> Any:
    """Return the class of transformers that has the head of this configuration."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    has_bias = "score.bias" in head_tensors(config)
    return AutoModelForTokenClassification if has_bias else AutoModelForSequenceClassification


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class RewardModel(NamedTuple):
    """Reward model of a training step: a sharded module or an engine, and its inputs."""

    model: Any
    tokens: RewardTokens


class RewardTokens:
    """Translation of episodes of a policy into the tokens of a reward model.

    Where both have the same tokens, episodes stay as they are. Else their text is tokenised anew:
    by the reward model's chat template as question and answer, or as plain text if it has none.

    Args:
        policy: Tokenizer of the policy.
        reward_model: Tokenizer of the reward model.
        questions: Returns the question of an ordinal. Its messages go through the chat template if
            they are a row's prompt; else the text of the prompt does, as one message of the user.
        template_kwargs: Further arguments of the policy's chat template.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        reward_model: PreTrainedTokenizerBase,
        questions: Callable[[int], Question] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy = policy
        self._template_kwargs = template_kwargs
        self._own = reward_model
        self._questions = questions
        self._same = policy.get_vocab() == reward_model.get_vocab()

    def inputs(self, batch: Batch) -> Batch:
        """Return the rows as the reward model reads them, with padding on the right.

        Args:
            batch: Episodes in the policy's tokens, whose groups are the ordinals of questions.

        Raises:
            BadPolicy: if the chat template refuses an episode.
        """
        rows = []
        for row in range(len(batch)):
            real = batch.attention_mask[row].bool()
            prompt = batch.input_ids[row][: batch.prompt_width][real[: batch.prompt_width]].tolist()
            answer = batch.input_ids[row][batch.prompt_width :][real[batch.prompt_width :]].tolist()
            if self._same:
                rows.append([*prompt, *answer])
            else:
                rows.append(self._anew(prompt, answer, int(batch.groups[row])))
        return right_padded(rows, int(self._own.pad_token_id or 0)).to(batch.input_ids.device)

    def _anew(self, prompt: list[int], answer: list[int], ordinal: int) -> list[int]:
        """Return an episode in the reward model's tokens."""
        if not self._own.chat_template:
            text = self._decode(prompt) + self._decode(answer)
            return encode_prompt(self._own, text, answered=True)
        reply: Message = {"role": "assistant", "content": self._decode(answer)}
        return encode_prompt(self._own, [*self._messages(prompt, ordinal), reply], answered=True)

    def _messages(self, prompt: list[int], ordinal: int) -> list[Message]:
        """Return the messages before the answer."""
        if self._questions is not None and ordinal != NO_GROUP:
            question = self._questions(ordinal)
            encoded = encode_prompt(
                self._policy, question.prompt, template_kwargs=self._template_kwargs
            )
            # The question's own messages only if they are the prompt that the policy answered.
            if encoded == prompt:
                return question.messages()
        return [{"role": "user", "content": self._decode(prompt)}]

    def _decode(self, tokens: list[int]) -> str:
        text: Any = self._policy.decode(tokens, skip_special_tokens=True)
        return str(text)


def right_padded(rows: Sequence[Sequence[int]], padding: int) -> Batch:
    """Return rows of tokens as a batch whose last column stands for the response."""
    # A batch has at least one column of response, and one before it.
    width = max(2, *(len(row) for row in rows))
    tokens = torch.full((len(rows), width), padding)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return Batch(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=torch.arange(width).expand_as(tokens) * mask,  # (rows, width), 0 on padding
        response_mask=mask[:, -1:].bool(),
        groups=torch.arange(len(rows)),
        rewards=torch.zeros(len(rows)),
        finished=torch.ones(len(rows), dtype=torch.bool),
    )
