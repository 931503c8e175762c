"""One run in progress: its steps, evaluations, checkpoints and callbacks, and all that it leaves."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_pipe.backends.interface import Engine
from ipu_pipe.backends.ranks import is_main, run_on_main
from ipu_pipe.backends.table import make_engine
from ipu_pipe.errors import RunFault
from ipu_pipe.job.metrics import ACCURACY
from ipu_pipe.job.position import Measured, Position, collect_by_block
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import exit_words, keep_traceback_of
from ipu_pipe.report.run_text import format_opening
from ipu_pipe.run.callbacks import Callback, Callbacks, Moment
from ipu_pipe.run.folder import RunDir
from ipu_pipe.run.log import Log, log_of, nothing
from ipu_pipe.run.progress import Progress
from ipu_pipe.run.saving import Ended, begin, finish, restore, restore_best, save


class Run:
    """One run in progress, on this process. Only the main one has a folder to write into."""

    def __init__(
        self, job: Job, out: Path, resume: bool, overwrite: bool, quiet: bool, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.job = job
        self.run: Optional[RunDir] = None

        def open_folder() -> None:
            self.run = RunDir(out, resume=resume, overwrite=overwrite)

        run_on_main(open_folder)
        job.folder = out
        self.out, self.resume, self.progress = out, resume, Progress(quiet or not is_main())
        self.position = Position()
        self.unread_seconds = 0.0  # of training since a loss was last read
        self.update_seconds = 0.0  # what an update of the newest call took
        self.unwritten: Dict[str, Any] = {}  # the newest update's line of metrics.jsonl
        self.tested: List[Measured] = []  # at the last evaluation, by block
        self.callbacks = Callbacks(callbacks if is_main() else ())
        # what all processes must know alike: whether the run may be asked to end, and after any update
        self.may_stop, self.at_steps = run_on_main(lambda: (bool(self.callbacks.own), self.callbacks.at_steps))
        job.may_stop = self.at_steps and job.method.rounds is None  # else where replicas have met
        job.may_stop_empty = self.may_stop
        self.end = job.updates
        self.now = Moment(0, 0.0, (), job.rate(0), None, {}, None, None)

    def go(self) -> Dict[str, Any]:
        job = self.job
        if self.resume:
            self.position = restore(job, self.out, self.progress.say, self.callbacks)
        position = self.position
        record = begin(job, self.run, self.resume, position, self.progress.say) if self.run else {}
        self.progress.say(format_opening(job, position.update))
        engine = make_engine(job, position.update)
        try:
            with keep_traceback_of(self.out), log_of(
                self.run, job.config.log.tensorboard, position.update, self.progress.say
            ) as log:
                if position.update == 0:
                    position.initial = self._evaluate(engine, log)
                final = self._train(engine, log)
                if final is None:  # resumed after the last update, from a run killed before its summary was written
                    final = self._evaluate(engine, nothing)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the error that ended the run is the one to report
                engine.abort()
            # code that no `attributed` encloses, on processes: a status of 0 would say that the run is finished
            if isinstance(error, SystemExit) and not error.code:
                raise RunFault(f"after update {position.update}: {exit_words(error)}") from error
            raise
        else:
            profile = engine.profile()
            engine.close()
        finally:
            if self.run:
                self.run.close()
        restored = run_on_main(self.callbacks.restored_step)
        ended = Ended(position, final, self.tested, profile, self.now.stopped, record, restored)
        report = finish(job, engine, self.run, ended, self.progress.say)
        if restored is not None:
            restore_best(job, self.out, restored, position.update, self.progress.say)
        with keep_traceback_of(self.out):
            self._call_back("on_end", engine)
        return report

    def _train(self, engine: Engine, log: Log) -> Optional[Measured]:
        """All updates to come; returns what the last evaluation found, None if there was none."""
        job, position = self.job, self.position
        final: Optional[Measured] = None
        with self.progress.bar(job.updates, position.update, job.updates_per_epoch) as bar:
            while position.update < self.end:
                self._step(engine, bar, log)
                done, is_planned = position.update, False
                if job.evaluates_after(done):
                    final, is_planned = self._evaluate(engine, log, bar), True
                    self._call_back("on_evaluation", engine)
                if job.saves_after(done):
                    is_planned = True
                    self._save(engine)
                if self.may_stop and (is_planned or self.at_steps) and done < self.end:
                    self.end = engine.end(done, self.callbacks.asked is not None)
            if self.end < job.updates:
                self.now = replace(self.now, stopped=self.callbacks.asked)
                final = self._end_early(engine, log, bar, final)
        return final

    def _end_early(self, engine: Engine, log: Log, bar: Any, final: Optional[Measured]) -> Optional[Measured]:
        """What a run that was planned so long does at its end, where it was not done anyway."""
        job, done = self.job, self.position.update
        if self.unwritten:
            log(**self.unwritten)
        if not job.evaluates_after(done):
            final = self._evaluate(engine, log, bar)
            self._call_back("on_evaluation", engine)
        if not job.saves_after(done):
            self._save(engine)
        return final

    def _step(self, engine: Engine, bar: Any, log: Log) -> None:
        job, position = self.job, self.position
        k = position.update
        start = time.perf_counter()
        results = engine.advance(k, self._reads_after(k + 1))
        if k % engine.updates_per_call == 0:  # the call's first update waits for all of them: they share its time
            self.update_seconds = (time.perf_counter() - start) / engine.updates_per_call
        seconds = self.update_seconds
        position.update += 1
        if self.progress.steps >= engine.updates_per_call:  # the first call of a process warms up
            position.seconds, position.timed_updates = position.seconds + seconds, position.timed_updates + 1
        self.progress.steps += 1
        self.unread_seconds += seconds
        if not results:
            return
        rate, self.unread_seconds = sum(result.samples for result in results) / self.unread_seconds, 0.0
        shows_accuracy = any(metric.name == ACCURACY for metric in job.metrics)
        for update_index, result in enumerate(results, position.update - len(results)):
            position.count(result.loss, begins_epoch=update_index % job.averaged == 0)
            bar.advance(result.loss, result.accuracy if shows_accuracy else None, rate)
        epoch = job.epoch(position.update)
        losses = tuple(loss for loss, _ in result.blocks) or (result.loss,)
        each = {"block_train_loss": list(losses)} if result.blocks else {}
        line = {"train_loss": result.loss, "lr": job.rate(k), "samples_per_second": rate, **each}
        self.unwritten = {"step": position.update, "epoch": epoch, **line}
        if position.update % job.config.log.every == 0 or position.update == job.updates:
            log(**self.unwritten)
            self.unwritten = {}
        self.now = replace(
            self.now, step=position.update, epoch=epoch, losses=losses, rate=job.rate(k), samples_per_second=rate
        )
        if self.at_steps:
            self._call_back("on_step", engine)

    def _call_back(self, method: str, engine: Engine) -> None:
        """Call a method of the user's callbacks with where the run is."""
        if self.callbacks.own:
            self.now = replace(self.now, model=engine.current_model())
            self.callbacks.call(method, self.now)

    def _reads_after(self, done: int) -> bool:
        """Whether what was measured must be known when `done` updates are done: for a line, an evaluation or a checkpoint; after
        the first, whose time does not count."""
        job, known = self.job, self.at_steps or not self.progress.steps
        return known or done % job.config.log.every == 0 or job.evaluates_after(done) or job.saves_after(done)

    def _evaluate(self, engine: Engine, log: Log, bar: Any = None) -> Measured:
        every = engine.evaluate()
        position, self.tested, found = self.position, every, every[-1]
        if bar is not None:
            bar.evaluated(found)
        epoch = self.job.epoch(position.update)
        log(step=position.update, epoch=epoch, **found.record(), **(collect_by_block(every) if len(every) > 1 else {}))
        position.note(found)
        self.now = replace(self.now, step=position.update, epoch=epoch, metrics=found.record())
        return found

    def _save(self, engine: Engine) -> None:
        folder = save(self.job, engine, self.run, self.position, self.callbacks)
        if folder is not None:
            self.now = replace(self.now, checkpoint=folder)
            self._call_back("on_checkpoint", engine)
