"""Compare the models of all ranks before the first tensor is sent.

Each rank makes its own model and trains the stages that it holds, so ranks with different models
would train a mixture, or send tensors that the receiver does not expect.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.launch import compare_requests
from ipu_pipe.backends.ranks import are_joined, gather_by_rank, gather_over
from ipu_pipe.data.sources import compute_checksum
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import count_samples, describe_tensors

REMEDY = (
    "give all ranks the same model: make it from one seed (torch.manual_seed), or load the "
    "same weights"
)
SET_ALIKE = "give the optimizer the same settings on all ranks, and step its schedulers alike"
ALIKE_IN_PARTS = (
    "ranks that hold parts of the same weights must have the same model, and read the same batches "
    "unless data_group has them"
)
READ_ALIKE = (
    "ranks of one pipeline must read the same batches: do not shard the loader by rank, and seed "
    "its shuffle alike "
    "(with replicas: DistributedSampler(num_replicas=pipe.replicas, rank=pipe.replica))"
)
SAME_SIZE = "replicas must read batches of one size: drop the last, shorter one (drop_last=True)"


def compare_models(model: nn.Module) -> None:
    """Raise `BadInput` on all ranks, with the first difference, if a rank has another model than
    rank 0.

    Compared are names, shapes, dtypes and `requires_grad` of parameters and buffers, and the modes
    of modules.
    """
    if not _are_several():
        return
    description = {}
    for name, tensor in _list_tensors(model).items():
        description[f"model: {name}: shape"] = str(tuple(tensor.shape))
        description[f"model: {name}: dtype"] = str(tensor.dtype)
        description[f"model: {name}: requires_grad"] = str(tensor.requires_grad)
    for name, module in model.named_modules():
        description[f"model: {name or type(model).__name__}: training"] = str(module.training)
    _raise_first_difference(description)


def compare_values(model: nn.Module, loss: Any, replaces_weights: bool) -> None:
    """Raise `BadInput` on all ranks, with the first difference, if a rank has other values in its
    model or its loss.

    `replaces_weights`: a checkpoint will replace all that is in the model's state dict, so these
    values may differ.
    """
    if not _are_several():
        return
    # a checkpoint makes these alike on all ranks
    replaced = set(model.state_dict()) if replaces_weights else set()
    tensors = {
        f"model: {name}": tensor
        for name, tensor in _list_tensors(model).items()
        if name not in replaced
    }
    if isinstance(loss, nn.Module):
        tensors.update({f"loss: {name}": tensor for name, tensor in _list_tensors(loss).items()})
    # tensors on the meta device have none
    values = {name: t for name, t in tensors.items() if not t.is_meta}
    _raise_first_difference(
        # checksums, because the weights themselves may be gigabytes
        {f"{name}: values (CRC-32)": f"{compute_checksum(t):08x}" for name, t in values.items()}
    )


def compare_inputs(x: Any, replica: int) -> None:
    """Raise `BadInput` on all ranks if a rank's first microbatch has inputs of other shapes than
    another rank's of its replica, or another number of samples than any.
    """
    if not _are_several():
        return
    shapes = {"step: inputs of a microbatch": describe_tensors(x)}
    # replica -> its first rank, and what that has; other replicas may read other lengths
    firsts: dict[int, tuple[int, Any]] = {}
    for rank, (number, here) in gather_by_rank((replica, shapes)).items():
        first_rank, first = firsts.setdefault(number, (rank, here))
        # they would end in gloo's abort of the rank that receives
        if faults := compare_requests(first, here, first_rank, rank):
            raise BadInput(f"{faults[0]}: {READ_ALIKE}")
    _raise_first_difference({"step: samples of a microbatch": str(count_samples(x))}, SAME_SIZE)


def compare_settings(settings: dict[str, str]) -> None:
    """Raise `BadInput` on all ranks, with the first difference, if a rank's optimizer has other
    settings than rank 0's.
    """
    if _are_several():
        _raise_first_difference(settings, SET_ALIKE)


def describe_values(model: nn.Module, x: Any) -> dict[str, str]:
    """Describe what the ranks that hold parts of the same weights must have alike: the values of a
    model, and the inputs of a microbatch.
    """
    values = {
        f"model: {name}: values (CRC-32)": f"{compute_checksum(t):08x}"
        for name, t in _list_tensors(model).items()
        if not t.is_meta
    }
    return {**values, "step: inputs of the first microbatch (CRC-32)": f"{compute_checksum(x):08x}"}


def compare_over(group: Any, description: dict[str, str]) -> None:
    """Raise `BadInput`, with the first difference, if a rank of a process group, which holds parts
    of the same weights, has another description.
    """
    (first_rank, first), *others = gather_over(group, description).items()
    for rank, other in others:
        faults = compare_requests(first, other, first_rank, rank)
        if faults:
            raise BadInput(f"{faults[0]}: {ALIKE_IN_PARTS}")


def _are_several() -> bool:
    # a column may have a single rank, and still share its weights with other columns
    return are_joined() and (world.get_world_size() > 1 or world.get_data_group() is not None)


def _list_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _raise_first_difference(description: dict[str, str], remedy: str = REMEDY) -> None:
    """Compare the ranks' descriptions: a hash of each, and all of them only if the hashes
    differ.
    """
    # keys are not sorted, because the order of the parameters must agree, too
    digests = gather_by_rank(hashlib.sha256(json.dumps(description).encode()).hexdigest())
    # the usual case costs 64 characters a rank, whatever the size of the model
    if len(set(digests.values())) == 1:
        return
    (first_rank, first), *others = gather_by_rank(description).items()
    for rank, other in others:
        faults = compare_requests(first, other, first_rank, rank)
        # optimizers number parameters in their order
        if faults or list(first) != list(other):
            order = f"model: rank {rank} has its parameters in another order than rank {first_rank}"
            raise BadInput(f"{faults[0] if faults else order}: {remedy}")
