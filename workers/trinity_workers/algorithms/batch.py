"""One container for prompts, responses, log-probabilities, values, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional

from .errors import FieldMissing

NO_GROUP = -1
"""Group of a padding row."""


class Layout(NamedTuple):
    """Shape and kind of dtype of a field."""

    shape: str
    kind: str


ROW, RESPONSE, SEQUENCE = "[B]", "[B, R]", "[B, P + R]"
RowIds = Annotated[Tensor, Layout(ROW, "int64")]
RowFlags = Annotated[Tensor, Layout(ROW, "bool")]
RowValues = Annotated[Tensor, Layout(ROW, "floating")]
ResponseFlags = Annotated[Tensor, Layout(RESPONSE, "bool")]
ResponseValues = Annotated[Tensor, Layout(RESPONSE, "floating")]
SequenceIds = Annotated[Tensor, Layout(SEQUENCE, "int64")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B episodes: P columns of prompt, padded on the left, and R of response, on the right.

    Shapes and dtypes are checked. Log-probabilities are natural, and 0 where there is no token.
    Fields that are None are not known (yet).
    """

    input_ids: SequenceIds
    """[B, P + R] int64. Tokens of prompt and response."""
    attention_mask: SequenceIds
    """[B, P + R] int64. 1 on tokens, 0 on padding."""
    position_ids: SequenceIds
    """[B, P + R] int64. 0 at a row's first token, and on the padding before it."""
    response_mask: ResponseFlags
    """[B, R] bool. True on tokens that are trained on: the policy's own, not the environment's."""
    groups: RowIds
    """[B] int64. Group of the row: answers to one prompt share it. -1 on padding rows."""
    rewards: RowValues
    """[B] float32. Reward of the whole episode."""
    finished: RowFlags
    """[B] bool. False if the response met its limit of tokens."""
    behaviour_logprobs: ResponseValues | None = None
    """[B, R] float32. Of each token under the policy that sampled it, as its engine computed it."""
    proximal_logprobs: ResponseValues | None = None
    """[B, R] float32. Of each token under the trainer's policy before the step's first update."""
    reference_logprobs: ResponseValues | None = None
    """[B, R] float32. Of each token under the reference of the KL penalty."""
    teacher_logprobs: ResponseValues | None = None
    """[B, R] float32. Of each token under the teacher of a distillation."""
    logprobs: ResponseValues | None = None
    """[B, R] float32. Of each token under the current policy."""
    values: ResponseValues | None = None
    """[B, R] float32. The critic's value before each token, before the step's first update."""
    token_rewards: ResponseValues | None = None
    """[B, R] float32. Rewards of single tokens, which advantages are estimated from."""
    advantages: ResponseValues | None = None
    """[B, R] float32. Advantage of each token, 0 where none is trained on."""
    returns: ResponseValues | None = None
    """[B, R] float32. Target of the critic at each token."""

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or self.response_mask.ndim != 2:
            raise ValueError("input_ids and response_mask of a batch must have two dimensions")
        rows, width = self.input_ids.shape
        sizes = {ROW: (rows,), SEQUENCE: (rows, width), RESPONSE: (rows, self.response_width)}
        if self.response_width > width:
            raise ValueError(f"{self.response_width} response columns do not fit into {width}")
        for name, tensor in self.known().items():
            shape, kind = layouts()[name]
            if tuple(tensor.shape) != sizes[shape]:
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, but must be {shape}, which is "
                    f"{list(sizes[shape])} in this batch"
                )
            if _kind(tensor) != kind:
                raise ValueError(f"{name} is {tensor.dtype}, but must be {kind}")

    def __len__(self) -> int:
        """B, the number of rows."""
        return self.input_ids.shape[0]

    @property
    def prompt_width(self) -> int:
        """P, the columns of prompts."""
        return self.input_ids.shape[1] - self.response_width

    @property
    def response_width(self) -> int:
        """R, the columns of responses."""
        return self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """Tokens of the responses: [B, R] int64."""
        return self.input_ids[:, self.prompt_width :]

    @property
    def token_count(self) -> int:
        """Tokens that are trained on."""
        return int(self.response_mask.sum())

    def need(self, name: str, purpose: str) -> Tensor:
        """Return the field. Raises AlgorithmError if it is not known, with its purpose."""
        tensor = getattr(self, name)
        if tensor is None:
            raise FieldMissing(purpose, name)
        assert isinstance(tensor, Tensor)
        return tensor

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """Return the rows of these indices, in their order; a mask [B] bool selects where true."""
        index = torch.as_tensor(rows, device=self.input_ids.device)
        # An empty list becomes a float tensor, by which nothing can be indexed.
        if index.dtype != torch.bool:
            index = index.long()
        return self._mapped(lambda tensor: tensor[index])

    def reorder(self, order: Sequence[int] | Tensor) -> Batch:
        """Return all rows in another order. Raises ValueError if it is no permutation of them."""
        if sorted(torch.as_tensor(order).tolist()) != list(range(len(self))):
            raise ValueError(f"a batch of {len(self)} rows is ordered by each row's index once")
        return self.select(order)

    def rows(self, start: int, stop: int) -> Batch:
        """Return rows start to stop, as views."""
        return self._mapped(lambda tensor: tensor[start:stop])

    def split(self, size: int | Sequence[int]) -> list[Batch]:
        """Return consecutive parts, as views: of at most ``size`` rows, or of these sizes.

        Advantages stay those of the whole batch: estimate them before groups are divided.
        """
        count = len(self)
        if isinstance(size, int):
            if size < 1:
                raise ValueError(f"a part of a batch has at least one row, not {size}")
            size = [min(size, count - start) for start in range(0, count, size)]
        if sum(size) != count or min(size, default=0) < 0:
            raise ValueError(f"parts of {list(size)} rows do not make up {count}")
        parts, start = [], 0
        for length in size:
            parts.append(self.rows(start, start + length))
            start += length
        return parts

    def equal_parts(self, count: int) -> list[Batch]:
        """Return this number of parts with equally many rows; padding rows fill the last ones."""
        whole = self.padded(count)
        return whole.split(len(whole) // count)

    def padded(self, multiple: int) -> Batch:
        """Return the batch with padding rows at its end, so that a multiple of rows is there.

        A padding row has one token that is attended to, and none that is trained on. Its group is
        -1, so it is part of no sum, mean or count.
        """
        if multiple < 1:
            raise ValueError(f"a batch is padded to a multiple of at least 1, not {multiple}")
        if not len(self):
            raise ValueError("a batch without rows cannot be padded")
        missing = -len(self) % multiple
        return concatenate([self, self.padding_rows(missing)]) if missing else self

    def padding_rows(self, rows: int) -> Batch:
        """Return padding rows of this batch's width; see :meth:`padded`."""
        blank = self.select([len(self) - 1] * rows)._mapped(torch.zeros_like)
        blank.groups.fill_(NO_GROUP)
        blank.finished.fill_(True)
        # A row without any attention gives NaN in some attention kernels, and NaN times 0 is NaN.
        blank.attention_mask[:, max(self.prompt_width - 1, 0)] = 1
        return blank

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return self._mapped(lambda tensor: tensor.to(device))

    def widened(self, prompt: int, response: int) -> Batch:
        """Return the batch with more columns of padding, up to these widths."""
        before, after = prompt - self.prompt_width, response - self.response_width
        if before < 0 or after < 0:
            raise ValueError(
                f"a batch of {self.prompt_width} + {self.response_width} columns has no room in "
                f"{prompt} + {response}"
            )
        return self._with_margins(before, after)

    def narrowed(self, prompt: int, response: int) -> Batch:
        """Return the batch with fewer columns, and those left out must be padding."""
        before, after = prompt - self.prompt_width, response - self.response_width
        if before > 0 or after > 0:
            raise ValueError(
                f"a batch of {self.prompt_width} + {self.response_width} columns has less than "
                f"{prompt} + {response}"
            )
        return self._with_margins(before, after)

    def _with_margins(self, before: int, after: int) -> Batch:
        """Return the batch with more columns before and after; with fewer if negative."""
        added = {SEQUENCE: (before, after), RESPONSE: (0, after)}

        def other(name: str, tensor: Tensor) -> Tensor:
            amount = added.get(layouts()[name].shape, (0, 0))
            # A negative amount crops: the same call widens and narrows.
            return functional.pad(tensor, amount) if any(amount) else tensor

        return Batch(**{name: other(name, tensor) for name, tensor in self.known().items()})

    def known(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{name: function(tensor) for name, tensor in self.known().items()})


@cache
def layouts() -> dict[str, Layout]:
    """Return the layout of each field of a batch, by name."""
    hints = get_type_hints(Batch, include_extras=True)
    # An optional field is a union of the annotated type and None.
    annotated = {name: (*get_args(hints[name]), hints[name]) for name in Batch.__slots__}
    return {
        name: next(hint.__metadata__[0] for hint in types if hasattr(hint, "__metadata__"))
        for name, types in annotated.items()
    }


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, in order, as wide as the widest.

    Raises ValueError if they do not know the same fields.
    """
    if not batches:
        raise ValueError("no batches to concatenate")
    field_names = [batch.known().keys() for batch in batches]
    # A missing field is no field of zeros: 0 is the log-probability of a certain token.
    differing = {name for names in field_names for name in names ^ field_names[0]}
    if differing:
        raise ValueError(f"only some of the batches have {', '.join(sorted(differing))}")
    prompt = max(batch.prompt_width for batch in batches)
    response = max(batch.response_width for batch in batches)
    parts = [batch.widened(prompt, response).known() for batch in batches]
    return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [B] at each row's last token that is trained on: [B, R], 0 elsewhere."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    # Column 0 for a row without tokens, where the mask of the next line leaves nothing.
    last = (columns * mask).amax(dim=-1, keepdim=True) if mask.shape[1] else mask.long()
    return values[:, None] * (mask & (columns == last))


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "floating"
    return str(tensor.dtype).removeprefix("torch.")
