"""Weights by Hugging Face names: streams between folders and all ranks, shards of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from trinity_events.weights.errors import UnfitTensor

from ...learning.finite import check_finite
from ...runtime.collectives import gather_bytes
from ..base import LocalShard
from ..model_folder import OUTPUT_HEAD, FolderReader, check_all_used
from .weights import WeightMapping, local_mapping

# Experts of local layers are `local_experts.N.`; Transformer Engine's grouped ones end in
# `weightN`.
_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")
EXPERT_BIAS = ".router.expert_bias"
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


class ParameterEntry(Struct, frozen=True, array_like=True):
    """Description of one parameter, exchanged between the ranks of a pipeline."""

    stage: int
    """Pipeline rank that holds the parameter."""
    chunk: int
    local_name: str
    name: str
    """Name, with the layer's number in the whole model."""
    shape: tuple[int, ...]
    """Shape of one rank's shard."""
    dtype: str
    dim: int
    """Dimension along which the shards are cut; -1 if every tensor-parallel rank has all of it."""
    expert: bool


class WeightStream:
    """Iterable that gathers the parameters of a model that is distributed over ranks.

    The constructor is collective.

    Args:
        chunks: This rank's chunks, unwrapped.
        mapping: Mapping to Hugging Face's names and shapes.
        tied: If True, the output layer is the embedding, and is left out.
        device: Device of the gathered tensors.
    """

    def __init__(
        self, chunks: Sequence[Any], mapping: WeightMapping, *, tied: bool, device: torch.device
    ) -> None:
        self._mapping = mapping
        self._device = device
        self._local_experts = _local_experts(chunks[0])
        self._parameters = [dict(named_weights(chunk)) for chunk in chunks]
        self._groups = chunks[0].pg_collection
        self._stages = self._groups.pp
        self._stage = self._stages.rank()
        mine = [
            _entry(self._stage, index, name, parameter, chunk)
            for index, chunk in enumerate(chunks)
            for name, parameter in self._parameters[index].items()
        ]
        # One order of entries for all ranks: each entry is a broadcast, and perhaps two gathers.
        payloads = gather_bytes(msgspec.msgpack.encode(mine), self._stages)
        self.entries = [
            entry
            for payload in payloads
            for entry in msgspec.msgpack.decode(payload, type=list[ParameterEntry])
            if not (tied and entry.name == "output_layer.weight")
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors by Hugging Face name, on every rank. Every rank must exhaust it."""
        for entry in self.entries:
            shard = self._from_owner(entry)
            for name, tensor in self._gather_experts(entry, shard):
                whole = self._mapping.merge(name, self._gather_shards(entry, tensor), entry.dim)
                yield from self._mapping.to_huggingface(name, whole)

    def huggingface_names(self) -> set[str]:
        """Return the names that iteration yields, on every rank, without gathering."""
        ranks = self._groups.ep.size()
        return {
            name
            for entry in self.entries
            for rank in range(ranks if entry.expert else 1)
            for name in self._mapping.huggingface_names(
                _moved(entry.name, rank * self._local_experts)
            )
        }

    def check_all_used(self, folder: Path) -> None:
        """Check that the model has a place for every tensor of a folder. Not collective.

        An output head that is not read is tied, or replaced by a head of values.

        Raises:
            UnusedTensors: if it has not.
        """
        used = self.huggingface_names() | {OUTPUT_HEAD}
        check_all_used(folder, FolderReader(folder).names(), used)

    def _from_owner(self, entry: ParameterEntry) -> torch.Tensor:
        """Return the shard of the owning stage's rank that corresponds to this rank."""
        if entry.stage == self._stage:
            shard: torch.Tensor = self._parameters[entry.chunk][entry.local_name].detach()
        else:
            dtype = getattr(torch, entry.dtype)
            # Shape and dtype come from the owner's entry: this stage has no such parameter.
            shard = torch.empty(entry.shape, dtype=dtype, device=self._device)
        if self._stages.size() > 1:
            dist.broadcast(shard, group=self._stages, group_src=entry.stage)
        return shard

    def _gather_experts(
        self, entry: ParameterEntry, shard: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the parameter of every expert-parallel rank, by name."""
        if not entry.expert:
            return [(entry.name, shard)]
        everyone = _gather(shard, self._groups.ep)
        return [
            (_moved(entry.name, rank * self._local_experts), tensor)
            for rank, tensor in enumerate(everyone)
        ]

    def _gather_shards(self, entry: ParameterEntry, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards of all tensor-parallel ranks, in order."""
        return [shard] if entry.dim < 0 else _gather(shard, shard_group(entry.name, self._groups))


def load_folder(
    chunks: Sequence[Any], folder: Path, mapping: WeightMapping, *, absent: Set[str] = frozenset()
) -> None:
    """Load a Hugging Face folder's weights into this rank's chunks, one parameter at a time.

    Not collective: every rank reads the tensors that it needs. Parameters of tensors that are
    ``absent`` from the folder keep their values.

    Raises:
        FileNotFoundError: if the folder has no safetensors files.
        IncompatibleWeights: if a tensor is missing or has another shape.
        NonFiniteWeights: if a tensor has values that are not finite.
    """
    reader = FolderReader(folder)
    for chunk in chunks:
        for local_name, parameter in named_weights(chunk):
            name = global_name(local_name, chunk)
            sources = mapping.huggingface_names(name)
            if set(sources) <= absent:
                continue
            tensors = [reader.tensor(source) for source in sources]
            check_finite(zip(sources, tensors, strict=True), str(folder))
            whole = mapping.to_megatron(name, tensors)
            group = shard_group(name, chunk.pg_collection)
            shard = mapping.split(name, whole, parameter, group.size())[group.rank()]
            if shard.shape != parameter.shape:
                raise UnfitTensor(
                    name,
                    fault="file",
                    in_model=str(tuple(parameter.shape)),
                    in_version=str(tuple(shard.shape)),
                    folder=folder,
                )
            with torch.no_grad():
                parameter.copy_(shard)


def local_shards(
    hf: Any, config: Any, chunks: Sequence[Any], *, tied: bool
) -> Iterator[LocalShard]:
    """Yield this rank's slices. Replicas, and ranks that share a complete tensor, each yield it.

    A slice that contains only vocabulary padding is left out.
    """
    for chunk in chunks:
        for local_name, parameter in named_weights(chunk):
            name = global_name(local_name, chunk)
            if tied and name == "output_layer.weight":
                continue
            group = shard_group(name, chunk.pg_collection)
            parts, dim = group.size(), partition_dim(parameter)
            mapping = local_mapping(hf, config, parts)
            for hf_name, piece in mapping.to_huggingface(name, parameter.detach()):
                shape, offsets = list(piece.shape), [0] * piece.dim()
                if dim >= 0:
                    offsets[dim] = group.rank() * piece.shape[dim]
                    shape[dim] = parts * piece.shape[dim]
                tensor = piece
                # Rows of padding are Megatron's alone, and depend on its layout.
                if hf_name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    shape[0] = hf.vocab_size
                    tensor = piece[: max(0, hf.vocab_size - offsets[0])]
                if tensor.numel():
                    yield LocalShard(hf_name, tensor, tuple(shape), tuple(offsets))


def named_weights(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the chunk's tensors that have a Hugging Face name, by their local name.

    They are its parameters, and the biases by which experts are chosen, which are not trained.
    """
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(EXPERT_BIAS):
            yield name, buffer


def global_name(name: str, chunk: Any) -> str:
    """Return the parameter's name with layer and expert numbers of the whole model, from 0."""
    first_expert = chunk.pg_collection.ep.rank() * _local_experts(chunk)
    return _moved(_with_layer(name, chunk), first_expert)


def shard_group(name: str, groups: Any) -> dist.ProcessGroup:
    """Return the group of a layout that holds a parameter's shards; experts may have their own."""
    group: dist.ProcessGroup = groups.expt_tp if _EXPERT.search(name) else groups.tp
    return group


def partition_dim(parameter: torch.Tensor) -> int:
    """Return the dimension along which shards are cut; -1 if each rank has the whole parameter."""
    split = bool(getattr(parameter, "tensor_model_parallel", False))
    return int(getattr(parameter, "partition_dim", -1)) if split else -1


def _entry(
    stage: int, index: int, name: str, parameter: torch.Tensor, chunk: Any
) -> ParameterEntry:
    return ParameterEntry(
        stage=stage,
        chunk=index,
        local_name=name,
        name=_with_layer(name, chunk),
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        dim=partition_dim(parameter),
        expert=_EXPERT.search(name) is not None,
    )


def _with_layer(name: str, chunk: Any) -> str:
    # Names count within a chunk; layer_number counts over the whole model, from 1.
    return _LAYER.sub(lambda match: str(chunk.decoder.layers[int(match[0])].layer_number - 1), name)


def _local_experts(chunk: Any) -> int:
    config = chunk.config
    return int(config.num_moe_experts or 0) // int(config.expert_model_parallel_size)


def _moved(name: str, by: int) -> str:
    """Return the name with the expert's number increased by ``by``."""
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + by}", name)


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [shard]
    # all_gather() reads plain memory, and a shard may be a view of a fused parameter.
    shard = shard.contiguous()
    everyone = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(everyone, shard, group=group)
    return everyone
