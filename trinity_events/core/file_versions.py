"""Weight versions that are files: ready state dicts with weights in Hugging Face's format."""

from __future__ import annotations

from trinity_schemas import SaveProof, StepReady

WEIGHTS_SAVE = "huggingface_weights"
"""Name of the save that writes such a version."""


def weights_save(ready: StepReady) -> SaveProof | None:
    """Return the save with the weights of a ready state dict; None if it is no such version."""
    if ready.kind != "state_dict":
        return None
    saves = (save for save in ready.saves if save.slot.name == WEIGHTS_SAVE)
    return next((save for save in saves if save.slot.kind == "state_dict" and save.digest), None)
