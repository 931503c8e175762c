"""Compute the predictions of a model, or of the weights of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.data import DataSource
from ipu_pipe.data.sources import LABELS, split_batch
from ipu_pipe.errors import BadInput
from ipu_pipe.files import parse_path
from ipu_pipe.job.factories import make_model
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.model.batch import call_model, list_tensors, map_tensors, require_tensors
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.store import checkpoint
from ipu_pipe.text import describe_kind


def predict(
    model: nn.Module | str | Path,
    data: Any,
    *,
    into: nn.Module | None = None,
    batch_size: int = 128,
) -> Any:
    """Return the outputs of `model` for all inputs of `data`, in order, in evaluation mode, on the
    CPU.

    The result is a tensor (samples, ...), or, if the model returns a nest, that nest with such
    tensors.
    model: a model, which is left as it was; or the folder of a run (its newest checkpoint) or of a
        checkpoint, whose weights are loaded into `into`, or into the model that the run's config
        names
    data: a DataSource (its test set), a loader or other iterable of batches, whose labels are left
        out; or the inputs, a tensor or a mapping of tensors, taken `batch_size` at a time

    Raise `BadInput`.
    """
    if batch_size < 1:
        raise BadInput(f"predict: batch_size: {batch_size}: must be a whole number >= 1")
    if isinstance(model, (str, os.PathLike)):
        model = load_model(parse_path(model, "predict: model"), into)
    elif not isinstance(model, nn.Module):
        raise BadInput(
            f"predict: model: {describe_kind(model)}: must be a torch.nn.Module, or the folder of "
            f"a run or checkpoint"
        )
    elif into is not None:
        raise BadInput(
            "predict: into: must be None unless model is the folder of a run or checkpoint"
        )
    # a model without parameters computes on the CPU in float32
    like = next(model.parameters(), torch.zeros(0))
    outputs: list[Any] = []
    with torch.no_grad(), restore_modes(model):
        model.eval()
        for x in _list_inputs(data, batch_size):
            require_tensors(x, "inputs")
            # whole numbers, such as tokens, stay what they are
            x = map_tensors(
                lambda t: t.to(like.device, like.dtype if t.is_floating_point() else t.dtype), x
            )
            output = call_model(model, x)
            # at once: the outputs of a whole data set may not fit a GPU
            outputs.append(
                tree_map(
                    lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, output
                )
            )
    if not outputs:
        raise BadInput("predict: data: contains no samples")
    # values that are not tensors, or have no dimension, are taken from the first batch
    leaves, shape = tree_flatten(outputs[0])
    columns = zip(leaves, *(tree_flatten(output)[0] for output in outputs[1:]))
    joined = [
        torch.cat(column) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
        for leaf, column in zip(leaves, columns)
    ]
    return tree_unflatten(joined, shape)


def load_model(path: Path, into: nn.Module | None) -> nn.Module:
    """Return the model with the weights of a run or checkpoint."""
    if not path.exists():
        raise BadInput(f"predict: {path}: no such folder or file")
    # a checkpoint is RUN/checkpoints/step-K, and the config is in RUN
    above = list(path.absolute().parents)[:2]
    run = next((folder for folder in (path, *above) if (folder / "config.yaml").is_file()), None)
    weights = checkpoint.find_newest(path)
    if into is None:
        config = load_recorded(run / "config.yaml") if run is not None else None
        if config is None or config.model.entry == GIVEN:
            raise BadInput(
                f"predict: {path}: no config there names the model: pass a model of the same "
                f"class, into=..."
            )
        with attribute_faults(lambda: "before the weights are loaded"):
            into = make_model(config)
    checkpoint.load_weights(into, checkpoint.read_weights(weights), str(weights))
    return into


def _list_inputs(data: Any, size: int) -> Iterator[Any]:
    """Yield batches of inputs, without the labels that they may have."""
    if isinstance(data, (torch.Tensor, Mapping)) or not isinstance(data, (DataSource, Iterable)):
        # a tensor without dimensions has no length
        counts = {len(value) if value.dim() else -1 for value in list_tensors(data)}
        if len(counts) != 1 or -1 in counts:
            raise BadInput(
                f"predict: data: {describe_kind(data)}: must be a DataSource, a loader, or tensors "
                f"of one length"
            )
        for start in range(0, counts.pop(), size):
            yield map_tensors(lambda value, start=start: value[start : start + size], data)  # type: ignore[misc]
        return
    labels = getattr(data, "labels", None) if isinstance(data, DataSource) else None
    for batch in data.test_batches(size) if isinstance(data, DataSource) else data:
        if isinstance(batch, Mapping):
            # data to predict often have no labels, which split_batch would miss
            has_labels = any(name in batch for name in (labels, *LABELS))
            yield split_batch(batch, labels)[0] if has_labels else batch
        elif isinstance(batch, (tuple, list)):
            # a TensorDataset of inputs alone gives batches of one part
            yield batch[0] if len(batch) == 1 else split_batch(batch)[0]
        else:
            yield batch
