"""Errors of veRL's engines that cannot run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from trinity_events.errors import TrinityError


class VerlUnusable(TrinityError):
    """veRL's engine cannot run here.

    Attributes:
        reason: Error of the import.
        module: Module that is missing; None if one does not go with another.
        engine: Name of the engine in the configuration.
    """

    reason: str
    module: str | None = None
    engine: str = "verl"

    def __str__(self) -> str:
        if self.module is None:
            return f"veRL's engine does not go with what is installed: {self.reason}"
        return (
            f"trainer.engine {self.engine} needs veRL 0.8 or newer, and there is no module "
            f"{self.module}: install trinity-events[verl], then verl with --no-deps"
        )


class VerlMegatronRefused(TrinityError):
    """veRL's Megatron engine cannot run on this machine, or not with this model.

    Attributes:
        fault: ``device`` without CUDA, ``layers`` without Transformer Engine, ``release`` for an
            earlier veRL. ``experts``, ``rotary``, ``vocabulary`` and ``head`` are features of a
            model.
        value: Value that is refused.
        parts: Tensor-parallel ranks.
    """

    fault: Literal["device", "layers", "release", "experts", "rotary", "vocabulary", "head"]
    value: str = ""
    parts: int = 1
    texts: ClassVar = {
        "device": "veRL's Megatron engine needs a CUDA device for each rank, and this rank "
        "computes on the {value}: set trainer.engine megatron, or start the run where there is a "
        "GPU for each rank",
        "layers": "veRL's Megatron engine builds Transformer Engine's layers, and there is no "
        "module transformer_engine: install it for the CUDA of this machine, or set trainer.engine "
        "megatron",
        "release": "veRL's Megatron engine was tried with veRL 0.9.1, and {value} is installed: "
        "install 0.9.1 or newer, or set trainer.engine megatron",
        "experts": "{value} has experts, which were never tried on veRL's Megatron engine: set "
        "trainer.engine megatron",
        "rotary": "the model asks for the rotary embedding {value!r}, which mbridge builds "
        "otherwise or not at all: set trainer.engine megatron",
        "vocabulary": "the model's vocabulary of {value} cannot be divided over {parts} ranks, and "
        "mbridge does not pad it: choose another trainer.tensor_parallel",
        "head": "config.json says tie_word_embeddings, and the weights have a head of their own, "
        "which mbridge does not load: correct config.json",
    }


@contextmanager
def importing_verl(engine: str) -> Iterator[None]:
    """Raise VerlUnusable for errors of imports in the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise VerlUnusable(str(error), error.name, engine) from error
    except ImportError as error:  # such as of a class that the installed TRL does not have
        raise VerlUnusable(str(error), engine=engine) from error
