"""Digests of device memory, computed on the device: no byte is copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

ALGORITHM = "mix128"
"""Name that begins a digest of device memory; digests of host memory have another one."""
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as a signed number
_MIX = -49064778989728563, -4265267296055464877  # factors of MurmurHash3
_LOW = {32: (1 << 32) - 1, 29: (1 << 35) - 1}
_WORD = (1 << 64) - 1


def digest_all(chunks: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of each chunk, with one wait for the device.

    Each word of 8 bytes is combined with its index, and mixed by a bijection like the finalizer of
    MurmurHash3 (https://github.com/aappleby/smhasher). The plain sum, and the sum weighted by odd
    numbers, make 128 bits. A change of one word is always detected, other accidents with high
    probability. Like XXH3, the digest is not cryptographic. Integer arithmetic is the same on every
    device, so that a CPU can check a digest of a GPU.

    Args:
        chunks: uint8 [bytes], row-major, all on one device.
    """
    sums = [_sums(chunk) for chunk in chunks]
    if not sums:
        return []
    totals = torch.stack(sums).tolist()  # (chunks, 2); the one wait for the device
    return [
        # The length counts: padding with zeros must not equal bytes that are zero.
        f"{ALGORITHM}:{plain + len(chunk) & _WORD:016x}{weighted & _WORD:016x}"
        for chunk, (plain, weighted) in zip(chunks, totals, strict=True)
    ]


def _sums(chunk: torch.Tensor) -> torch.Tensor:
    words = _words(chunk)
    # Rounded up to a power of two: chunks of many sizes share few tensors of keys.
    keys = _keys(chunk.device, 1 << max(len(words) - 1, 0).bit_length())[: len(words)]
    mixed = torch.bitwise_xor(words, keys)  # int64 (words,)
    for factor, shift in zip(_MIX, (32, 29), strict=True):
        mixed.mul_(factor)
        # The shift of signed words copies the sign bit.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_(_LOW[shift]))
    return torch.stack((mixed.sum(), mixed.mul_(keys).sum()))  # int64 (2,), modulo 2**64


def _words(chunk: torch.Tensor) -> torch.Tensor:
    if len(chunk) % 8:
        padded = chunk.new_zeros(len(chunk) + -len(chunk) % 8)
        padded[: len(chunk)] = chunk
        chunk = padded
    elif chunk.data_ptr() % 8 or chunk.storage_offset() % 8:
        # view() as a wider dtype needs an aligned address.
        chunk = chunk.clone()
    return chunk.view(torch.int64) if len(chunk) else chunk.new_empty(0, dtype=torch.int64)


@lru_cache(maxsize=8)
def _keys(device: torch.device, count: int) -> torch.Tensor:
    """Return a distinct odd number for each index, int64 [count]."""
    with torch.inference_mode(False):
        made = torch.arange(1, count + 1, device=device).mul_(_ODD).bitwise_or_(1)
    if made.is_cuda:  # another thread, which shares the cache, may compute on another stream
        torch.cuda.current_stream(device).synchronize()
    return made
