"""Adapters in a folder, in PEFT's format, next to the identity of the base that they are for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Struct

from trinity_events.errors import TrinityError
from trinity_events.weights.tensors import Digesting

from ..storage.durable_files import write_json
from ..storage.sealed_folders import begin_folder, seal
from .convertible import ADAPTER_CONFIG

ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_MODEL = "base_model.json"
"""File that names the base of the adapters."""
_PIECE = 4 << 20  # bytes read at a time, so that memory does not grow with the base
_COMPARED = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
"""Fields of PEFT's configuration that adapters must share with those of a run, by its names."""


class AdaptersRefused(TrinityError):
    """Saved adapters are not those of the run, or of another base.

    Attributes:
        folder: Their folder, or the file that names their base.
        fault: ``adapters`` if the run trains none, ``none`` if it does and there are none,
            ``setting`` if they have another one, ``base`` if the run has another base, ``given`` if
            that of a conversion is another, ``unreadable`` for the file.
        setting: Field of model.lora.
        trained: Base that they were trained on.
        base: Base of the run.
        reason: Error of the file.
    """

    is_lasting = True

    folder: Path
    fault: Literal["adapters", "none", "setting", "base", "given", "unreadable"]
    setting: str = ""
    trained: str = ""
    base: str = ""
    reason: str = ""
    texts: ClassVar = {
        "adapters": "{folder} has adapters, and the run trains the policy itself: set model.lora "
        "as it was, or begin anew with --fresh",
        "none": "{folder} has no adapter_config.json, and the run trains adapters: set "
        "model.lora.rank 0 as it was, or begin anew with --fresh",
        "setting": "the adapters in {folder} have another model.lora.{setting} than the run: set "
        "it as it was, or begin anew with --fresh",
        "base": "the adapters in {folder} were trained on the weights of {trained}, and those of "
        "{base} are others: set model.path to the same weights, or begin anew with --fresh",
        "given": "the weights in {base} are not those that the adapters were trained on: give the "
        "folder of their base with --base",
        "unreadable": "{folder}, which names the base of the adapters, cannot be read ({reason})",
    }


class BaseModel(Struct, frozen=True, kw_only=True):
    """Base that adapters were trained on."""

    path: str
    """Hugging Face folder that it was loaded from."""
    digest: str
    """Digest of the files of its weights."""

    @classmethod
    def of(cls, folder: Path) -> BaseModel:
        """Read the folder's weights, and return their identity."""
        return cls(path=str(folder), digest=weights_digest(folder))


def weights_digest(folder: Path) -> str:
    """Return a digest of the names and bytes of the files with a folder's weights."""
    digesting = Digesting()
    # Sorted: glob() has the order of the file system, and the digest must not.
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        # With names and sizes: bytes that move from one file into the next are other weights.
        digesting.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb", buffering=0) as file:
            while data := file.read(_PIECE):
                digesting.update(data)
    return digesting.digest()


def write_adapter_description(folder: Path, config: dict[str, Any], base: BaseModel) -> None:
    """Write PEFT's configuration, and the identity of the base, into a folder; both durable."""
    write_json(folder / ADAPTER_CONFIG, config)
    write_json(folder / BASE_MODEL, base)


def check_adapters(folder: Path, config: dict[str, Any] | None, base: BaseModel | None) -> None:
    """Raise AdaptersRefused unless a folder describes adapters like these, on the same base.

    Args:
        folder: Folder of :func:`write_adapter_description`, or of a model.
        config: PEFT's configuration of the run; None for a run without adapters.
        base: Base of the run.
    """
    file = folder / ADAPTER_CONFIG
    if config is None or base is None:
        if file.is_file():
            raise AdaptersRefused(folder, "adapters")
        return
    if not file.is_file():
        raise AdaptersRefused(folder, "none")
    saved = json.loads(file.read_bytes())
    for field, name in _COMPARED.items():
        if saved.get(field) != config[field]:
            raise AdaptersRefused(folder, "setting", name)
    recorded_base = read_base(folder)
    if recorded_base.digest != base.digest:
        raise AdaptersRefused(folder, "base", trained=recorded_base.path, base=base.path)


def read_base(folder: Path) -> BaseModel:
    """Return the base of a folder's adapters. Raises AdaptersRefused if it is not named."""
    file = folder / BASE_MODEL
    try:
        return msgspec.json.decode(file.read_bytes(), type=BaseModel)
    except (OSError, msgspec.DecodeError) as error:
        raise AdaptersRefused(file, "unreadable", reason=str(error)) from None


def write_adapter_folder(
    folder: Path,
    describe: Callable[[Path], None],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> int:
    """Write a folder that PEFT loads, its list of digests last; return the tensors' bytes.

    Memory holds all tensors: PEFT reads one file, whose header names them all.

    Args:
        folder: Folder to write to; files that it has are replaced.
        describe: Writes all files but that of the weights.
        tensors: The adapters by PEFT's names.
    """
    from safetensors.torch import save_file

    begin_folder(folder)
    describe(folder)
    adapters = {name: tensor.contiguous() for name, tensor in tensors}
    partial = folder / f".{ADAPTER_WEIGHTS}.tmp"
    save_file(adapters, partial, metadata={"format": "pt"})
    partial.replace(folder / ADAPTER_WEIGHTS)
    seal(folder)
    return sum(tensor.nbytes for tensor in adapters.values())
