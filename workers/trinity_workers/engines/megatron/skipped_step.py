"""Optimizer steps of megatron-core that are skipped if the gradients are not finite.

megatron-core skips a step only where a gradient scaler finds an infinity, which float16 alone has.
In float32 and bfloat16 its ``step()`` clips by whatever norm it computes, and returns success.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trinity_events.errors import StructuredError


class SkippedStep:
    """Record of a block of :func:`skipped_unless_finite`."""

    norm: float | None = None
    """Norm that is not finite, because of which the step was skipped; None if it was taken."""


class _NormNotFinite(StructuredError):
    """Signal that ends megatron-core's ``step()`` between the norm and the clip."""

    text = "the norm of the gradients is not finite"


@contextmanager
def skipped_unless_finite(optimizer: Any) -> Iterator[SkippedStep]:
    """Let the ``step()`` of an optimizer end the block if the gradients' norm is not finite.

    ``ChainedOptimizer.step()`` of 0.16 asks ``get_grad_norm()`` once, after it has prepared the
    gradients and before it clips. The norm is reduced over all ranks that have other gradients, so
    that the ranks decide alike without a further collective. Of the step nothing else has happened
    by then; the gradients are dropped with those of the next step.
    """
    skipped = SkippedStep()
    compute = optimizer.get_grad_norm

    def checked() -> float:
        norm = float(compute())
        if not math.isfinite(norm):
            skipped.norm = norm
            raise _NormNotFinite
        return norm

    optimizer.get_grad_norm = checked
    try:
        yield skipped
    except _NormNotFinite:
        optimizer.zero_grad()
    finally:
        del optimizer.get_grad_norm
