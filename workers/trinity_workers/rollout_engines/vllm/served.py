"""Weights that a loaded vLLM model computes with, compared with those of a version.

A linear layer may hold its weights in any packing, and on a CPU its parameter is empty. So each is
applied to the identity matrix, by the kernel that generates: the output is the weight, since every
sum has one product that is not zero, and that one is by 1. Embeddings, norms and biases are used as
they lie, and are compared as bytes.

The products lose the sign of a zero, and kernels may take subnormal numbers for zero: neither is
compared. A layer of another class, with another kernel or with products in less precision is not
looked into, and is named as unproven.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trinity_events.weights import TensorSlice
from trinity_events.weights.tensors import flat_bytes

from .published import PublishedWeights

logger = logging.getLogger(__name__)

_ROWS = 1024
"""Rows of the identity matrix at a time: a whole one of a wide layer is larger than the layer."""


class ServedTensor(NamedTuple):
    """Tensor of a version, or this worker's slice of it, as the model computes with it."""

    name: str
    """Name in the version."""
    tensor: Tensor | None
    """None if the layer cannot be looked into."""
    begins: tuple[int, ...] = ()
    """Offsets of the slice in the tensor of the version."""
    exact: bool = True
    """False if it was read through products, which lose the sign of a zero."""


@dataclass
class Comparison:
    """Comparison of a model with a version, by the version's names."""

    compared: set[str] = field(default_factory=set)
    differing: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    """Tensors of the model and of the version that were not compared."""


def compare_served(
    model: nn.Module, published: PublishedWeights, names: Collection[str] | None = None
) -> Comparison:
    """Compare the weights that a model computes with to those of a version.

    Args:
        model: The model of this worker, after a load.
        published: Tensors that it is to compute with.
        names: Tensors to compare; None compares all.
    """
    comparison = Comparison()
    for served in served_tensors(model, published.names, names):
        if served.tensor is None or served.name not in published.names:
            comparison.unproven.append(served.name)
        elif _is_as_published(served, published):
            comparison.compared.add(served.name)
        else:
            comparison.differing.append(served.name)
    seen = {*comparison.compared, *comparison.differing, *comparison.unproven}
    comparison.unproven += [name for name in published.names if name not in seen]
    return comparison


def _is_as_published(served: ServedTensor, published: PublishedWeights) -> bool:
    tensor = served.tensor
    assert tensor is not None
    begins = served.begins or (0,) * tensor.dim()
    whole = published.shape(served.name)
    if len(whole) != tensor.dim():
        return False
    shape = tuple(tensor.shape)
    if any(at + size > most for at, size, most in zip(begins, shape, whole, strict=True)):
        return False
    if not served.begins and shape != whole:
        return False
    expected = published.part(served.name, TensorSlice(begins, shape))
    # As vLLM's loader casts it: the model computes with the rounded values.
    expected = expected.to(device=tensor.device, dtype=tensor.dtype)
    if served.exact:
        return bool((flat_bytes(tensor.contiguous()) == flat_bytes(expected.contiguous())).all())
    same = tensor == expected
    if bool(same.all()):
        return True
    tiny = torch.finfo(tensor.dtype).tiny
    return bool((same | ((tensor.abs() < tiny) & (expected.abs() < tiny))).all())


@torch.no_grad()
def served_tensors(
    model: nn.Module,
    published: Collection[str],
    names: Collection[str] | None = None,
) -> Iterator[ServedTensor]:
    """Yield what a model computes with, under the names of the version.

    Args:
        model: The model of this worker.
        published: Names of the version, by which a tied output layer is found.
        names: Tensors to read, without those of other layers; None reads all.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    def is_chosen(name: str) -> bool:
        # What is not in the version is reported with every version.
        return names is None or name in names or name not in published

    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    embedding = find_embedding(model)
    for path, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            parts = _unpacked_names(path, packed)
            if any(is_chosen(f"{part}.weight") for part in parts):
                yield from _linear(path, layer, parts)
        elif isinstance(layer, ParallelLMHead):
            name = f"{path}.weight"
            if name not in published and is_tied(model) and embedding is not None:
                name = f"{embedding[0]}.weight"
            if is_chosen(name):
                yield _output_layer(name, layer)
        elif isinstance(layer, VocabParallelEmbedding):
            if not is_chosen(f"{path}.weight"):
                continue
            rows = layer.shard_indices
            # Without the rows of padding, which no version has.
            own = layer.weight[: rows.num_org_elements]
            yield ServedTensor(f"{path}.weight", own, (rows.org_vocab_start_index, 0))
            if getattr(model, "lm_head", None) is layer:
                yield _output_layer(f"{path}.weight", layer)
        else:
            lies = _is_used_as_it_lies(layer)
            for name, parameter in layer.named_parameters(recurse=False):
                if is_chosen(f"{path}.{name}"):
                    yield ServedTensor(f"{path}.{name}", parameter.detach() if lies else None)


def find_embedding(model: nn.Module) -> tuple[str, Any] | None:
    """Return the path and the layer of the model's input embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for path, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return path, layer
    return None


def is_tied(model: nn.Module) -> bool:
    """Return True if the output layer has the weights of the embedding."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def _is_used_as_it_lies(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.LayerNorm)
        or type(layer).__module__ == "vllm.model_executor.layers.layernorm"
    )


def _linear(path: str, layer: Any, names: Sequence[str]) -> Iterator[ServedTensor]:
    """Yield the weights and biases of a linear layer, packed ones apart."""
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    has_bias = getattr(layer, "bias", None) is not None
    slices = _output_slices(layer, names)
    weight = None
    if type(layer.quant_method) is UnquantizedLinearMethod and slices is not None:
        weight = _through(path, layer, _input_size(layer), layer.params_dtype)
    if weight is None or slices is None:
        for name in names:
            yield ServedTensor(f"{name}.weight", None)
            if has_bias:
                yield ServedTensor(f"{name}.bias", None)
        return
    is_row = isinstance(layer, RowParallelLinear)
    begin_column = layer.tp_rank * _input_size(layer) if is_row else 0
    at = 0
    for name, (begin, size) in zip(names, slices, strict=True):
        rows = weight[at : at + size]
        yield ServedTensor(f"{name}.weight", rows, (begin, begin_column), exact=False)
        if has_bias:
            # A kernel for CPUs keeps biases in float32.
            bias = layer.bias.detach()[at : at + size].to(layer.params_dtype)
            yield ServedTensor(f"{name}.bias", bias, (begin,))
        at += size


def _input_size(layer: Any) -> int:
    """Return the inputs of this rank; a layer that each rank has whole does not name them."""
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _output_slices(layer: Any, names: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return first row and number of rows of each packed part; None for an unknown class."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    sizes: list[int] = list(getattr(layer, "output_partition_sizes", [layer.output_size]))
    if len(sizes) != len(names):
        return None
    if type(layer) is QKVParallelLinear:
        # Ranks share key and value heads where there are fewer of these than ranks.
        group = layer.tp_rank // layer.num_kv_head_replicas
        ranks = [layer.tp_rank, group, group]
    elif type(layer) in (ColumnParallelLinear, MergedColumnParallelLinear):
        ranks = [layer.tp_rank] * len(sizes)
    elif type(layer) in (ReplicatedLinear, RowParallelLinear):
        ranks = [0] * len(sizes)
    else:
        return None
    return [(rank * size, size) for rank, size in zip(ranks, sizes, strict=True)]


def _output_layer(name: str, layer: Any) -> ServedTensor:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if type(layer.quant_method) is not UnquantizedEmbeddingMethod:
        return ServedTensor(name, None)
    weight = _through(name, layer, layer.embedding_dim, layer.weight.dtype)
    rows = layer.shard_indices
    own = None if weight is None else weight[: rows.num_org_elements]
    return ServedTensor(name, own, (rows.org_vocab_start_index, 0), exact=False)


def _through(path: str, layer: Any, width: int, dtype: torch.dtype) -> Tensor | None:
    """Return the weight [outputs, width] that a layer's kernel multiplies by; None if unknown.

    Before any reduction between ranks: each rank sees its own slice.
    """
    parameter = next(iter(layer.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if _has_short_products(device, dtype):
        return None
    columns = []
    for begin in range(0, width, _ROWS):
        count = min(_ROWS, width - begin)
        # (count, width), a part of the identity matrix; its product is (count, outputs).
        rows = torch.zeros(count, width, dtype=dtype, device=device)
        rows[torch.arange(count), torch.arange(begin, begin + count)] = 1
        try:
            columns.append(layer.quant_method.apply(layer, rows, bias=None).t())
        except Exception:  # a kernel may refuse the shape: the layer is unproven, and not wrong
            logger.exception("%s could not be looked into", path)
            return None
    # (outputs, width)
    return torch.cat(columns, dim=1)


def _has_short_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if products of float32 are computed in less precision, such as TF32."""
    if dtype != torch.float32:
        return False
    if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return True
    return torch.get_float32_matmul_precision() != "highest"


def _unpacked_names(path: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Return the paths of a layer's parts in the version."""
    parent, dot, last = path.rpartition(".")
    return [f"{parent}{dot}{name}" for name in packed.get(last, [last])]
