"""The training loop: steps, evaluation, checkpoints and all outputs of a run."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from torch import nn

from ipu_pipe import checkpoint, summary, update
from ipu_pipe.config import GIVEN, Config, as_recorded, differences, dump, load_config
from ipu_pipe.data import DataSource
from ipu_pipe.engines import Engine, Report, check_launch, is_main, launch, make_engine, on_main
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.evaluation import evaluate
from ipu_pipe.given import refuse_missing, with_given
from ipu_pipe.job import Job, build, has_tensorboard, set_up
from ipu_pipe.methods import METHODS
from ipu_pipe.probe import Loss
from ipu_pipe.progress import Progress
from ipu_pipe.rundir import Measured, Position, RunDir, check_folder

# what a resumed run may do otherwise: where it runs, and on how many stages (checkpoints know of none)
FREE_TO_CHANGE = ("backend.", "stages")
MADE_LATER = "given.optimizer"  # compared when it is made


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
    where the job is not possible, RunFault where the loss is not finite. On the distributed backend every process calls
    this alike; the first one writes, all return the summary. A process's model then holds the weights of its own stage and
    not-a-number elsewhere: the whole is in the newest checkpoint. A model given here is trained in place, in the config's
    precision, and has its own dtypes again at the end, whatever way that comes.
    """
    out = Path(out)
    launch(config.backend)
    refuse_missing(config, model=model, data=data, loss=loss, optimizer=optimizer)
    config = with_given(config, model, data, loss, optimizer)
    say = Progress(quiet or not is_main()).say
    config, ended = on_main(lambda: _checked(config, out, resume, overwrite, say))
    if ended is not None:
        say(f"{out}: this run is finished: nothing to resume")
        return ended
    job = build(config, model, data, loss, optimizer)
    try:
        if resume:
            on_main(lambda: _same_optimizer(job.config, out))
        return _Run(job, out, resume, overwrite, quiet).go()
    finally:
        if job.own_types is not None:
            job.own_types.give_back()


def check(config: Config, out: Union[str, Path], *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise BadInput where `train` would, without training or writing anything."""
    check_launch(config.backend)
    launch(config.backend)
    config, ended = on_main(lambda: _checked(config, Path(out), resume, overwrite, lambda text: None))
    if ended is None:
        build(config)


def _checked(
    config: Config, out: Path, resume: bool, overwrite: bool, say: Callable[[str], None]
) -> Tuple[Config, Optional[Dict[str, Any]]]:
    """The config to go on with, and the summary of a run to resume that is finished. What may change is told."""
    check_folder(out, resume, overwrite)
    if not resume:
        return config, None
    saved = out / "config.yaml"
    if not saved.is_file():
        raise BadInput(f"--resume: {out}: holds no run to resume")
    recorded = load_config(saved)
    config = as_recorded(recorded, config)
    if METHODS[config.method].structure is not None:  # its blocks are what is trained
        config = _with_recorded_blocks(recorded, config)
    kept = ("stages",) if METHODS[config.method].structure is not None else ()
    allowed = tuple(key for key in FREE_TO_CHANGE if key not in kept)
    if recorded.given is not None:
        now = {"model": config.model.entry, "data": config.data.name, "loss": config.loss, "optimizer": config.optimizer.name}
        refuse_missing(recorded, **{key: value if value == GIVEN else None for key, value in now.items()})
    changed = [change for change in differences(recorded, config) if not change.startswith(MADE_LATER)]
    free = [change for change in changed if change.startswith(allowed)]
    changes = [change for change in changed if change not in free]
    if changes:
        raise BadInput([f"--resume: {saved}: {change}: the config of a run cannot change" for change in changes])
    run = RunDir(out, resume=True)
    if run.newest_checkpoint() is not None:  # which takes the place of the weights that the run began with
        config = config.model_copy(update={"init_from": None})
    ended = run.finished_summary()
    for change in free if ended is None else ():
        say(f"the run goes on with another {change}")
    return config, ended


def _same_optimizer(config: Config, out: Path) -> None:
    """Refuse (BadInput) to go on with another optimizer than was given to the run."""
    saved = out / "config.yaml"
    changes = [change for change in differences(load_config(saved), config) if change.startswith(MADE_LATER)]
    if changes:
        raise BadInput([f"--resume: {saved}: {change}: the optimizer of a run cannot change" for change in changes])


def _with_recorded_blocks(old: Config, new: Config) -> Config:
    """`new` with the number of blocks that a run of `old` chose where `new` leaves it open."""
    if new.method != old.method or new.method_args.blocks is not None:
        return new
    return new.model_copy(update={"method_args": new.method_args.model_copy(update={"blocks": old.method_args.blocks})})


class _Run:
    """One run in progress, on this process. Only the main one has a folder to write into."""

    def __init__(self, job: Job, out: Path, resume: bool, overwrite: bool, quiet: bool) -> None:
        self.job = job
        self.run: Optional[RunDir] = None
        made = on_main(lambda: self._open(out, resume, overwrite))
        assert made
        self.out, self.resume, self.progress = out, resume, Progress(quiet or not is_main())
        self.position = Position()
        self.tested: List[Measured] = []  # at the last evaluation, by block
        self.names = {parameter: name for name, parameter in job.model.named_parameters()}

    def _open(self, out: Path, resume: bool, overwrite: bool) -> bool:
        self.run = RunDir(out, resume=resume, overwrite=overwrite)
        return True

    def go(self) -> Dict[str, Any]:
        job = self.job
        if self.resume:
            self._restore()
        if self.run:
            self.run.write_text("config.yaml", dump(job.config))
        position = self.position
        if self.run:
            self.run.open_metrics(position.update)
        self.progress.say(summary.opening(job, position.update))
        engine = make_engine(job, position.update)
        try:
            with self._scalars() as scalars:
                if position.update == 0:
                    position.initial = self._evaluate(engine, scalars)
                final: Optional[Measured] = None
                with self.progress.bar(job.updates, position.update) as bar:
                    while position.update < job.updates:
                        self._step(engine, bar, scalars)
                        if job.evaluates_after(position.update):
                            final = self._evaluate(engine, scalars, bar)
                        if job.saves_after(position.update):
                            self._save(engine)
                if final is None:  # resumed after the last update, from a run killed before its summary was written
                    final = self._evaluate(engine, None, record=False)
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the run is what must be told
                engine.abort()
            raise
        else:
            engine.close()
        finally:
            if self.run:
                self.run.close()
        return self._finish(engine, final)

    def _step(self, engine: Engine, bar: Any, scalars: Any) -> None:
        job, position = self.job, self.position
        k = position.update
        if k % job.updates_per_epoch == 0:
            position.epoch_loss, position.epoch_updates = 0.0, 0
        start = time.perf_counter()
        result = engine.step(k)
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
                **({"block_train_loss": [loss for loss, _ in result.blocks]} if result.blocks else {}),
            )

    def _evaluate(self, engine: Engine, scalars: Any, bar: Any = None, record: bool = True) -> Measured:
        found = engine.evaluate()
        test_loss, accuracy = found[-1]
        position, self.tested = self.position, found
        if bar is not None:
            bar.evaluated(test_loss, accuracy)
        if record:
            epoch = position.update / self.job.updates_per_epoch
            each = {}
            if len(found) > 1:
                each = {
                    "block_test_loss": [loss for loss, _ in found],
                    "block_test_accuracy": [right for _, right in found],
                }
            self._log(scalars, step=position.update, epoch=epoch, test_loss=test_loss, test_accuracy=accuracy, **each)
        if test_loss is not None and (position.best_loss is None or test_loss < position.best_loss) and position.update:
            position.best_loss, position.best_step = test_loss, position.update
        return test_loss, accuracy

    def _log(self, scalars: Any, **record: Any) -> None:
        if self.run is None:
            return
        self.run.metric(record)
        for name, value in record.items():
            values = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            for key, number in values.items():
                if scalars and name not in ("step", "epoch") and number is not None:
                    scalars.add_scalar(key, number, record["step"])

    @contextlib.contextmanager
    def _scalars(self) -> Iterator[Any]:
        """TensorBoard's writer, or None where it is switched off or not installed."""
        if self.run is None or not self.job.config.log.tensorboard:
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

    def _save(self, engine: Engine) -> None:
        held = engine.state()
        if self.run is None or held is None:
            return
        position, config = self.position, self.job.config
        state = {"position": asdict(position), "optimizer": held.plain}
        checkpoint.save(self.run.checkpoints, position.update, held.model, held.optimizer, state)
        checkpoint.prune(self.run.checkpoints, config.checkpoint.keep, position.best_step)

    def _restore(self) -> None:
        newest = on_main(lambda: self.run.newest_checkpoint() if self.run else None)
        if newest is None:
            self.progress.say("the run ended before its first checkpoint: it starts from the beginning")
            return
        held = checkpoint.load(newest)
        checkpoint.load_weights(self.job.model, held.model, str(newest))
        update.import_state(self.job.optimizer, self.names, held.optimizer, held.state["optimizer"])
        saved = held.state["position"]
        self.position = Position(**{**saved, "initial": tuple(saved["initial"])})
        self.progress.say(f"resuming after update {self.position.update} from {newest}")

    def _finish(self, engine: Engine, final: Measured) -> Dict[str, Any]:
        measured = engine.report()
        return on_main(lambda: self._written(measured, final))

    def _written(self, measured: Optional[Report], final: Measured) -> Dict[str, Any]:
        job, run, position = self.job, self.run, self.position
        assert run is not None and measured is not None
        report = summary.summarise(job, position, final, measured, self.tested)
        slot_ns = summary.slot_nanoseconds(job, position)
        summary.write_trace(job, run.path / "trace.json.gz", slot_ns, measured.events, measured.counters)
        for name, value in (measured.files or {}).items():
            run.write_json(name, value)
        run.write_json("memory.json", summary.memory(job, measured))
        run.write_json("summary.json", report)  # last: a run with a summary is finished
        self.progress.say(summary.closing(report, run.path))
        return report


def evaluate_checkpoint(config: Config, path: Union[str, Path]) -> Dict[str, Any]:
    """Test loss and accuracy of the weights in a checkpoint folder or a plain state dict, without training."""
    path = Path(path)
    setup = set_up(config.model_copy(update={"init_from": None}))
    held = checkpoint.load(path).model if os.path.isdir(path) else checkpoint.read_tensors(path)
    checkpoint.load_weights(setup.model, held, str(path))
    test_loss, accuracy = evaluate(setup)[-1]
    return {"weights": str(path), "test_loss": test_loss, "test_accuracy": accuracy}


__all__: List[str] = ["check", "evaluate", "evaluate_checkpoint", "train"]
