"""Model without values, whose checkpoints are written and read parameter by parameter.

Its parameters are on torch's meta device: they have names, shapes and places in a checkpoint, and
take no memory. A checkpoint stores views of a parameter, and each view identifies its part of the
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from ..model_folder import check_all_used
from . import checkpoint
from .checkpoint_errors import ForeignCheckpoint
from .checkpoint_reader import IndexedReader, read_metadata
from .layout import ParallelLayout, join
from .model import ModelOptions, build_chunks, transformer_config
from .stream import EXPERT_BIAS, global_name, named_weights
from .weights import mapping

_torch_dcp: Any = dcp  # its names are not exported to type checkers


class MetaModel:
    """Whole model on one rank, without values. It joins the layout of one rank.

    Its parameters are float32 until :meth:`set_dtype` changes that.

    Args:
        hf: Hugging Face configuration of the model.

    Raises:
        UnsupportedModel: if megatron-core has no model of this configuration.
    """

    def __init__(self, hf: Any) -> None:
        layout, options = ParallelLayout(), ModelOptions()
        config = transformer_config(hf, layout, options)
        join(layout, seed=0)
        with torch.device("meta"):
            [self._model] = build_chunks(hf, config, options)
        self.mapping = mapping(hf, config, layout.tensor)
        self.parameters: dict[str, torch.Tensor] = {
            global_name(name, self._model): parameter
            for name, parameter in named_weights(self._model)
        }
        self._names = {_storage(parameter): name for name, parameter in self.parameters.items()}

    def tensors(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """Return the Hugging Face tensors of a parameter by name, without values."""
        return self.mapping.to_huggingface(name, self.parameters[name].detach())

    def sources(self, name: str) -> list[str]:
        """Return the names of the Hugging Face tensors of which a parameter consists."""
        return self.mapping.huggingface_names(name)

    def stored_together(self) -> dict[str, list[str]]:
        """Return the parameters by their key in a checkpoint; layers share a key and its dtype."""
        keys: dict[str, list[str]] = {}
        for name, parts in self._parts().items():
            keys.setdefault(parts[0].key, []).append(name)
        return keys

    def set_dtype(self, names: Iterable[str], dtype: torch.dtype) -> None:
        """Set the dtype of these parameters."""
        for name in names:
            if name.endswith(EXPERT_BIAS):
                continue  # megatron-core and transformers keep it in float32
            parameter = self.parameters[name]
            del self._names[_storage(parameter)]
            parameter.data = parameter.data.to(dtype)
            self._names[_storage(parameter)] = name

    def saved_dtypes(self, folder: Path) -> Iterator[tuple[str, torch.dtype]]:
        """Yield the dtype of each parameter in a checkpoint.

        Raises:
            CheckpointRefused: if it is not a checkpoint of this model.
        """
        metadata = read_metadata(folder)
        for name, parts in self._parts().items():
            yield name, _entry(metadata, parts[0], folder).properties.dtype

    def check_all_read(self, folder: Path) -> None:
        """Check that the model has a place for every tensor of a checkpoint.

        Raises:
            UnusedTensors: if it has not.
        """
        metadata = read_metadata(folder)
        saved = [
            key
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]
        check_all_used(
            folder, saved, {part.key for parts in self._parts().values() for part in parts}
        )

    def save(self, folder: Path, value: Callable[[str], torch.Tensor]) -> None:
        """Write a checkpoint into a new folder.

        Args:
            folder: Folder to write to; its content is replaced.
            value: Returns the value of a parameter, with its shape, when it is written.
        """
        current: list[tuple[str, torch.Tensor]] = []

        def part(view: torch.Tensor) -> torch.Tensor:
            name = self._names[_storage(view)]
            if not current or current[0][0] != name:
                current.clear()  # freed before the next one is made
                whole = torch.empty_like(self.parameters[name], device="cpu", requires_grad=False)
                current.append((name, whole.copy_(value(name))))
            return _same_part(current[0][1], view)

        checkpoint.prepare(self._state(), folder, value=part)()

    def load(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of a checkpoint of any layout; no value is kept.

        Raises:
            CheckpointRefused: if it is not a checkpoint of this model.
        """
        reader = IndexedReader(folder)
        parts = self._parts()
        for name, parameter in self.parameters.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            for part in parts[name]:
                entry = _entry(reader.index, part, folder)
                _read(reader, part, entry, _same_part(whole, part.data))
            yield name, whole

    def _state(self) -> dict[str, Any]:
        # The key of an engine's first chunk, so that both read each other's checkpoints.
        return {"model0": self._model.sharded_state_dict()}

    def _parts(self) -> dict[str, list[Any]]:
        """Return the parts of every parameter in a checkpoint."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

        state = self._state()
        apply_factories(state)
        parts: dict[str, list[Any]] = {name: [] for name in self.parameters}
        for nested in nested_values(state):
            if isinstance(nested, ShardedTensor):
                parts[self._names[_storage(nested.data)]].append(nested)
        return parts


class _Into(_torch_dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Load planner that copies each item into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target
        self.missing = target.numel()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        target = self._target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        # Counted, as torch leaves what no file covers as it finds it, without an error.
        self.missing -= tensor.numel()


def _read(reader: Any, part: Any, entry: Any, target: torch.Tensor) -> None:
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    # Layers of one kind are stored as one tensor, with the layer as its first dimension.
    target = target.view((1,) * part.prepend_axis_num + tuple(target.shape))
    chunk = ChunkStorageMetadata(torch.Size(part.global_offset), target.shape)
    planner = _Into(target)
    reader.read_data(
        LoadPlan(create_read_items_for_chunk_list(part.key, entry, [chunk])), planner
    ).wait()
    if planner.missing:
        raise ForeignCheckpoint(Path(reader.checkpoint_id), "values", part.key, planner.missing)


def _entry(metadata: Any, part: Any, folder: Path) -> Any:
    """Return the checkpoint's entry of a part. Raises CheckpointRefused if there is none."""
    entry = metadata.state_dict_metadata.get(part.key)
    if not isinstance(entry, TensorStorageMetadata) or not _fits(part, tuple(entry.size)):
        raise ForeignCheckpoint(folder, "shape", part.key, shape=tuple(part.global_shape))
    return entry


def _fits(part: Any, saved: tuple[int, ...]) -> bool:
    """Return True if the shape is equal, except for rows of vocabulary padding."""
    shape = tuple(part.global_shape)
    if part.allow_shape_mismatch:
        return shape[1:] == saved[1:] and shape[0] <= saved[0]
    return shape == saved


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_part(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the part of ``whole`` that ``view`` is of another tensor of the same shape."""
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())
