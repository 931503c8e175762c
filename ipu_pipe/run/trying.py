"""Whether model, loss and data fit, found out before anything trains: by shape, and by the numbers of as few samples as tell."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Optional, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.data.labels import LabelRange, label_range
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.evaluation import test_batches
from ipu_pipe.job.metrics import DEFAULT
from ipu_pipe.job.record import Setup
from ipu_pipe.model.asking import labels_of
from ipu_pipe.model.buffers import all_restored
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import described, lead, sample_count
from ipu_pipe.model.outputs import SCORES, OfOutput, OwnLoss, Part, fields, plain, scores, takes_all, told
from ipu_pipe.model.precision import plain_loss
from ipu_pipe.model.probe import Loss
from ipu_pipe.model.shapes import by_shape, looks_at_values, pays, stand_in

FEW = 2  # samples; a batch norm refuses one


def try_model(model: nn.Module, loss: Loss, example: Tuple[Any, Any], labels: Any) -> Optional[LabelRange]:
    """Run a forward of the microbatch with the loss, so that a model that does not fit the data, or cannot learn, is told in one
    line. `labels`: the example's, with their numbers where it is a shape. Returns what labels the loss allows, where it is
    known. Raises BadInput."""
    x, y = example
    device, is_meta = lead(x).device, lead(x).is_meta
    devices = [device] if device.type == "cuda" else []
    output: Any = None
    taken: Any = None
    value: Any = None
    try:
        with contextlib.ExitStack() as inside:
            inside.enter_context(torch.random.fork_rng(devices=devices))
            inside.enter_context(by_shape(model) if is_meta else all_restored(model))
            output = None if is_meta else _few(model, x)
            if output is None:
                output = call(model, x)
            taken = scores(loss, output)
            allowed = label_range(plain_loss(plain(loss)), taken, labels_of(y))
            if allowed is not None:
                allowed.check(labels_of(labels))
            value = loss(output, y)
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
                value.item()  # what a GPU's kernels find wrong is told here, not wherever the run waits for them next
    except BadInput:
        raise
    except Exception as error:  # whatever the user's model raises
        if fields(output) and takes_all(loss):
            raise BadInput(
                f"model: returns {told(output)}, and the loss wants one of these ({summarize(error)}): say which is the output,"
                f" as model.output: {_likely(output)}, or take loss: model if it holds its own"
            ) from error
        if output is not None and value is None:
            key = "model.output" if taken is None and isinstance(loss, OfOutput) else "loss"
            given = told(output) + (f" and labels {described(labels_of(y))}" if key == "loss" else "")
            raise BadInput(f"{key}: it fails on what the model returns, {given}: {summarize(error)}") from error
        labelled = ", which loss: model calls with the labels too" if isinstance(plain(loss), OwnLoss) else ""
        raise BadInput(
            f"model: it fails on a microbatch of shape {described(x)}{labelled}: {summarize(error)}"
        ) from error
    if isinstance(output, torch.Tensor) and isinstance(loss, (OfOutput, OwnLoss)) and isinstance(loss.take, Part):
        said = loss.take.key
        raise BadInput(f"model.output: {said}: the model returns {told(output)}, of which it is no part: leave it out")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise BadInput("loss: must give one number, the mean over the microbatch")
    if not value.requires_grad:
        raise BadInput("loss: depends on no parameter of the model that needs a gradient: nothing to train")
    return allowed


def try_metrics(setup: Setup) -> None:
    """Have the metrics look at a batch of the test set, as evaluations will, so that one that does not fit is told before
    anything is written. Raises BadInput."""
    metrics = [metric for metric in setup.metrics if metric not in DEFAULT]  # which fits all
    if not metrics or setup.device.type == "meta":
        return
    devices = [setup.device] if setup.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), all_restored(setup.model):
        setup.model.eval()
        for x, given in itertools.islice(test_batches(setup), 1):
            taken, y = scores(setup.loss, call(setup.model, x)), labels_of(given)
            for metric in metrics:
                try:
                    metric.begin().add(taken, y, sample_count(x))
                except BadInput:
                    raise
                except Exception as error:  # whatever the user's metric raises
                    kinds = f"{told(taken)} and labels {described(y)}"
                    raise BadInput(f"metrics: {metric.name}: fails on {kinds}: {summarize(error)}") from error


def _likely(output: Any) -> Any:
    return SCORES if SCORES in fields(output) else fields(output)[0]


def _few(model: nn.Module, x: Any) -> Any:
    """Outputs of the shape that the microbatch's have, with the numbers of its first samples over and over. None where that does
    not tell what all of its samples would: where the forward of all fails by shape, or looks at values."""
    if not isinstance(x, torch.Tensor) or len(x) <= FEW or not x.is_floating_point() or not pays(model, x):
        return None
    try:
        with by_shape(model), looks_at_values() as looks, torch.no_grad():
            whole = model(stand_in(x))
        if looks():
            return None
        few = model(x[:FEW].clone())
        again = torch.arange(len(x)) % FEW
        made = tree_map(lambda t: t[again] if isinstance(t, torch.Tensor) else t, few)
    except Exception:  # a model for microbatches of one size, say: all samples tell
        return None
    shapes = [
        [t.shape if isinstance(t, torch.Tensor) else t for t in tree_flatten(value)[0]] for value in (whole, made)
    ]
    return made if shapes[0] == shapes[1] else None
