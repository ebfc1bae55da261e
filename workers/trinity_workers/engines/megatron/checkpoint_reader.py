"""Reader of distributed checkpoints that runs no code of theirs.

megatron-core and torch keep pickles in a checkpoint: an index in ``.metadata``, plain values in
``common.pt`` and ``rank_N.pt``, and objects among the tensors of ``.distcp`` files. Loading an
ordinary pickle calls whatever it names, so anyone who can write to a run's folder could run code.

1. The index is unpickled with the classes of ``_DATA_CLASSES`` and ``_CONSTRUCTORS`` alone.
2. Everything else is loaded with ``weights_only=True``, whatever the environment says. That allows
   torch's tensors, plain values, and the data classes of megatron-core's ``safe_globals.py``.
3. What was checked is what is used: bytes are read once.
4. A state of Transformer Engine is loaded only if it is empty: the layer would unpickle it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner

from trinity_events.errors import TrinityError

from .checkpoint_errors import (
    ForeignCheckpoint,
    MissingCheckpointFile,
    UndecodableFile,
    UnreadablePart,
    UnsafePickle,
)

_torch_dcp: Any = dcp  # its names are not exported to type checkers
_filesystem: Any = filesystem
_metadata: Any = metadata
_planner: Any = planner

_EXTRA_STATE = "._extra_state"
"""Part of the key of a layer's state that Transformer Engine unpickles. It has one for FP8 alone,
which the engine does not use."""

_DATA_CLASSES: tuple[type, ...] = (
    _metadata.BytesStorageMetadata,
    _metadata.ChunkStorageMetadata,
    _metadata.Metadata,
    _metadata.MetadataIndex,
    _metadata.StorageMeta,
    _metadata.TensorProperties,
    _metadata.TensorStorageMetadata,
    _filesystem._StorageInfo,
    # megatron-core's own writer adds the plan of every rank (strategies/state_dict_saver.py).
    _planner.BytesIOWriteData,
    _planner.SavePlan,
    _planner.TensorWriteData,
    _planner.WriteItem,
)
"""Classes of which torch 2.13 and megatron-core 0.16.1 make an index; they have data alone."""

_CONSTRUCTORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,  # since Python 3.13
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_metadata.__name__, "_MEM_FORMAT_ENCODING"): _metadata._MEM_FORMAT_ENCODING,
    (_planner.__name__, "WriteItemType"): _planner.WriteItemType,
}
"""Functions and classes that an index calls, by module and name."""


def read_metadata(folder: Path) -> Any:
    """Return the index of a checkpoint, as torch's ``Metadata``.

    Raises:
        MissingCheckpointFile: if there is none.
        UnsafePickle: if it is a pickle of anything else.
        UndecodableFile: if it cannot be decoded, or names a file outside the folder.
    """
    path = folder / ".metadata"
    with _decoding(path):
        index = _IndexUnpickler(path, _read_bytes(path)).load()
        if not isinstance(index, _metadata.Metadata):
            raise UndecodableFile(path, f"its content is of type {type(index).__name__}")
        index.state_dict_metadata.keys()
        for entry in index.storage_data.values():
            name = entry.relative_path
            if name != Path(name).name or entry.transform_descriptors:
                raise UndecodableFile(path, f"it places tensors in {name!r}")
    return index


def read_plain(path: Path) -> dict[str, Any]:
    """Return a file's tensors and plain values.

    Raises:
        MissingCheckpointFile: if it is not there.
        UnsafePickle: if it has anything else.
        UndecodableFile: if it cannot be decoded.
    """
    state = _load_plain(_read_bytes(path), path)
    if not isinstance(state, dict):
        raise UndecodableFile(path, f"its content is of type {type(state).__name__}")
    return state


class IndexedReader(_torch_dcp.FileSystemReader):  # type: ignore[misc]
    """Reader of a folder's tensors by its index, which :func:`read_metadata` returns."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.index = read_metadata(folder)
        self.set_up_storage_reader(self.index, is_coordinator=True)

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        """Return the index; it is not read again."""
        return self.index

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the tensors of a plan, which torch loads with ``weights_only=True``."""
        with _decoding(self.folder):
            try:
                return super().read_data(plan, planner)
            except pickle.UnpicklingError as error:
                name = _refused_name(b"", str(error))
                if name is None:
                    raise
                raise UnsafePickle(self.folder, name) from None
            except FileNotFoundError as error:
                raise MissingCheckpointFile(Path(error.filename)) from None

    def load_object(self, read_item: Any, data: io.BytesIO) -> Any:
        """Return an object that is stored among tensors."""
        path = self.folder / self.storage_data[read_item.storage_index].relative_path
        key = read_item.storage_index.fqn
        value = _load_plain(data.getvalue(), path)
        if _EXTRA_STATE in key and not _is_empty(value):
            raise ForeignCheckpoint(path, "FP8", key)
        return value


def load_strategies(common: dict[str, Any], reader: IndexedReader) -> tuple[Any, Any]:
    """Return megatron-core's strategies for sharded and plain values that were read safely.

    Their base classes are megatron-core's, so they are defined on demand.

    Args:
        common: Content of ``common.pt``.
        reader: Reader of everything else.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class Planner(megatron_torch.MCoreLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            # torch's planner loads them with weights_only=False (default_planner.py).
            key = read_item.dest_index.fqn
            if not isinstance(self.original_state_dict[key], io.BytesIO):
                raise UndecodableFile(reader.folder / ".metadata", f"{key} is no tensor")
            self.original_state_dict[key] = reader.load_object(read_item, value)

    class ShardedStrategy(megatron_torch.TorchDistLoadShardedStrategy):  # type: ignore[misc]
        def check_backend_compatibility(self, loaded_version: str) -> None:
            if loaded_version != "torch_dist":
                raise ForeignCheckpoint(reader.folder, "format", loaded_version)

        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            # As megatron-core's, which makes a reader and a planner that unpickle.
            tensors = [
                tensor
                for tensor in nested_values(sharded_state_dict)
                if isinstance(tensor, ShardedTensor)
            ]
            by_key, paths, names = megatron_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict
            )
            state = megatron_torch.mcore_to_pyt_state_dict(by_key, True)
            load_planner = Planner(
                shapes_validation_sharded_tensors=[
                    tensor for tensor in tensors if not tensor.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors={
                    tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
                },
            )
            with _reading(reader.folder):
                _torch_dcp.load(state, storage_reader=reader, planner=load_planner)
            loaded = {
                key: megatron_torch._unwrap_pyt_sharded_tensor(value)
                for key, value in state.items()
            }
            loaded = megatron_torch._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
            megatron_torch._restore_dict_types(loaded, sharded_state_dict)
            return loaded

    class CommonStrategy(TorchCommonLoadStrategy):  # type: ignore[misc]
        def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
            return common

    return ShardedStrategy(), CommonStrategy()


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of an index, which makes instances of few classes.

    A pickle gets stand-ins for these classes. With the classes themselves it could set their
    attributes, and so change every later index.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._stand_ins = {name: _make_stand_in(make) for name, make in _CONSTRUCTORS.items()} | {
            (cls.__module__, cls.__qualname__): _make_stand_in(partial(cls.__new__, cls))
            for cls in _DATA_CLASSES
        }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        stand_in = self._stand_ins.get((module_name, global_name))
        if stand_in is not None:
            return stand_in
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise UnsafePickle(self._path, f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UndecodableFile(self._path, "it refers to objects outside of it")


def _make_stand_in(make: Callable[..., Any]) -> type:
    """Return a class whose instantiation returns what a function makes."""
    return type("StandIn", (), {"__new__": lambda _, *arguments: make(*arguments)})


def _load_plain(data: bytes, path: Path) -> Any:
    with _decoding(path):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            name = _refused_name(data, str(error))
            if name is None:
                raise
            raise UnsafePickle(path, name) from None


def _refused_name(data: bytes, message: str) -> str | None:
    """Return the class that ``weights_only`` refused, or None if the file is damaged."""
    named = re.search(r"GLOBAL (\w[\w.]*)", message)
    if named is not None:
        return named[1]
    # torch stops at the first opcode that it does not know, before it names a class.
    return next(_global_names(_pickled_part(data)), None)


def _pickled_part(data: bytes) -> bytes:
    """Return the pickle of a file of ``torch.save``, or the data if it has another form."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return archive.read(names[0]) if names else b""


def _global_names(pickled: bytes) -> Iterator[str]:
    """Yield the classes and functions that a pickle names; none is imported."""
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in {"GLOBAL", "INST"}:
                yield str(argument).replace(" ", ".")
            elif opcode.name == "STACK_GLOBAL":
                yield ".".join(strings[-2:])
            elif isinstance(argument, str):
                strings.append(argument)
    except ValueError:  # it is no pickle from here on
        return


def _is_empty(value: Any) -> bool:
    """Return True if an extra state has no bytes: a list of None or of empty tensors."""
    return isinstance(value, list) and all(
        item is None or (isinstance(item, torch.Tensor) and not item.numel()) for item in value
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingCheckpointFile(path) from None


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Raise UndecodableFile for whatever a decoder raises on a file that it cannot decode."""
    try:
        yield
    except (TrinityError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UndecodableFile(path, reason[:200]) from None


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise the cause of what torch raises on all ranks alike if one cannot read its part."""
    try:
        yield
    except _torch_dcp.CheckpointException as error:  # not an Exception
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, TrinityError):
            raise cause from None
        raise UnreadablePart(rank, folder, str(cause)) from None
