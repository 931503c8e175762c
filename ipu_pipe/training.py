"""The training loop: steps, evaluation, checkpoints and all outputs of a run."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import nn

from ipu_pipe import checkpoint, summary, update
from ipu_pipe.backends.emulator import Emulator, right_answers
from ipu_pipe.config import Config, as_recorded, differences, dump, load_config
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job import Job, Setup, build, has_tensorboard, set_up
from ipu_pipe.probe import Loss
from ipu_pipe.progress import Progress
from ipu_pipe.rundir import Measured, Position, RunDir, check_folder

TEST_BATCH = 128  # samples of one evaluation forward; BatchNorm does not see it, it evaluates by running statistics


def train(
    config: Config,
    out: Union[str, Path],
    *,
    model: Optional[nn.Module] = None,
    data: Optional[DataSource] = None,
    loss: Optional[Loss] = None,
    optimizer: Optional[update.OptimizerFactory] = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Dict[str, Any]:
    """Train by `config` and write the run into the folder `out`; returns the summary (as in `summary.json`).

    A model, data source, loss or optimizer factory given here takes the place of the config's entry. `resume` goes on
    from the newest checkpoint, with the same numbers as if never interrupted. Raises BadInput before anything is written
    where the job is not possible, RunFault where the loss is not finite.
    """
    out = Path(out)
    config, ended = _checked(config, out, resume, overwrite)
    if ended is not None:
        Progress(quiet).say(f"{out}: this run is finished: nothing to resume")
        return ended
    job = build(config, model, data, loss, optimizer)
    run = RunDir(out, resume=resume, overwrite=overwrite)
    return _Run(job, run, Progress(quiet)).go(resume)


def check(config: Config, out: Union[str, Path], *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise BadInput where `train` would, without training or writing anything."""
    config, ended = _checked(config, Path(out), resume, overwrite)
    if ended is None:
        build(config)


def _checked(config: Config, out: Path, resume: bool, overwrite: bool) -> Tuple[Config, Optional[Dict[str, Any]]]:
    """The config to go on with, and the summary of a run to resume that is finished."""
    check_folder(out, resume, overwrite)
    if not resume:
        return config, None
    saved = out / "config.yaml"
    if not saved.is_file():
        raise BadInput(f"--resume: {out}: holds no run to resume")
    recorded = load_config(saved)
    config = as_recorded(recorded, config)
    changes = differences(recorded, config)
    if changes:
        raise BadInput([f"--resume: {saved}: {change}: the config of a run cannot change" for change in changes])
    run = RunDir(out, resume=True)
    if run.newest_checkpoint() is not None:  # which takes the place of the weights that the run began with
        config = config.model_copy(update={"init_from": None})
    return config, run.finished_summary()


class _Run:
    """One run in progress."""

    def __init__(self, job: Job, run: RunDir, progress: Progress) -> None:
        self.job, self.run, self.progress = job, run, progress
        self.position = Position()
        self.names = {parameter: name for name, parameter in job.model.named_parameters()}

    def go(self, resume: bool) -> Dict[str, Any]:
        job = self.job
        if resume:
            self._restore()
        else:
            self.run.write_text("config.yaml", dump(job.config))
        position = self.position
        self.run.open_metrics(position.update)
        self.progress.say(summary.opening(job, position.update))
        emulator = Emulator(
            job.model, job.loss, job.part, job.method, job.table, job.optimizer, job.rules, job.example,
            seed=job.config.seed, clip=(job.config.clip.norm, job.config.clip.scope) if job.config.clip else None,
            allow_nonfinite=job.config.allow_nonfinite, microbatch=position.update * job.config.gradient_accumulation,
        )  # fmt: skip
        try:
            with self._scalars() as scalars:
                if position.update == 0:
                    position.initial = self._evaluate(scalars)
                final: Optional[Measured] = None
                with self.progress.bar(job.updates, position.update) as bar:
                    while position.update < job.updates:
                        self._step(emulator, bar, scalars)
                        if job.evaluates_after(position.update):
                            final = self._evaluate(scalars, bar)
                        if job.saves_after(position.update):
                            self._save()
                if final is None:  # resumed after the last update, from a run killed before its summary was written
                    final = self._evaluate(None, record=False)
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the run is what must be told
                emulator.close()
            raise
        else:
            emulator.close()
        finally:
            self.run.close()
        return self._finish(emulator, final)

    def _step(self, emulator: Emulator, bar: Any, scalars: Any) -> None:
        job, position = self.job, self.position
        k = position.update
        if k % job.updates_per_epoch == 0:
            position.epoch_loss, position.epoch_updates = 0.0, 0
        start = time.perf_counter()
        result = emulator.step(self._microbatches(k))
        seconds = time.perf_counter() - start
        position.update += 1
        position.epoch_loss, position.epoch_updates = position.epoch_loss + result.loss, position.epoch_updates + 1
        if self.progress.steps:  # the first step of a process warms up
            position.seconds, position.timed_updates = position.seconds + seconds, position.timed_updates + 1
        self.progress.steps += 1
        rate = result.samples / seconds
        bar.advance(result.loss, result.accuracy, rate)
        if position.update % job.config.log.every == 0 or position.update == job.updates:
            epoch = position.update / job.updates_per_epoch
            self._log(
                scalars,
                step=position.update,
                epoch=epoch,
                train_loss=result.loss,
                lr=job.rate(k),
                samples_per_second=rate,
            )

    def _microbatches(self, k: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        job = self.job
        epoch, within = divmod(k, job.updates_per_epoch)
        accumulate = job.config.gradient_accumulation
        for index in range(within * accumulate, (within + 1) * accumulate):
            yield job.to_device(*job.data.train_batch(epoch, index, job.config.micro_batch_size))

    def _evaluate(self, scalars: Any, bar: Any = None, record: bool = True) -> Measured:
        test_loss, accuracy = evaluate(self.job)
        position = self.position
        if bar is not None:
            bar.evaluated(test_loss, accuracy)
        if record:
            epoch = position.update / self.job.updates_per_epoch
            self._log(scalars, step=position.update, epoch=epoch, test_loss=test_loss, test_accuracy=accuracy)
        if test_loss is not None and (position.best_loss is None or test_loss < position.best_loss) and position.update:
            position.best_loss, position.best_step = test_loss, position.update
        return test_loss, accuracy

    def _log(self, scalars: Any, **record: Any) -> None:
        self.run.metric(record)
        for name, value in record.items():
            if scalars and name not in ("step", "epoch") and value is not None:
                scalars.add_scalar(name, value, record["step"])

    @contextlib.contextmanager
    def _scalars(self) -> Iterator[Any]:
        """TensorBoard's writer, or None where it is switched off or not installed."""
        if not self.job.config.log.tensorboard:
            yield None
        elif not has_tensorboard():
            self.progress.say("TensorBoard is not installed (extra `board`): no scalars are written")
            yield None
        else:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.position.update + 1 if self.position.update else None
            folder = self.run.path / "tensorboard"
            try:
                writer = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]
            except OSError as error:
                raise RunFault(f"{folder}: cannot be written: {error.strerror or error}") from error
            try:
                yield writer
            finally:
                writer.close()  # type: ignore[no-untyped-call]

    def _save(self) -> None:
        position, config = self.position, self.job.config
        tensors, plain = update.export_state(self.job.optimizer, self.names)
        state = {"position": asdict(position), "optimizer": plain}
        checkpoint.save(self.run.checkpoints, position.update, self.job.model.state_dict(), tensors, state)
        checkpoint.prune(self.run.checkpoints, config.checkpoint.keep, position.best_step)

    def _restore(self) -> None:
        newest = self.run.newest_checkpoint()
        if newest is None:
            self.progress.say("the run ended before its first checkpoint: it starts from the beginning")
            return
        held = checkpoint.load(newest)
        checkpoint.load_weights(self.job.model, held.model, str(newest))
        update.import_state(self.job.optimizer, self.names, held.optimizer, held.state["optimizer"])
        saved = held.state["position"]
        self.position = Position(**{**saved, "initial": tuple(saved["initial"])})
        self.progress.say(f"resuming after update {self.position.update} from {newest}")

    def _finish(self, emulator: Emulator, final: Measured) -> Dict[str, Any]:
        job, run, position = self.job, self.run, self.position
        report = summary.summarise(job, position, final)
        slot_ns = summary.slot_nanoseconds(job, position)
        summary.write_trace(job, run.path / "trace.json.gz", slot_ns)
        run.write_json("memory.json", summary.memory(job, emulator.weights.peak_bytes))
        run.write_json("summary.json", report)  # last: a run with a summary is finished
        self.progress.say(summary.closing(report, run.path))
        return report


def evaluate(job: Setup) -> Measured:
    """(mean loss, accuracy as a fraction) over the test set, or its configured subset; None where there is none.

    Cross-entropy's mean is over the labels that it counts, whatever the batches; another loss's over the samples.
    """
    model, subset, total, weights, right, counted, seen = job.model, job.config.evaluate.subset, 0.0, 0, 0, 0, 0
    has_answers = True
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for x, y in job.data.test_batches(TEST_BATCH):
                x, y = job.to_device(x, y)
                if subset:
                    x, y = x[: subset - seen], y[: subset - seen]
                output = model(x)
                answers = right_answers(output, y)
                weight = len(x) if answers is None or not _counts_labels(job.loss) else int(answers[1])
                if weight:
                    total, weights = total + float(job.loss(output, y)) * weight, weights + weight
                seen += len(x)
                if answers is None:
                    has_answers = False
                else:
                    right, counted = right + int(answers[0]), counted + int(answers[1])
                if subset and seen >= subset:
                    break
    finally:
        for module, mode in modes:
            module.training = mode
    return total / weights if weights else None, right / counted if has_answers and counted else None


def _counts_labels(loss: Loss) -> bool:
    """Whether a loss is cross-entropy as a mean over all labels but -100."""
    if isinstance(loss, nn.CrossEntropyLoss):
        return loss.weight is None and loss.ignore_index == -100
    return loss is nn.functional.cross_entropy


def evaluate_checkpoint(config: Config, path: Union[str, Path]) -> Dict[str, Any]:
    """Test loss and accuracy of the weights in a checkpoint folder or a plain state dict, without training."""
    path = Path(path)
    setup = set_up(config.model_copy(update={"init_from": None}))
    held = checkpoint.load(path).model if os.path.isdir(path) else checkpoint.read_tensors(path)
    checkpoint.load_weights(setup.model, held, str(path))
    test_loss, accuracy = evaluate(setup)
    return {"weights": str(path), "test_loss": test_loss, "test_accuracy": accuracy}


__all__: List[str] = ["check", "evaluate", "evaluate_checkpoint", "train"]
