"""Predictions of a model, or of the weights of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Union

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.data import DataSource
from ipu_pipe.data.batches import LABELS, split_batch
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import call_model, check_holds_tensors, list_tensors, map_tensors
from ipu_pipe.model.restoring import modes_restored
from ipu_pipe.run import checkpoint
from ipu_pipe.run.factories import make_model
from ipu_pipe.text import describe_kind


def predict(
    model: Union[nn.Module, str, Path],
    data: Any,
    *,
    into: Optional[nn.Module] = None,
    batch_size: int = 128,
) -> Any:
    """Return the outputs of `model` for all inputs of `data`, in order, in evaluation mode, on the CPU.

    The result is a tensor (samples, ...), or what the model returns with such tensors in it. `model` is a model, left as it was,
    or the folder of a run (its newest checkpoint) or of a checkpoint, whose weights are loaded into `into`, or into the model
    that the run's config names. `data` is a DataSource (its test set), a loader or other iterable of batches, whose labels are
    left out, or the inputs themselves, a tensor or a mapping of tensors, taken `batch_size` at a time. Raise `BadInput`.
    """
    if not (isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1):
        raise BadInput(f"predict: batch_size: {describe_kind(batch_size)}: must be a whole number >= 1")
    if not (into is None or isinstance(into, nn.Module)):
        raise BadInput(f"predict: into: {describe_kind(into)}: must be a torch.nn.Module")
    if isinstance(model, (str, os.PathLike)):
        model = _with_weights(Path(model), into)
    elif not isinstance(model, nn.Module):
        raise BadInput(
            f"predict: model: {describe_kind(model)}: must be a torch.nn.Module, or the folder of a run or checkpoint"
        )
    elif into is not None:
        raise BadInput("predict: into: goes with the folder of a run or checkpoint, whose weights it gets")
    first = next(model.parameters(), None)
    like = first if first is not None else torch.zeros(0)
    outputs: List[Any] = []
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x in _inputs(data, batch_size):
            check_holds_tensors(x, "inputs")
            outputs.append(tree_map(_on_host, call_model(model, map_tensors(lambda value: _as(value, like), x))))
    if not outputs:
        raise BadInput("predict: data: holds no samples")
    return _joined(outputs)


def _with_weights(path: Path, into: Optional[nn.Module]) -> nn.Module:
    """Return the model with the weights of a run or checkpoint."""
    if not path.exists():
        raise BadInput(f"predict: {path}: no such folder or file")
    above = list(path.absolute().parents)[:2]
    run = next((folder for folder in (path, *above) if (folder / "config.yaml").is_file()), None)
    weights = checkpoint.find_newest(path)
    if into is None:
        if run is None:
            raise BadInput(
                f"predict: {path}: is not in the folder of a run, whose config names the model: give into=..."
            )
        config = load_recorded(run / "config.yaml")
        if config.model.entry == GIVEN:
            raise BadInput(f"predict: {run}: Python gave the run its model: give one of its kind, into=...")
        into = make_model(config)
    checkpoint.load_weights(into, checkpoint.read_weights(weights), str(weights))
    return into


def _inputs(data: Any, size: int) -> Iterator[Any]:
    """Yield batches of inputs."""
    if isinstance(data, DataSource):
        yield from (_input(batch, getattr(data, "labels", None)) for batch in data.test_batches(size))
    elif isinstance(data, (torch.Tensor, Mapping)) or not isinstance(data, Iterable):
        counts = {len(value) for value in list_tensors(data) if value.dim()}
        if len(counts) != 1:
            raise BadInput(
                f"predict: data: {describe_kind(data)}: must be a DataSource, a loader, or tensors of one length"
            )
        for start in range(0, counts.pop(), size):
            yield map_tensors(lambda value, start=start: value[start : start + size], data)  # type: ignore[misc]
    else:
        yield from (_input(batch, None) for batch in data)


def _input(batch: Any, labels: Optional[str]) -> Any:
    """Return a batch without its labels, if it has any."""
    if isinstance(batch, Mapping):
        known = [name for name in (labels, *LABELS) if name in batch]
        return split_batch(batch, labels)[0] if known else batch
    if isinstance(batch, (tuple, list)):
        return batch[0] if len(batch) == 1 else split_batch(batch)[0]
    return batch


def _as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Move a tensor to the model's device, floats to its precision."""
    return value.to(like.device, like.dtype) if value.is_floating_point() else value.to(like.device)


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _joined(found: List[Any]) -> Any:
    """Join the outputs of batches to one of all samples; anything but a tensor (b, ...) is that of the first batch."""
    leaves, shape = tree_flatten(found[0])
    every = [tree_flatten(output)[0] for output in found]
    joined = [
        torch.cat([flat[i] for flat in every]) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
        for i, leaf in enumerate(leaves)
    ]
    return tree_unflatten(joined, shape)
