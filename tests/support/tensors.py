"""Comparing tensors: values alone say too little."""

from __future__ import annotations

import torch


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in order; one without elements as it is."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def identical(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for the same dtype, the same shape and the same bits.

    torch.equal compares values, and calls tensors of two dtypes equal.
    """
    return (
        first.dtype == other.dtype
        and first.shape == other.shape
        and torch.equal(bits(first), bits(other))  # noqa: TID251
    )


def assert_equal(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(first) == list(other)
    for name, tensor in first.items():
        assert identical(tensor, other[name]), name
