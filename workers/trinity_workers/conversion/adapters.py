"""Adapters of a checkpoint as a folder of PEFT, or merged into their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity_events.checkpoints.layout import MODEL_FOLDER

from ..engines.adapter_folder import (
    ADAPTER_WEIGHTS,
    BASE_MODEL,
    AdaptersRefused,
    BaseModel,
    read_base,
    weights_digest,
    write_adapter_description,
    write_adapter_folder,
)
from ..engines.base import NamedTensors
from ..engines.convertible import (
    ADAPTER_CONFIG,
    AdapterConversionRefused,
    SourceRefused,
)
from ..engines.model_folder import FolderReader, copy_files, has_separate_head, write_model_folder
from ..engines.reshard import tensors_of_shards
from ..learning.adapters import merged, weight_names
from ..learning.finite import check_finite
from ..storage.huggingface_files import set_untied

_OTHER = (
    *("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"),
    *("rank_pattern", "alpha_pattern", "modules_to_save"),
)
"""Fields of PEFT's configuration that make a product of two matrices something else."""


class SavedAdapters:
    """Adapters in a checkpoint, or in a folder of PEFT.

    Args:
        folder: The folder.
        base: Folder of their base; by default the one that they were trained on.

    Raises:
        ConversionRefused: if there is no base, or PEFT's configuration is not one of this project.
        AdaptersRefused: if the base has other weights than the one that they were trained on.
        NonFiniteWeights: if the adapters, or weights that they are merged into, are not finite.
    """

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        inner = folder / MODEL_FOLDER[-1]
        self._described = folder if (folder / ADAPTER_CONFIG).is_file() else inner
        self._config: dict[str, Any] = json.loads((self._described / ADAPTER_CONFIG).read_bytes())
        if self._config.get("peft_type") != "LORA" or any(map(self._config.get, _OTHER)):
            raise AdapterConversionRefused(self._described / ADAPTER_CONFIG, "kind")
        self._given_base = base
        if (self._described / ADAPTER_WEIGHTS).is_file():
            reader = FolderReader(self._described)
            self.tensors = {name: reader.tensor(name) for name in reader.names()}
        else:
            self.tensors = dict(tensors_of_shards(folder, part="adapter"))
        check_finite(self.tensors.items(), str(folder))

    def write_alone(self, target: Path) -> list[int]:
        """Write a folder that PEFT loads; return the tensors' sizes in bytes."""

        def write_description(into: Path) -> None:
            copy_files(self._described, into)
            if self._given_base is not None:
                path = str(self._given_base.resolve())
                config = self._config | {"base_model_name_or_path": path}
                write_adapter_description(into, config, BaseModel.of(self._given_base.resolve()))

        if self._given_base is not None:
            # For its check alone: it raises if the given base has other weights.
            self._base()
        write_adapter_folder(target, write_description, self.tensors.items())
        return [tensor.nbytes for tensor in self.tensors.values()]

    def write_merged(self, target: Path, shard_bytes: int) -> list[int]:
        """Write the base with the adapters merged into it; return the tensors' sizes in bytes.

        Weights keep the dtype that they have in the base. Memory holds the adapters, and a tensor.
        """
        base, sizes = self._base(), list[int]()

        def counted() -> NamedTensors:
            for name, tensor in self._merge(base):
                sizes.append(tensor.nbytes)
                yield name, tensor
                # Else this name holds one tensor while the next one is read: twice the memory.
                del tensor

        def write_description(into: Path) -> None:
            copy_files(base, into)
            if has_separate_head(base):
                set_untied(into)

        write_model_folder(target, write_description, counted(), shard_bytes=shard_bytes)
        return sizes

    def _merge(self, base: Path) -> NamedTensors:
        try:
            reader = FolderReader(base)
        except FileNotFoundError as error:
            raise SourceRefused(base, "weights", reason=str(error)) from None
        names = {weight_names(name): name for name in reader.names()}
        adapted = {name for pair in names for name in pair}
        missing = [name for name in self.tensors if name not in adapted]
        if missing:
            raise AdapterConversionRefused(base, "layer", missing[0])
        # alpha / r, as in section 4.1 of LoRA (arXiv:2106.09685). The constructor refuses rsLoRA,
        # which divides by the root of r.
        scale = self._config["lora_alpha"] / self._config["r"]
        for (first, second), name in names.items():
            tensor = reader.tensor(name)
            if first in self.tensors or second in self.tensors:
                for matrix in (first, second):
                    if matrix not in self.tensors:
                        raise AdapterConversionRefused(self._described, "half", matrix)
                tensor = merged(tensor, self.tensors[first], self.tensors[second], scale)
            check_finite([(name, tensor)], str(base))
            yield name, tensor
            # Pages of a mapped file that were read count as memory of this process.
            reader.forget()

    def _base(self) -> Path:
        """Return the folder of the base, whose weights are those of the training."""
        named = (self._described / BASE_MODEL).is_file()
        trained = read_base(self._described) if named else None
        path = self._config.get("base_model_name_or_path")
        base = self._given_base or Path(trained.path if trained is not None else path or "")
        if not (base / "config.json").is_file():
            raise AdapterConversionRefused(base, "base")
        # By its bytes: a folder of the same name may have been downloaded again since.
        if trained is not None and weights_digest(base) != trained.digest:
            raise AdaptersRefused(self._described, "given", base=str(base))
        return base
