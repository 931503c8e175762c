"""What local-parallel training does to gradients, generalization, capacity and features (Laskin et al. 2020, section 5).

angles    between each block's local gradient and the true one, over training                               Figure 6(a)
chunks    training and test results of blocks of k stages, from greedy (k = 1) to backpropagation (all)     Figure 6(b)
labels    how well random labels are learned, by backpropagation and by local methods                       Figure 6(c)
filters   a first layer's weights as an image                                                               Figure 7

A run of a probe is a function from a config to plain data; `in_processes` does several at a time. Everything is trained by the
emulator.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

import torch

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config
from ipu_pipe.config.yaml_files import merge_keys
from ipu_pipe.data import DataSource, TensorData
from ipu_pipe.data.batches import Pair
from ipu_pipe.data.images import ImageFolder
from ipu_pipe.errors import BadInput
from ipu_pipe.job.evaluation import TEST_BATCH, Tally
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import few, sample_count
from ipu_pipe.model.restoring import modes_restored
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.studies.gradient_angles import GradientProbe
from ipu_pipe.studies.worker_pool import run_in_workers

Say = Callable[[str], None]
LOCAL = tuple(name for name, method in METHODS.items() if method.structure is not None)
SOURCE = "Laskin et al. 2020 (Parallel Training of Deep Networks with Local Updates)"


def angle_run(config: Config, method: str, every: int, samples: int) -> Dict[str, Any]:
    """Train by a local `method` and measure the angles before the first update, after each `every` and at the end, on a fixed
    batch of `samples` training samples. `points`: update, train_loss (of that update), and by block degrees and cosines, null
    where there is no angle. Raises BadInput."""
    start = time.monotonic()
    if method not in LOCAL:
        raise BadInput(f"--method: {method}: must be one of {', '.join(LOCAL)}")
    job = _build(config, {"method": method})
    blocks = get_blocks(job.model)
    assert blocks is not None
    if not job.data.train_batches_per_epoch(samples):
        raise BadInput(f"--samples: {samples}: the training set has not so many")
    probe = GradientProbe(job.model, job.loss, *job.ready(job.data.train_batch(0, 0, samples)), seed=config.seed)
    points: List[Dict[str, Any]] = []

    def measure(done: int, loss: Optional[float]) -> None:
        found = probe.angles()
        points.append({
            "update": done,
            "train_loss": loss,
            "degrees": [None if each is None else each.degrees for each in found],
            "cosines": [None if each is None else each.cosine for each in found],
        })  # fmt: skip

    measure(0, None)
    _train(job, lambda k, result: measure(k, result.loss) if k % every == 0 or k == job.updates else None)
    names = [piece.names[0] for piece in blocks.pieces]
    return {"method": method, "blocks": names, "points": points, "seconds": time.monotonic() - start}


def stage_begins(config: Config) -> List[str]:
    """Names at which the second and later stages begin, each of which can be a block. Raises BadInput."""
    return _build(config, {"method": "local_greedy"}).part.begin_names()


def chunked(begins: Sequence[str], size: int) -> Dict[str, Any]:
    """Config keys of blocks of `size` stages each, the last one shorter where they do not divide; all in one block is
    backpropagation. `begins`: as of `stage_begins`."""
    blocks = list(begins[size - 1 :: size])
    return {"method": "local_chunked", "method_args": {"blocks": blocks or 1}}


def chunk_run(config: Config, begins: Sequence[str], size: int, seed: int, samples: int) -> Dict[str, Any]:
    """Train blocks of `size` stages and evaluate the model on as many training samples, without augmentation, as test samples:
    at most `samples`. Losses are means over samples, accuracies fractions. Raises BadInput."""
    start = time.monotonic()
    job = _build(config, {"seed": seed, **chunked(begins, size)})
    count = min(samples, _count(training_batches(job, samples)), _count(_cut(_test(job), samples)))
    if count < 1:
        raise BadInput("data: has no test samples, with which training samples are compared")
    _train(job, lambda k, result: None)
    train = measured(job, training_batches(job, count))
    test = measured(job, _cut(_test(job), count))
    return {
        "chunk": size, "blocks": len(job.part), "seed": seed, "samples": count, "train_loss": train.loss,
        "train_accuracy": train.accuracy, "test_loss": test.loss, "test_accuracy": test.accuracy,
        "seconds": time.monotonic() - start,
    }  # fmt: skip


def label_run(config: Config, label: str, keys: Mapping[str, Any], every: int) -> Dict[str, Any]:
    """Train on random labels without augmentation by the method that the config `keys` say. `points`: mean loss and accuracy in
    training over each `every` updates; `train_loss` and `train_accuracy`: of the final weights in evaluation, on all training
    samples. Raises BadInput."""
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
    found = measured(job, training_batches(job, None))
    return {
        "label": label, "blocks": len(job.part), "points": points, "train_loss": found.loss, "train_accuracy": found.accuracy,
        "epochs": job.epoch(job.updates), "seconds": time.monotonic() - start,
    }  # fmt: skip


def _build(config: Config, keys: Dict[str, Any]) -> Job:
    if not get_backend(config).emulates:
        raise BadInput(f"backend.name: {config.backend.name}: probes run on the emulator")
    return build(configure(**merge_keys(config.to_dict(), keys)))


def _train(job: Job, after: Callable[[int, StepResult], None]) -> None:
    """All updates; `after` each, with how many are done, what it measured."""
    engine = make_engine(job, 0)
    try:
        for k in range(job.updates):
            after(k + 1, engine.step(k))
    finally:
        engine.close()


def training_batches(job: Job, samples: Optional[int]) -> Iterator[Pair]:
    """The first `samples` (None: all) training samples without augmentation; of a source that is not held in memory, whole
    microbatches of its first epoch as they come. Raises BadInput for folders of images, which are always augmented."""
    data: DataSource = job.data
    if isinstance(data, ImageFolder):
        raise BadInput("data: image_folder: gives no training images without augmentation: use another set")
    if isinstance(data, TensorData):
        held = copy.copy(data)
        held.test = data.train  # which it normalizes and does not augment
        return _cut(map(job.parted, held.test_batches(TEST_BATCH)), samples)
    size = job.config.micro_batch_size
    each = (data.train_batch(0, i, size) for i in range(data.train_batches_per_epoch(size) or 0))
    return _cut(map(job.parted, each), samples)


def _test(job: Job) -> Iterator[Pair]:
    return map(job.parted, job.data.test_batches(TEST_BATCH))


def _cut(batches: Iterable[Pair], samples: Optional[int]) -> Iterator[Pair]:
    left = math.inf if samples is None else samples
    for x, y in batches:
        take = int(min(left, sample_count(x)))
        yield few(x, take), few(y, take)
        left -= take
        if left <= 0:
            return


def _count(batches: Iterable[Pair]) -> int:
    return sum(sample_count(x) for x, _ in batches)


def measured(job: Job, batches: Iterable[Pair]) -> Measured:
    """Mean loss and accuracy (a fraction) of the model's own output over `batches`, in evaluation mode."""
    tally, model = Tally.of(job), job.model
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in batches:
            x, y = job.to_device(x, y)
            tally.add(call(model, x), y, sample_count(x))
    return tally.measured


def in_processes(
    work: Callable[..., Dict[str, Any]], runs: Mapping[str, Sequence[Any]], jobs: int, say: Say
) -> List[Dict[str, Any]]:
    """`work(*arguments)` of each of `runs`, label -> arguments, `jobs` at a time in processes of their own (in this one if 1);
    in the order of `runs`. A fault of one ends all."""
    done: Dict[str, Dict[str, Any]] = {}
    here = ((label, work(*arguments)) for label, arguments in runs.items())
    with contextlib.closing(here if jobs == 1 else run_in_workers(work, runs, jobs)) as results:
        for label, result in results:
            done[label] = result
            say(f"[{len(done)}/{len(runs)}] {label} ({result['seconds']:.0f} s)")
    return [done[label] for label in runs]
