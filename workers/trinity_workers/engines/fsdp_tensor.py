"""Tensor parallelism on FSDP: ranks that share every layer of a Hugging Face model.

1. The T ranks of a group have the same batch, and all of them compute the same loss. FSDP divides
   what a rank has of a tensor over the replicas alone, and takes the mean of their gradients.
2. Tensors are divided as the model's own plan says, the one that transformers follows for
   ``tp_plan="auto"``. Input and output embedding are divided by tokens.
3. Every parameter is a tensor on both dimensions of the mesh, an undivided one too. So the norm of
   the gradients, their clip, versions and checkpoints need to know of no layout.
4. The gradient of an undivided parameter is the same on all ranks of a group. Where it computes
   with a part of the heads, each rank has a part of the gradient, and the sum is taken.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trinity_events.errors import TrinityError

from .fsdp_context import AGREEMENT

_PART_OF_HEADS = "replicated_with_grad_allreduce"
"""Style of an undivided module that computes with a part of the heads, such as Qwen3's norms."""
_STYLES: Mapping[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    _PART_OF_HEADS: lambda: None,
}
"""Styles of torch by the names of transformers; None leaves a module undivided."""
_COUNTS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
"""Heads that ranks divide, by the names of their numbers in a configuration."""


class TensorParallelRefused(TrinityError):
    """Ranks cannot share the layers of a model.

    Attributes:
        fault: ``plan`` for a model without one, ``style`` if its plan has another way to divide
            ``what``, ``parts`` if ``count`` of ``what`` cannot be divided, ``logits`` if the
            divided model computes others.
        model: Class of the model.
        what: Name of a module, or of what its configuration counts.
        style: Name of the style.
        count: Number that is to be divided.
        ranks: Ranks that share a layer.
    """

    is_lasting = True

    fault: Literal["plan", "style", "parts", "logits"]
    model: str
    what: str = ""
    style: str = ""
    count: int = 0
    ranks: int = 0
    _instead: ClassVar = ": set trainer.tensor_parallel 1"
    texts: ClassVar = {
        "plan": "{model} has no plan by which ranks share its layers (tp_plan)" + _instead,
        "style": "the plan of {model} divides {what} as {style}, which FSDP's ranks cannot"
        + _instead,
        "parts": "{model} has {count} {what}, which {ranks} ranks cannot share: set "
        "trainer.tensor_parallel to a divisor",
        "logits": "{model} computes other logits where ranks share its layers" + _instead,
    }


class TensorRanks(NamedTuple):
    """Mesh of ranks, of which neighbours share every layer."""

    mesh: DeviceMesh
    """Two-dimensional: replicas ``fsdp``, and the ranks ``tp`` of each."""

    @classmethod
    def of(cls, tensor: int, device: torch.device) -> Self | None:
        """Return the mesh of groups of so many ranks each; None for one. Collective.

        Each call makes groups, whose threads stay until the default group is destroyed.
        """
        if tensor == 1:
            return None
        # It warns of each sum over both dimensions, which takes two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        shape = (dist.get_world_size() // tensor, tensor)
        return cls(init_device_mesh(device.type, shape, mesh_dim_names=("fsdp", "tp")))

    @property
    def replicas(self) -> dist.ProcessGroup:
        """Ranks that have the same part of every layer, each with other rows."""
        return self.mesh.get_group("fsdp")


def divide_layers(model: Any, ranks: TensorRanks) -> None:
    """Leave to each rank its part of a model that all ranks have loaded whole. Collective.

    Raises:
        TensorParallelRefused: if the model has no plan, or cannot be divided by it.
    """
    mesh, name = ranks.mesh["tp"], type(model).__name__
    styles = _find_styles(model, mesh.size())
    whole = _logits(model)
    head, table = _find_head(model), model.base_model.get_input_embeddings()
    is_tied = head is not None and head.weight is table.weight
    if is_tied:  # plans of earlier versions of transformers name no table
        [path] = [path for path, module in model.named_modules() if module is table]
        styles.setdefault(path, "embedding_rowwise")
    for path, style in styles.items():
        module = model.get_submodule(path)
        if module is head:
            _divide_head(head, mesh)
        elif (divide := _STYLES[style]()) is not None:
            # Without a rank to send from: each has the whole model, and takes its part.
            parallelize_module(module, mesh, divide, src_data_rank=None)
    if is_tied:  # replaced in both by now
        head.weight = table.weight
    for path, module in model.named_modules():
        gradient = Partial() if styles.get(path) == _PART_OF_HEADS else Replicate()
        _hold_on_mesh(module, mesh, gradient)
    if not (whole - _logits(model)).abs().max() <= AGREEMENT * whole.abs().max():
        raise TensorParallelRefused("logits", name)


def check_layers(folder: Path, ranks: int) -> None:
    """Check that so many ranks can share the layers of a folder's policy, without loading it.

    Raises:
        TensorParallelRefused: if they cannot.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM  # its methods have no annotations
    # The names and sizes of layers are enough, and cost no memory for weights.
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _find_styles(make.from_config(config, trust_remote_code=False), ranks)


def _find_styles(model: Any, ranks: int) -> dict[str, str]:
    """Return the style of each module that the model's plan names, by its path."""
    name = type(model).__name__
    # A critic is no model of transformers, and its layers are.
    owner, prefix = (model, "") if hasattr(model, "tp_plan") else (model.base_model, "model.")
    plan: dict[str, str] = getattr(owner, "tp_plan", None) or {}
    if not plan:
        raise TensorParallelRefused("plan", name)
    config = model.config.get_text_config()
    for attribute, what in _COUNTS.items():
        _check_parts(name, what, getattr(config, attribute, None) or 0, ranks)
    modules, head = dict(owner.named_modules()), _find_head(model)
    styles = {}
    for path in (*modules, *(path for path, _ in owner.named_parameters())):
        # A plan has one rule for all layers, with a star in the place of a layer's number.
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None:
            continue
        if style not in _STYLES or path not in modules:
            raise TensorParallelRefused("style", name, path, style)
        styles[prefix + path] = style
        module = modules[path]
        if isinstance(module, nn.Linear) and module is not head:
            count = module.out_features if style.startswith("colwise") else module.in_features
            _check_parts(name, f"columns of {path}", count, ranks)
    return styles


def _check_parts(model: str, what: str, count: int, ranks: int) -> None:
    if count % ranks:
        raise TensorParallelRefused("parts", model, what, count=count, ranks=ranks)


def _find_head(model: Any) -> Any:
    """Return the output head of a model; None if it has none, as a critic."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _logits(model: nn.Module) -> Tensor:
    """Return the output [1, 8, X] for some tokens, float32. Collective of a divided model."""
    parameter = next(model.parameters())
    tokens = torch.arange(1, 9, device=parameter.device)[None]  # (1, 8)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output: Any = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
        )
    model.train(was_training)
    logits: Tensor = getattr(output, "logits", output)
    return logits.float()


def _divide_head(head: nn.Linear, mesh: DeviceMesh) -> None:
    """Divide the rows of the output head.

    It gets hidden states on the mesh. Its logits are gathered; what is no tensor on the mesh is
    passed on, so that statistics can be computed in the place of logits (`learning.logprobs`).
    """
    _distribute(head, list(dict(head.named_parameters())), mesh, Shard(0))
    head.register_forward_pre_hook(
        lambda _, args: DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
    )

    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # A copy: FSDP hooks into the model's output, and warns of a view.
        return output.full_tensor().clone() if isinstance(output, DTensor) else output

    head.register_forward_hook(gather)


def _hold_on_mesh(module: nn.Module, mesh: DeviceMesh, gradient: Placement) -> None:
    """Hold what is not divided of a module's own parameters on the mesh; let it compute as before.

    Args:
        module: The module.
        mesh: Ranks that share layers.
        gradient: Placement of the gradient that a rank computes.
    """
    own: dict[str, Any] = module._parameters
    names = [name for name, parameter in own.items() if not isinstance(parameter, DTensor | None)]
    if not names:
        return
    _distribute(module, names, mesh, Replicate())
    forward = module.forward

    @wraps(forward)
    def with_local_parameters(*args: Any, **inputs: Any) -> Any:
        parameters = {name: own[name] for name in names}
        # The layer's operations take tensors of one kind alone.
        own.update({name: parameters[name].to_local(grad_placements=[gradient]) for name in names})
        try:
            return forward(*args, **inputs)
        finally:
            own.update(parameters)

    module.forward = with_local_parameters


def _distribute(
    module: nn.Module, names: Sequence[str], mesh: DeviceMesh, placement: Placement
) -> None:
    """Put parameters of a module on the mesh, each rank with its part of what all of them have."""
    for name in names:
        parameter: Any = getattr(module, name)
        placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))
