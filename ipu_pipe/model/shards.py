"""Weights that a caller has sharded as DTensors, by FSDP2 or tensor parallelism.

    weight   DTensor, in the model            whole weights are gathered from it for a pass
    shard    a plain parameter in the memory of this rank's part of it; the optimizer, the rules and
             the weight versions work on shards

A version of a weight is then a version of its shards, which takes 1 / ranks of the memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import MutableMapping
from typing import Any, Collection, ContextManager, Iterable, Iterator, Mapping

import torch
from torch import nn

from ipu_pipe.model.precision import Pairs


class Shards:
    """The shards of the weights of this rank that are DTensors. It has the place of `Masters`."""

    # what is written into a shard is in its weight
    are_in_weights = True

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._shards: dict[nn.Parameter, nn.Parameter] = {}
        for weight in weights:
            local = weight.data.to_local().detach()  # type: ignore[attr-defined]
            self._shards[weight] = nn.Parameter(local, weight.requires_grad)
        self._weights = {id(shard): weight for weight, shard in self._shards.items()}

    def get(self, weight: Any) -> Any:
        """Return the shard of a weight; the weight itself if it is not sharded."""
        return self._shards.get(weight, weight)

    def list_pairs(self, shards: Iterable[nn.Parameter]) -> Pairs:
        """Return (weight, shard) for each of `shards` that is one."""
        return [(self._weights[id(s)], s) for s in shards if id(s) in self._weights]

    @contextlib.contextmanager
    def put_in_place(self, loads: bool = False) -> Iterator[None]:
        """Do nothing: a shard is in its weight's memory."""
        yield

    def put_rounded(self) -> ContextManager[None]:
        """Do nothing: passes read the weights themselves."""
        return contextlib.nullcontext()

    def take_over(self) -> None:
        """Do nothing: a shard is in its weight's memory."""

    def collect_gradients(self, pairs: Pairs) -> None:
        """Add the weights' gradients to their shards' after a backward."""
        for weight, shard in pairs:
            gradient: Any = weight.grad
            if gradient is None:
                continue
            placements = weight.placements  # type: ignore[attr-defined]
            # a gradient may be partial, with the sum over ranks still to be taken
            if gradient.placements != placements:
                gradient = gradient.redistribute(placements=placements)
            local = gradient.to_local()
            shard.grad = local if shard.grad is None else shard.grad + local
            weight.grad = None

    def write_weights(self, pairs: Pairs) -> None:
        """Do nothing: a shard is in its weight's memory."""

    def list_groups_of(self, parameter: torch.Tensor) -> list[Any]:
        """List the process groups over which a weight is divided, of which `parameter` is a shard;
        none for another parameter.
        """
        weight: Any = self._weights.get(id(parameter))
        if weight is None:
            return []
        return [
            weight.device_mesh.get_group(dim)
            for dim, placement in enumerate(weight.placements)
            # also of FSDP2 over tensor parallelism; replicated dimensions have equal gradients
            if placement.is_shard() or type(placement).__name__ == "_StridedShard"
        ]

    def list_groups(self) -> list[Any]:
        """List the process groups of the caller's collectives: all dimensions of the weights'
        meshes.
        """
        meshes = [weight.device_mesh for weight in self._shards]  # type: ignore[attr-defined]
        groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
        return list(dict.fromkeys(groups))

    def is_averaged(self, parameter: torch.Tensor, ranks: Collection[int]) -> bool:
        """Return whether the caller's sharding averages a gradient over these global ranks: they are
        dimensions of the weight's mesh.
        """
        weight: Any = self._weights.get(id(parameter))
        if weight is None:
            return False
        dims = range(weight.device_mesh.ndim)
        # hybrid sharding has two dimensions
        chosen = [c for n in dims for c in itertools.combinations(dims, n + 1)]
        return any(self._list_ranks(weight.device_mesh, c) == {*ranks} for c in chosen)

    def list_ranks(self, weight: Any) -> set[int]:
        """Return the global ranks that hold parts of a weight; none if it is not sharded."""
        if weight not in self._shards:
            return set()
        return self._list_ranks(weight.device_mesh, range(weight.device_mesh.ndim))

    @staticmethod
    def _list_ranks(mesh: Any, dims: Collection[int]) -> set[int]:
        """Return the global ranks that differ from this one in no other dimensions than `dims`."""
        here = mesh.get_coordinate()
        index = tuple(slice(None) if d in dims else here[d] for d in range(mesh.ndim))
        return {*mesh.mesh[index].flatten().tolist()}

    # ---- the entries of the optimizer's state, in the caller's optimizer and in states

    def get_weight(self, parameter: Any) -> Any:
        """Return the weight of a shard; another parameter itself."""
        return self._weights.get(id(parameter), parameter)

    def wrap(self, value: Any, weight: Any) -> Any:
        """Return an entry of a weight, of which `value` is this rank's part, as a DTensor in the
        same memory; the value itself if it is not of the shape of the weight's shard.
        """
        from torch.distributed.tensor import DTensor

        is_part = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not is_part or weight not in self._shards or value.shape != self._shards[weight].shape:
            return value
        return DTensor.from_local(
            value.detach(),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )

    def export(
        self, name: str, value: torch.Tensor, weights: Mapping[str, Any], is_whole: bool
    ) -> torch.Tensor:
        """Return the DTensor of a weight or of an entry of the optimizer's state for it; with
        `is_whole` the whole tensor, where all ranks of its mesh call this alike. `weights`: by
        name.
        """
        value = self.wrap(value, weights.get(name))
        # a plain tensor has no parts
        return value.full_tensor() if is_whole and hasattr(value, "full_tensor") else value

    def shard(self, value: torch.Tensor, weight: Any) -> torch.Tensor:
        """Return a whole tensor, or a DTensor, sharded as a weight."""
        # imported here, because the IPUs' torch 2.0.1 has no such module
        from torch.distributed.tensor import DTensor, distribute_tensor

        value = value.to(weight.device)
        if isinstance(value, DTensor):
            return value.redistribute(weight.device_mesh, weight.placements)
        # every rank has the whole value: no rank sends it to the others
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)

    def shard_entries(self, entries: Mapping[str, Any], weight: Any) -> dict[str, Any]:
        """Return a weight's entries with those of its shape sharded."""
        return {
            name: self.shard(value, weight)
            if getattr(value, "shape", None) == weight.shape
            else value
            for name, value in entries.items()
        }

    def import_weights(
        self, tensors: Mapping[str, torch.Tensor], model: nn.Module
    ) -> dict[str, torch.Tensor]:
        """Return a state dict with the whole tensors of sharded weights sharded."""
        weights = dict(model.named_parameters(remove_duplicate=False))
        return {
            name: self.shard(value, weights[name]) if weights.get(name) in self._shards else value
            for name, value in tensors.items()
        }

    def import_entries(
        self, tensors: Mapping[str, torch.Tensor], model: nn.Module
    ) -> dict[str, torch.Tensor]:
        """Return the optimizer's entries, keyed `parameter/entry`, with those of the weights' shape
        cut to this rank's shards.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        local = {}
        for key, value in tensors.items():
            weight: Any = weights.get(key.rpartition("/")[0])
            is_whole = weight in self._shards and value.shape == weight.shape
            local[key] = self.shard(value, weight).to_local() if is_whole else value  # type: ignore[attr-defined]
        return local


class ShardEntries(MutableMapping):  # type: ignore[type-arg]
    """The entries of a weight in the caller's optimizer, which are DTensors, as those of its shard:
    plain tensors in the same memory.
    """

    def __init__(self, entries: dict[str, Any], weight: Any, shards: Shards) -> None:
        self._entries = entries
        self._weight = weight
        self._shards = shards

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        return value.to_local() if hasattr(value, "to_local") else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = self._shards.wrap(value, self._weight)

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def list_sharded(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are DTensors."""
    from torch.distributed.tensor import DTensor

    return [p for p in model.parameters() if isinstance(p, DTensor)]
