"""All that hangs on one set of IPUs: a copy of the model, its executors and its input."""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.ipu.evaluation import filled, in_calls, judged
from ipu_pipe.backends.ipu.executors import Executors, Snapshot
from ipu_pipe.backends.ipu.faults import told
from ipu_pipe.backends.ipu.feed import Calls, Feed, as_input
from ipu_pipe.backends.ipu.options import make_options
from ipu_pipe.backends.ipu.poprun import Instance
from ipu_pipe.backends.ipu.profile import Timeline
from ipu_pipe.backends.ipu.results import losses_of, results_of
from ipu_pipe.backends.ipu.wrapping import Wrapped, unsplit, wrap
from ipu_pipe.job.evaluation import EvaluationResult, Tally, load_test_batches
from ipu_pipe.job.ipu.config import DataLoading
from ipu_pipe.job.ipu.placement import Placement, reserved
from ipu_pipe.job.record import Job
from ipu_pipe.model.randomness import derive_seed


class Session:
    """The whole model on its IPUs, and the input of its calls from update `held.update` on."""

    def __init__(self, job: Job, held: Snapshot, share: Instance, place: Placement, timeline: Timeline) -> None:
        config = job.config
        self.job, self.ipu, self.share, self.place = job, config.ipu, share, place
        self._first = held.update
        wrapped = wrap(job.model, job.loss, job.part, config.precision, self.ipu)
        _load(wrapped, held.model)
        self.executors = Executors(job, wrapped, self._options, held.optimizer, held.update, timeline, "IPUs")
        self.calls = Calls(
            job.data, config, job.updates_per_epoch, held.update, job.updates, share.first, share.replicas
        )
        with told("starting the data loader"):
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self._feed = Feed(self.calls, job.data, loading, self.executors.training_options)

    def _options(self, training: bool) -> Any:
        base = None
        if self.share.base is not None:
            asked = reserved(self.place.ipus) if self.ipu.auto_round_num_ipus else self.place.ipus
            base = self.share.base(asked)
        seed = derive_seed(self.job.config.seed, "ipu", self._first) % 2**32
        with torch.random.fork_rng(devices=[]):  # randomSeed seeds the host's generator, too
            ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
            return make_options(self.job.config, self.job.method, self.place, training, seed, base, ipu_id)

    def compile(self) -> None:
        """Compile both models, run none. Compiling attaches, and the second model needs the first one's IPUs."""
        training = self.executors.training
        with told("compiling the training model"):
            training.compile(*self.calls[0])
            if training.isAttachedToDevice():
                training.detachFromDevice()
        self.make_inference()

    def call(self, k: int) -> List[StepResult]:
        """Updates k to k + D of one call."""
        x, y = self._feed.take()
        found = self.executors.call(range(k, k + self.ipu.device_iterations), k, x, y)
        return results_of(self.job, k, found)

    def make_inference(self) -> Any:
        """The inference model, compiled."""
        return self.executors.make_inference(self._example)

    def _example(self, inference: Any) -> torch.Tensor:
        return filled(self.job.example[0], self._rows(inference))

    def _rows(self, inference: Any) -> int:
        """Samples of an evaluation's call."""
        options = inference.options
        return int(self.job.config.micro_batch_size * options.device_iterations * options.replication_factor)

    def evaluate(self) -> List[EvaluationResult]:
        """The test set on the inference model, with the training model's weights."""
        detach = self.ipu.detach_for_evaluation
        inference = self.executors.enter_evaluation(self._example, detach)
        found = self._tally(inference)
        self.executors.leave_evaluation(detach)
        return found

    def _tally(self, inference: Any) -> List[EvaluationResult]:
        tallies = [Tally.of(self.job) for _ in range(losses_of(self.job))]
        for x, y, count in in_calls(load_test_batches(self.job), self._rows(inference)):
            with told("evaluation"):
                outputs = inference(as_input(x, self.job.config.precision))
            for tally, output in zip(tallies, outputs):
                tally.add(judged(output, count), y[:count], count)
        return [tally.evaluation for tally in tallies]

    def snapshot(self, update: int, with_optimizer: bool = True) -> Snapshot:
        """Weights and optimizer state as they are, copies."""
        return self.executors.snapshot(update, with_optimizer)

    def drop(self) -> None:
        """Give the IPUs back and end the input."""
        self.executors.drop()
        self._feed.close()


def _load(wrapped: Wrapped, tensors: Dict[str, torch.Tensor]) -> None:
    own = {unsplit(name): t for name, t in wrapped.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
