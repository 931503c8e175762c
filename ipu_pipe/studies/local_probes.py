"""What local-parallel training does to gradients, generalization, capacity and features (Laskin et al. 2020, section 5).

angles    between each block's local gradient and the true one, over training                               Figure 6(a)
chunks    training and test results of blocks of k stages, from greedy (k = 1) to backpropagation (all)     Figure 6(b)
labels    how well random labels are learned, by backpropagation and by local methods                       Figure 6(c)

A run of a probe is a function from a config to plain data. Everything is trained by the emulator.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config
from ipu_pipe.config.yaml_files import merge_keys
from ipu_pipe.data import DataSource, TensorData
from ipu_pipe.data.batches import Pair
from ipu_pipe.data.images import ImageFolder
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import TEST_BATCH, EvaluationResult, Tally
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import compute_losses, get_blocks
from ipu_pipe.model.batch import call_model, clone_tensors, count_samples, get_first_tensor, take_samples
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.probe import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import buffers_restored, modes_restored, undisturbed
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.studies.worker_pool import run_in_workers

Say = Callable[[str], None]
LOCAL = tuple(name for name, method in METHODS.items() if method.structure is not None)
SOURCE = "Laskin et al. 2020 (Parallel Training of Deep Networks with Local Updates)"


# ---- angles


class Angle(NamedTuple):
    """The angle between two gradients in degrees, 0 to 180, and its cosine. Below 90 one descends the other's loss too."""

    degrees: float
    cosine: float


class GradientProbe:
    """Measures the angle between each block's local gradient and the true one, on one fixed batch.

    The local gradient is that of the block's own loss; a layer of several blocks has the mean of theirs. The true gradient
    is that of the last block's loss through the whole model. Both are taken at the same weights, in training mode, with the
    same buffers and random draws (`seed`); weights, buffers, gradients, modes and random states are left as they were. Raise
    `BadInput` if `model` has no blocks; it must be between two updates.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: Any, y: Any, seed: int = 0) -> None:
        blocks = get_blocks(model)
        if blocks is None:
            raise BadInput(f"model: {type(model).__name__}: has no blocks that are trained by losses of their own")
        self._model, self._loss, self._x, self._y, self._seed, self._blocks = model, loss, x, y, seed, blocks
        self._random = observe_effects(model, clone_tensors(x)).draws
        # the parameters of each block without its head; none where they are frozen
        self._parameters = [
            [t for t in piece.tensors() if isinstance(t, nn.Parameter) and t.requires_grad] for piece in blocks.pieces
        ]

    def measure(self) -> List[Optional[Angle]]:
        """Return the angle of each block; None where a gradient is zero, not finite, or the block does not train."""
        whole = self._blocks.model
        with undisturbed(self._model), modes_restored(whole):
            keyed = KeyedRandomness(self._model, self._random, self._seed, get_first_tensor(self._x).device)
            try:
                self._model.train()
                whole.train()
                local = self._gradients(self._model, keyed, self._blocks.average_duplicates)
                true = self._gradients(whole, keyed, lambda: None)
            finally:
                keyed.remove()
        return [compute_angle(a, b) for a, b in zip(local, true)]

    def _gradients(self, model: nn.Module, keyed: KeyedRandomness, finish: Callable[[], None]) -> List[torch.Tensor]:
        """Return the gradients of each block as one float64 vector."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with buffers_restored(self._model), buffers_restored(self._blocks.model):
            with keyed.forward(0):
                output = call_model(model, clone_tensors(self._x))
            with keyed.backward(0):
                torch.autograd.backward(compute_losses(self._loss, output, self._y))
        finish()
        return [
            _flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            for parameters in self._parameters
        ]


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors]) if tensors else torch.zeros(0)


def compute_angle(a: torch.Tensor, b: torch.Tensor) -> Optional[Angle]:
    """Return the angle between two vectors; None if one is zero or not finite.

    By Kahan's formula 2 atan(|a/|a| - b/|b|| / |a/|a| + b/|b||), which is exact for small angles, where the arc cosine is not.
    """
    lengths = float(a.norm()), float(b.norm())
    if not all(0 < length < math.inf for length in lengths):
        return None
    a, b = a / lengths[0], b / lengths[1]
    degrees = math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))
    return Angle(degrees, max(-1.0, min(1.0, float(a @ b))))


def run_angles(config: Config, method: str, every: int, samples: int) -> Dict[str, Any]:
    """Train by a local `method` and measure the angles before the first update, after every `every` updates and at the end.

    They are measured on a fixed batch of `samples` training samples. "points" have the update, its train_loss, and by block
    degrees and cosines, None where there is no angle. Raise `BadInput`.
    """
    start = time.monotonic()
    if method not in LOCAL:
        raise BadInput(f"--method: {method}: must be one of {', '.join(LOCAL)}")
    job = _build(config, {"method": method})
    blocks = get_blocks(job.model)
    assert blocks is not None
    if not job.data.train_batches_per_epoch(samples):
        raise BadInput(f"--samples: {samples}: the training set has not so many")
    probe = GradientProbe(
        job.model, job.loss, *job.prepare_batch(job.data.train_batch(0, 0, samples)), seed=config.seed
    )
    points: List[Dict[str, Any]] = []

    def measure(done: int, loss: Optional[float]) -> None:
        angles = probe.measure()
        points.append({
            "update": done,
            "train_loss": loss,
            "degrees": [None if angle is None else angle.degrees for angle in angles],
            "cosines": [None if angle is None else angle.cosine for angle in angles],
        })  # fmt: skip

    measure(0, None)
    _train(job, lambda k, result: measure(k, result.loss) if k % every == 0 or k == job.updates else None)
    names = [piece.names[0] for piece in blocks.pieces]
    return {"method": method, "blocks": names, "points": points, "seconds": time.monotonic() - start}


def find_stage_begins(config: Config) -> List[str]:
    """Return the names at which the second and later stages begin, each of which can be a block. Raise `BadInput`."""
    return _build(config, {"method": "local_greedy"}).part.begin_names()


def make_chunk_keys(begins: Sequence[str], size: int) -> Dict[str, Any]:
    """Return the config keys of blocks of `size` stages each, the last one shorter where they do not divide.

    All stages in one block is backpropagation. `begins` comes from `find_stage_begins`.
    """
    blocks = list(begins[size - 1 :: size])
    return {"method": "local_chunked", "method_args": {"blocks": blocks or 1}}


def run_chunks(config: Config, begins: Sequence[str], size: int, seed: int, samples: int) -> Dict[str, Any]:
    """Train blocks of `size` stages, then evaluate the model on as many training samples, without augmentation, as test samples.

    These are at most `samples`. Losses are means over samples, accuracies fractions. Raise `BadInput`.
    """
    start = time.monotonic()
    job = _build(config, {"seed": seed, **make_chunk_keys(begins, size)})
    count = min(samples, _count(read_training_batches(job, samples)), _count(_cut(_read_test(job), samples)))
    if count < 1:
        raise BadInput("data: has no test samples, with which training samples are compared")
    _train(job, lambda k, result: None)
    train = evaluate(job, read_training_batches(job, count))
    test = evaluate(job, _cut(_read_test(job), count))
    return {
        "chunk": size, "blocks": len(job.part), "seed": seed, "samples": count, "train_loss": train.loss,
        "train_accuracy": train.accuracy, "test_loss": test.loss, "test_accuracy": test.accuracy,
        "seconds": time.monotonic() - start,
    }  # fmt: skip


def run_labels(config: Config, label: str, keys: Mapping[str, Any], every: int) -> Dict[str, Any]:
    """Train on random labels without augmentation, by the method that the config `keys` name.

    "points" have the mean loss and accuracy in training over every `every` updates; "train_loss" and "train_accuracy" are
    those of the final weights in evaluation, on all training samples. Raise `BadInput`.
    """
    start = time.monotonic()
    job = _build(config, merge_keys(dict(keys), {"data": {"random_labels": True, "augment": False}}))
    points: List[Dict[str, Any]] = []
    window: List[StepResult] = []

    def gather(done: int, result: StepResult) -> None:
        window.append(result)
        if done % every == 0 or done == job.updates:
            right = [result.accuracy for result in window if result.accuracy is not None]
            points.append({
                "update": done,
                "train_loss": statistics.mean(result.loss for result in window),
                "train_accuracy": statistics.mean(right) if len(right) == len(window) else None,
            })  # fmt: skip
            window.clear()

    _train(job, gather)
    final = evaluate(job, read_training_batches(job, None))
    return {
        "label": label, "blocks": len(job.part), "points": points, "train_loss": final.loss, "train_accuracy": final.accuracy,
        "epochs": job.epoch(job.updates), "seconds": time.monotonic() - start,
    }  # fmt: skip


def _build(config: Config, keys: Dict[str, Any]) -> Job:
    if not get_backend(config).emulates:
        raise BadInput(f"backend.name: {config.backend.name}: probes run on the emulator")
    return build(configure(**merge_keys(config.to_dict(), keys)))


def _train(job: Job, after: Callable[[int, StepResult], None]) -> None:
    """Make all updates; call `after` each with the number of updates done and its result."""
    engine = make_engine(job, 0)
    try:
        for k in range(job.updates):
            after(k + 1, engine.step(k))
    finally:
        engine.close()


def read_training_batches(job: Job, samples: Optional[int]) -> Iterator[Pair]:
    """Yield the first `samples` (None: all) training samples without augmentation.

    Of a source that is not in memory these are whole microbatches of its first epoch as they come. Raise `BadInput` for
    folders of images, which are always augmented.
    """
    data: DataSource = job.data
    if isinstance(data, ImageFolder):
        raise BadInput("data: image_folder: gives no training images without augmentation: use another set")
    if isinstance(data, TensorData):
        as_test = copy.copy(data)
        as_test.test = data.train  # test samples are normalized but not augmented
        return _cut(map(job.split_batch, as_test.test_batches(TEST_BATCH)), samples)
    size = job.config.micro_batch_size
    batches = (data.train_batch(0, i, size) for i in range(data.train_batches_per_epoch(size) or 0))
    return _cut(map(job.split_batch, batches), samples)


def _read_test(job: Job) -> Iterator[Pair]:
    return map(job.split_batch, job.data.test_batches(TEST_BATCH))


def _cut(batches: Iterable[Pair], samples: Optional[int]) -> Iterator[Pair]:
    left = math.inf if samples is None else samples
    for x, y in batches:
        take = int(min(left, count_samples(x)))
        yield take_samples(x, take), take_samples(y, take)
        left -= take
        if left <= 0:
            return


def _count(batches: Iterable[Pair]) -> int:
    return sum(count_samples(x) for x, _ in batches)


def evaluate(job: Job, batches: Iterable[Pair]) -> EvaluationResult:
    """Return the mean loss and accuracy (a fraction) of the model's own output over `batches`, in evaluation mode."""
    tally, model = Tally.of(job), job.model
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in batches:
            x, y = job.move_to_device(x, y)
            tally.add(call_model(model, x), y, count_samples(x))
    return tally.evaluation


def run_in_processes(
    work: Callable[..., Dict[str, Any]], runs: Mapping[str, Sequence[Any]], jobs: int, say: Say
) -> List[Dict[str, Any]]:
    """Return `work(*arguments)` of each of `runs` (label -> arguments) in their order; a fault of one ends all.

    `jobs` go on at a time, in processes of their own (in this one if 1).
    """
    done: Dict[str, Dict[str, Any]] = {}
    here = ((label, work(*arguments)) for label, arguments in runs.items())
    with contextlib.closing(here if jobs == 1 else run_in_workers(work, runs, jobs)) as results:
        for label, result in results:
            done[label] = result
            say(f"[{len(done)}/{len(runs)}] {label} ({result['seconds']:.0f} s)")
    return [done[label] for label in runs]
