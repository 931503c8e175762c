"""A run in progress: its updates, evaluations, checkpoints and callbacks, and the files that it writes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_pipe.backends.interface import Engine, Report
from ipu_pipe.backends.ranks import are_joined, is_main, run_on_main
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.compare import dump_config
from ipu_pipe.errors import RunFault
from ipu_pipe.job.evaluation import EvaluationResult, Position, collect_by_block
from ipu_pipe.job.metrics import ACCURACY
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import exit_words, keep_traceback_of
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.plan.of_config import predict_rate
from ipu_pipe.report.memory import build_memory_record
from ipu_pipe.report.provenance import describe_start, get_timestamp
from ipu_pipe.report.run_text import format_closing, format_opening
from ipu_pipe.report.run_trace import choose_stage_costs, write_measured_trace, write_modelled_trace
from ipu_pipe.report.summary import summarize
from ipu_pipe.run import checkpoint
from ipu_pipe.run.callbacks import Callback, Callbacks, Moment
from ipu_pipe.run.folder import RunFolder, read_starts
from ipu_pipe.run.progress import Log, Progress, log_nothing, open_log
from ipu_pipe.run.resume import make_manifest, restore


class TrainingLoop:
    """The part of this process in a run: the main process alone has a folder to write into."""

    def __init__(
        self, job: Job, out: Path, resume: bool, overwrite: bool, quiet: bool, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.job = job
        self.run: Optional[RunFolder] = None

        def open_folder() -> None:
            self.run = RunFolder(out, resume=resume, overwrite=overwrite)

        run_on_main(open_folder)
        job.folder = out
        self.out, self.resume, self.progress = out, resume, Progress(quiet or not is_main())
        self.position = Position()
        self.unread_seconds = 0.0  # of training since a loss was last read
        self.update_seconds = 0.0  # what an update of the newest call took
        self.unwritten: Dict[str, Any] = {}  # the newest update's line of metrics.jsonl
        self.tested: List[EvaluationResult] = []  # at the last evaluation, by block
        self.record: Dict[str, Any] = {}  # of this start, the last in record.json
        self.callbacks = Callbacks(callbacks if is_main() else ())
        # what all processes must know alike: whether the run may be asked to end, and after any update
        self.may_stop, self.at_steps = run_on_main(lambda: (bool(self.callbacks.own), self.callbacks.at_steps))
        job.may_stop = self.at_steps and job.method.rounds is None  # else where replicas have met
        job.may_stop_empty = self.may_stop
        self.end = job.updates
        self.now = Moment(0, 0.0, (), job.rate(0), None, {}, None, None)

    def run_all(self) -> Dict[str, Any]:
        """Train from the start or the checkpoint to the end, and return the summary."""
        job = self.job
        if self.resume:
            self.position = restore(job, self.out, self.progress.say, self.callbacks)
        position = self.position
        self._write_start()
        self.progress.say(format_opening(job, position.update))
        engine = make_engine(job, position.update)
        try:
            with keep_traceback_of(self.out), open_log(self.run, job.config.log.tensorboard, position.update) as log:
                if position.update == 0:
                    position.initial = self._evaluate(engine, log)
                final = self._train(engine, log)
                if final is None:  # resumed after the last update, from a run killed before its summary was written
                    final = self._evaluate(engine, log_nothing)
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
        restored = run_on_main(self.callbacks.get_restored_step)
        measured = engine.report()
        report = run_on_main(lambda: self._write_end(measured, final, profile, restored))
        if restored is not None:
            self._restore_weights(restored)
        with keep_traceback_of(self.out):
            self._call_back("on_end", engine)
        return report

    def _write_start(self) -> None:
        """Write what is known of the run before it trains, on the main process."""
        job, run, done = self.job, self.run, self.position.update
        if run is None:
            return
        if self.resume:
            run.forget_after(done, self.progress.say)
        run.write_text("config.yaml", dump_config(job.config))
        if job.begun is not None:
            run.write_json("init_from.json", job.begun._asdict())
        self.record = {**describe_start(job.read), "first_update": done}
        run.write_json("record.json", [*(read_starts(run.path) if self.resume else []), self.record])
        run.open_metrics(done)

    def _write_end(
        self, measured: Optional[Report], final: EvaluationResult, profile: Optional[StageSeconds], restored: Optional[int]
    ) -> Dict[str, Any]:
        """Write the files of the run, which has ended, print its closing words and return its summary, on the main process."""
        job, run, position = self.job, self.run, self.position
        assert run is not None and measured is not None
        costs = None if measured.events is not None else choose_stage_costs(job, profile, position)
        report = summarize(job, position, final, measured, self.tested, costs, self.now.stopped)
        if restored is not None:
            report["restored_step"] = restored
        if measured.times is None:
            run.forget_trace()
        if costs is not None and job.traced:
            write_modelled_trace(job, run.path, costs)
        elif job.traced:
            write_measured_trace(job, run.path / "trace.json.gz", measured)
        for name, value in (measured.files or {}).items():
            run.write_json(name, value)
        run.write_json("memory.json", build_memory_record(job, measured))
        run.write_json("record.json", [*read_starts(run.path)[:-1], {**self.record, "ended": get_timestamp()}])
        run.write_json("summary.json", report)  # last: a run with a summary is finished
        # an emulator does in one process the work of all devices
        predicted = None if get_backend(job.config).emulates else predict_rate(job)
        self.progress.say(format_closing(report, run.path, predicted))
        return report

    def _restore_weights(self, step: int) -> None:
        """Load the weights of the checkpoint of `step` into the model, on every process that holds a whole model, and say so.

        Raise `BadInput` if the checkpoint is not whole any more.
        """
        job, say, path = self.job, self.progress.say, self.out / "checkpoints" / f"step-{step}"
        if step == self.position.update:
            say(f"the newest weights are the best: step {step}")
            return
        if are_joined() and not job.numbers.is_given:  # each process has its stage's, and no one the model
            say(f"the best weights are those of step {step}: {path}")
            return
        weights, blocks = run_on_main(lambda: checkpoint.read_weights(path)), get_blocks(job.model)
        with job.numbers.whole(loads=True):
            # auxiliary heads stay as they are
            checkpoint.load_weights(job.model if blocks is None else blocks.model, weights, str(path))
        say(f"the model has the best weights again, those of step {step}: {path}")

    def _train(self, engine: Engine, log: Log) -> Optional[EvaluationResult]:
        """Carry out all updates to come, and return the result of the last evaluation, None if there was none."""
        job, position = self.job, self.position
        final: Optional[EvaluationResult] = None
        with self.progress.show_bar(job.updates, position.update, job.updates_per_epoch) as bar:
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

    def _end_early(
        self, engine: Engine, log: Log, bar: Any, final: Optional[EvaluationResult]
    ) -> Optional[EvaluationResult]:
        """Write, evaluate and save as at the end of a run that was planned this long, unless it has just been done."""
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
        """Carry out one update, and log its results and those of the updates before it that were not read yet."""
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
            position.add_update(result.loss, begins_epoch=update_index % job.averaged == 0)
            bar.advance(result.loss, result.accuracy if shows_accuracy else None, rate)
        epoch = job.epoch(position.update)
        losses = tuple(loss for loss, _ in result.blocks) or (result.loss,)
        by_block = {"block_train_loss": list(losses)} if result.blocks else {}
        line = {"train_loss": result.loss, "lr": job.rate(k), "samples_per_second": rate, **by_block}
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
        """Call `method` of the user's callbacks."""
        if self.callbacks.own:
            self.now = replace(self.now, model=engine.current_model())
            self.callbacks.call(method, self.now)

    def _reads_after(self, done: int) -> bool:
        """Return whether the results must be read after `done` updates: for a line, an evaluation or a checkpoint.

        They are after the first call too, whose time does not count.
        """
        job, known = self.job, self.at_steps or not self.progress.steps
        return known or done % job.config.log.every == 0 or job.evaluates_after(done) or job.saves_after(done)

    def _evaluate(self, engine: Engine, log: Log, bar: Any = None) -> EvaluationResult:
        """Evaluate on the test set, log the result and return that of the model's own output."""
        self.tested = engine.evaluate()
        position, whole = self.position, self.tested[-1]
        if bar is not None:
            bar.show_evaluation(whole)
        epoch = self.job.epoch(position.update)
        by_block = collect_by_block(self.tested) if len(self.tested) > 1 else {}
        log(step=position.update, epoch=epoch, **whole.to_record(), **by_block)
        position.add_evaluation(whole)
        self.now = replace(self.now, step=position.update, epoch=epoch, metrics=whole.to_record())
        return whole

    def _save(self, engine: Engine) -> None:
        """Write a checkpoint, to which every process contributes its part, and call the callbacks.

        Raise `RunFault` if the disk refuses.
        """
        job, run, position = self.job, self.run, self.position
        state = engine.state()
        if run is None or state is None:
            return
        manifest = make_manifest(job, position, state.plain, self.callbacks.collect_states())
        folder = checkpoint.save(run.checkpoints, position.update, state.model, state.optimizer, manifest)
        best = [position.best_step, *self.callbacks.list_best_steps()]
        checkpoint.prune(run.checkpoints, job.config.checkpoint.keep, best)
        self.now = replace(self.now, checkpoint=folder)
        self._call_back("on_checkpoint", engine)
