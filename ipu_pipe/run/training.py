"""The training loop: steps, evaluation, checkpoints and all outputs of a run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

from torch import nn

from ipu_pipe.backends.interface import Engine, Report
from ipu_pipe.backends.ranks import is_main, on_main
from ipu_pipe.backends.table import backend_of, launch, make_engine
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.profiling import StageSeconds
from ipu_pipe.job.blame import attributed, keep_traceback
from ipu_pipe.job.comparing import as_recorded, differences, dump
from ipu_pipe.job.config import load_recorded
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.job.given import refuse_missing, with_given
from ipu_pipe.job.identity import MADE_LATER, changes, follows_length
from ipu_pipe.job.position import Measured, Position
from ipu_pipe.job.record import Job
from ipu_pipe.job.schema import Config
from ipu_pipe.job.sections import GIVEN
from ipu_pipe.model.probe import Loss
from ipu_pipe.plan.of_config import predicted_rate
from ipu_pipe.report.executed import write_trace
from ipu_pipe.report.memory import memory_record
from ipu_pipe.report.modelled import stage_costs, write_modelled
from ipu_pipe.report.summary import summarise
from ipu_pipe.report.words import closing, opening
from ipu_pipe.run import checkpoint
from ipu_pipe.run.build import build, set_up
from ipu_pipe.run.folder import RunDir, as_folder, check_folder, finished_summary
from ipu_pipe.run.folder_lock import FolderLock, refuse_used
from ipu_pipe.run.log import Log, log_of, nothing
from ipu_pipe.run.progress import Progress
from ipu_pipe.run.resume import choose, origin, position_of, refuse_foreign_run, saved_state
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.update import optimizer as update
from ipu_pipe.update.state import import_state


class _Start(NamedTuple):
    """How a run begins. `config`: to train by; `done`: updates that its checkpoint has, 0 without one; `ended`: the summary of
    a run that is finished; `resumes`: whether there is a run to go on with."""

    config: Config
    done: int = 0
    ended: Optional[Dict[str, Any]] = None
    resumes: bool = False


def train(
    config: Config,
    out: Union[str, Path],
    *,
    model: Optional[nn.Module] = None,
    data: Optional[DataSource] = None,
    loss: Optional[Loss] = None,
    optimizer: Optional[update.OptimizerFactory] = None,
    resume: bool = False,
    resume_from: Optional[int] = None,
    overwrite: bool = False,
    quiet: bool = False,
    keep_dtype: bool = False,
) -> Dict[str, Any]:
    """Train by `config` and write the run into the folder `out`; returns the summary (as in `summary.json`).

    A model, data source, loss or optimizer factory given here takes the place of the config's entry. `resume` goes on
    from the newest checkpoint, with the same numbers as if never interrupted; `resume_from` from that of this step, and what
    came after it is deleted. Raises BadInput before anything is written where the job is not possible, RunFault where the loss
    is not finite, and what the model, loss, data source or optimizer raise as it is, with the place (a UserFault) at the end of
    its chain of causes. On the distributed backend every process calls this alike; the first one writes, all return the summary.
    A process's model then holds the weights of its own stage and not-a-number elsewhere: the whole is in the newest checkpoint.
    A model given here is trained in place, in the config's precision, and has its own dtypes again at the end, whatever way that
    comes, unless it shall `keep_dtype` of the training.
    """
    out = as_folder(out)
    launch(config, {"out": out, "resume": resume, "resume_from": resume_from, "overwrite": overwrite})
    refuse_missing(config, model=model, data=data, loss=loss, optimizer=optimizer)
    config = with_given(config, model, data, loss, optimizer)
    say = Progress(quiet or not is_main()).say
    resume = resume or resume_from is not None
    with reserved(out, resume=resume, overwrite=overwrite, say=say):
        start = on_main(lambda: _checked(config, out, resume, resume_from, overwrite, say))
        if start.ended is not None:
            say(f"{out}: this run is finished: nothing to resume")
            return start.ended
        began = start.config.init_from
        if start.done:  # the checkpoint takes the place of the weights that the run began with
            start = start._replace(config=start.config.model_copy(update={"init_from": None}))
        job = build(start.config, model, data, loss, optimizer, start.done)
        job.config = job.config.model_copy(update={"init_from": began})
        try:
            if start.resumes:
                on_main(lambda: _same_optimizer(job.config, out))
            return _Run(job, out, start.resumes, overwrite, quiet).go()
        finally:
            job.numbers.give_back(keep_dtype)


@contextlib.contextmanager
def reserved(
    out: Path, *, resume: bool = False, overwrite: bool = False, say: Callable[[str], None] = print
) -> Iterator[None]:
    """Keep other runs out of the folder `out`. Raises BadInput, on all processes of this one, where one is on there, or where
    the folder cannot be used. The main process holds the lock."""
    lock = FolderLock(out, say)

    def take() -> None:
        check_folder(out, resume, overwrite)
        lock.take()

    try:
        on_main(take)
        yield
    finally:
        lock.release()


def check(config: Config, out: Union[str, Path], *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise BadInput where `train` would, without training or writing anything."""
    out = as_folder(out)
    launch(config, {"out": out, "resume": resume, "overwrite": overwrite})

    def checked() -> _Start:
        refuse_used(out)
        return _checked(config, out, resume, None, overwrite, lambda text: None)

    start = on_main(checked)
    if start.ended is None:
        build(start.config.model_copy(update={"init_from": None}) if start.done else start.config, done=start.done)


def _checked(
    config: Config, out: Path, resume: bool, step: Optional[int], overwrite: bool, say: Callable[[str], None]
) -> _Start:
    """How to begin. `step`: that of the checkpoint asked for. What goes on otherwise is told. Raises BadInput."""
    held = check_folder(out, resume, overwrite)
    if resume and not held and step is None:  # as a job that is queued anew asks, wherever its first start got to
        say(f"--resume: {out}: holds no run yet: it starts from the beginning")
        return _Start(config)
    if not resume:
        return _Start(config)
    saved = out / "config.yaml"
    if not saved.is_file():
        raise BadInput(f"--resume: {out}: holds no run to resume")
    recorded = load_recorded(saved)
    config = as_recorded(recorded, config)
    config = _with_recorded_counts(recorded, config)
    if recorded.given is not None:
        now = {
            "model": config.model.entry,
            "data": config.data.name,
            "loss": config.loss,
            "optimizer": config.optimizer.name,
        }
        refuse_missing(recorded, **{key: value if value == GIVEN else None for key, value in now.items()})
    found = changes(recorded, config)
    if found.refused:
        raise BadInput([f"--resume: {saved}: {change}" for change in found.refused])
    done = choose(out / "checkpoints", step)
    ended = finished_summary(out) if step is None and not found.longer else None
    for change in found.free if ended is None else ():
        say(f"the run goes on with another {change}")
    if ended is None and found.longer and follows_length(config):
        say(f"its rates are from here on those of the longer run ({', '.join(follows_length(config))})")
    return _Start(config, done, ended, True)


def _same_optimizer(config: Config, out: Path) -> None:
    """Refuse (BadInput) to go on with another optimizer than was given to the run."""
    saved = out / "config.yaml"
    changes = [change for change in differences(load_recorded(saved), config) if change.startswith(MADE_LATER)]
    if changes:
        raise BadInput([f"--resume: {saved}: {change}: the optimizer of a run cannot change" for change in changes])


def _with_recorded_counts(old: Config, new: Config) -> Config:
    """`new` with the number of blocks or of the method's replicas that a run of `old` chose where `new` leaves it open."""
    method = METHODS[new.method]
    key = "blocks" if method.structure is not None else "replicas" if method.rounds is not None else None
    if key is None or new.method != old.method or getattr(new.method_args, key) is not None:
        return new
    own = new.method_args.model_copy(update={key: getattr(old.method_args, key)})
    return new.model_copy(update={"method_args": own})


class _Run:
    """One run in progress, on this process. Only the main one has a folder to write into."""

    def __init__(self, job: Job, out: Path, resume: bool, overwrite: bool, quiet: bool) -> None:
        self.job = job
        self.run: Optional[RunDir] = None

        def begin() -> None:
            self.run = RunDir(out, resume=resume, overwrite=overwrite)

        on_main(begin)
        job.folder = out
        self.out, self.resume, self.progress = out, resume, Progress(quiet or not is_main())
        self.position = Position()
        self.unread_seconds = 0.0  # of training since a loss was last read
        self.tested: List[Measured] = []  # at the last evaluation, by block
        self.profile: Optional[StageSeconds] = None
        self.names = {parameter: name for name, parameter in job.trained().items()}

    def go(self) -> Dict[str, Any]:
        job = self.job
        if self.resume:
            self._restore()
        position = self.position
        if self.run:
            if self.resume:
                self.run.forget_after(position.update, self.progress.say)
            self.run.write_text("config.yaml", dump(job.config))
            self.run.open_metrics(position.update)
        self.progress.say(opening(job, position.update))
        engine = make_engine(job, position.update)
        try:
            with log_of(self.run, job.config.log.tensorboard, position.update, self.progress.say) as log:
                if position.update == 0:
                    position.initial = self._evaluate(engine, log)
                final: Optional[Measured] = None
                with self.progress.bar(job.updates, position.update) as bar:
                    while position.update < job.updates:
                        self._step(engine, bar, log)
                        if job.evaluates_after(position.update):
                            final = self._evaluate(engine, log, bar)
                        if job.saves_after(position.update):
                            self._save(engine)
                if final is None:  # resumed after the last update, from a run killed before its summary was written
                    final = self._evaluate(engine, nothing)
        except BaseException as error:
            keep_traceback(error, self.out)
            with contextlib.suppress(Exception):  # what ended the run is what must be told
                engine.abort()
            raise
        else:
            self.profile = engine.profile()
            engine.close()
        finally:
            if self.run:
                self.run.close()
        return self._finish(engine, final)

    def _step(self, engine: Engine, bar: Any, log: Log) -> None:
        job, position = self.job, self.position
        k = position.update
        start = time.perf_counter()
        results = engine.advance(k, self._reads_after(k + 1))
        seconds = time.perf_counter() - start
        position.update += 1
        if self.progress.steps:  # the first step of a process warms up
            position.seconds, position.timed_updates = position.seconds + seconds, position.timed_updates + 1
        self.progress.steps += 1
        self.unread_seconds += seconds
        if not results:
            return
        rate, self.unread_seconds = sum(result.samples for result in results) / self.unread_seconds, 0.0
        for update_index, result in enumerate(results, position.update - len(results)):
            if update_index % job.updates_per_epoch == 0:
                position.epoch_loss, position.epoch_updates = 0.0, 0
            position.epoch_loss, position.epoch_updates = position.epoch_loss + result.loss, position.epoch_updates + 1
            bar.advance(result.loss, result.accuracy, rate)
        if position.update % job.config.log.every == 0 or position.update == job.updates:
            each = {"block_train_loss": [loss for loss, _ in result.blocks]} if result.blocks else {}
            epoch = position.update / job.updates_per_epoch
            log(
                step=position.update, epoch=epoch, train_loss=result.loss, lr=job.rate(k), samples_per_second=rate, **each
            )  # fmt: skip

    def _reads_after(self, done: int) -> bool:
        """Whether what was measured must be known when `done` updates are done: for a line, an evaluation or a checkpoint; after
        the first, whose time does not count."""
        job = self.job
        due = done % job.config.log.every == 0 or job.evaluates_after(done) or job.saves_after(done)
        return due or not self.progress.steps

    def _evaluate(self, engine: Engine, log: Log, bar: Any = None) -> Measured:
        found = engine.evaluate()
        test_loss, accuracy = found[-1]
        position, self.tested = self.position, found
        if bar is not None:
            bar.evaluated(test_loss, accuracy)
        epoch = position.update / self.job.updates_per_epoch
        each = dict(zip(("block_test_loss", "block_test_accuracy"), map(list, zip(*found)))) if len(found) > 1 else {}
        log(step=position.update, epoch=epoch, test_loss=test_loss, test_accuracy=accuracy, **each)
        if test_loss is not None and (position.best_loss is None or test_loss < position.best_loss) and position.update:
            position.best_loss, position.best_step = test_loss, position.update
        return test_loss, accuracy

    def _save(self, engine: Engine) -> None:
        held = engine.state()
        if self.run is None or held is None:
            return
        position, config = self.position, self.job.config
        state = saved_state(position, held.plain)
        checkpoint.save(self.run.checkpoints, position.update, held.model, held.optimizer, state, origin(self.job))
        checkpoint.prune(self.run.checkpoints, config.checkpoint.keep, position.best_step)

    def _restore(self) -> None:
        job, path = self.job, self.out / "checkpoints" / f"step-{self.job.done}"
        if not job.done:
            self.progress.say("the run ended before its first checkpoint: it starts from the beginning")
            return
        held = checkpoint.load(path)
        on_main(lambda: refuse_foreign_run(job, held, path))
        if held.manifest is None:
            self.progress.say(f"{path}: of the earlier layout, which does not say whose run it is: that is not checked")
        with job.numbers.whole(loads=True):
            checkpoint.load_weights(job.model, held.model, str(path))
        import_state(job.optimizer, self.names, held.optimizer, held.state["optimizer"])
        self.position = position_of(held)
        self.progress.say(f"resuming after update {self.position.update} from {path}")

    def _finish(self, engine: Engine, final: Measured) -> Dict[str, Any]:
        measured = engine.report()

        def write() -> Dict[str, Any]:
            assert self.run is not None and measured is not None
            report = _write_results(self.job, self.run, self.position, final, self.tested, measured, self.profile)
            on_devices = not backend_of(self.job.config).emulates  # which in one process does the work of all
            predicted = predicted_rate(self.job) if on_devices else None
            self.progress.say(closing(report, self.run.path, predicted))
            return report

        return on_main(write)


def _write_results(
    job: Job,
    run: RunDir,
    position: Position,
    final: Measured,
    tested: Sequence[Measured],
    measured: Report,
    profile: Optional[StageSeconds],
) -> Dict[str, Any]:
    """Write what a run that has ended leaves; returns its summary."""
    has_clocks = measured.events is not None
    costs = None if has_clocks else stage_costs(job, profile, position)
    report = summarise(job, position, final, measured, tested, costs)
    if measured.times is None:
        run.forget_trace()
    if costs is not None and job.traced:
        write_modelled(job, run.path, costs)
    elif job.traced:
        write_trace(job, run.path / "trace.json.gz", measured)
    for name, value in (measured.files or {}).items():
        run.write_json(name, value)
    run.write_json("memory.json", memory_record(job, measured))
    run.write_json("summary.json", report)  # last: a run with a summary is finished
    return report


def evaluate_checkpoint(config: Config, path: Union[str, Path]) -> Dict[str, Any]:
    """Test loss and accuracy of the weights in a checkpoint folder or a plain state dict, without training."""
    path = Path(path)
    setup = set_up(config.model_copy(update={"init_from": None}))
    with setup.numbers.whole(loads=True):
        checkpoint.load_weights(setup.model, checkpoint.read_weights(path), str(path))
    with attributed(lambda: "evaluation"):
        test_loss, accuracy = evaluate(setup)[-1]
    return {"weights": str(path), "test_loss": test_loss, "test_accuracy": accuracy}
