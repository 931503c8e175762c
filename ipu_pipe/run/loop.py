"""A run in progress: its updates, evaluations, checkpoints and callbacks, and the files that it writes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_pipe.backends.interface import Report
from ipu_pipe.backends.ranks import are_joined, is_main, run_on_main
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.compare import dump_config
from ipu_pipe.errors import RunFault
from ipu_pipe.files import atomic_file, write_json, write_text
from ipu_pipe.job.evaluation import EvaluationResult, collect_by_block
from ipu_pipe.job.metrics import ACCURACY
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import exit_words, keep_traceback_of
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.plan.of_config import predict_rate
from ipu_pipe.report.memory import build_memory_record
from ipu_pipe.report.position import Position
from ipu_pipe.report.provenance import describe_start, get_timestamp
from ipu_pipe.report.run_text import format_closing, format_opening
from ipu_pipe.report.run_trace import choose_stage_costs, write_measured_trace, write_modelled_trace
from ipu_pipe.report.summary import summarize
from ipu_pipe.run import checkpoint
from ipu_pipe.run.callbacks import Callback, Callbacks, Moment
from ipu_pipe.run.folder import RunFolder, read_starts
from ipu_pipe.run.progress import Bar, Log, Progress, log_nothing, open_log
from ipu_pipe.run.resume import make_manifest, restore
from ipu_pipe.run.saving import Saver
from ipu_pipe.update.apply import AVERAGE


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
        self.log: Log = log_nothing
        self.bar: Optional[Bar] = None
        self.position = Position()
        self.unread_seconds = 0.0  # of training since a loss was last read
        self.update_seconds = 0.0  # what an update of the newest call took
        self.unwritten: Dict[str, Any] = {}  # the newest update's line of metrics.jsonl
        self.tested: List[EvaluationResult] = []  # at the last evaluation, by block
        self.is_saving = False  # a checkpoint that was begun, and may be written already
        self.best_steps: List[Optional[int]] = []  # when it was begun
        self.callbacks = Callbacks(callbacks if is_main() else ())
        # what all processes must know alike: whether the run may be asked to end, and after any update
        called = self.callbacks
        self.may_stop, self.at_steps, job.watches_gradients, job.wants_model = run_on_main(
            lambda: (bool(called.own), called.at_steps, called.watches_gradients, called.wants_model)
        )
        job.may_stop = self.at_steps and job.method.rounds is None  # else where replicas have met
        job.may_stop_empty = self.may_stop
        self.end = job.updates
        self.now = Moment(0, 0.0, (), job.rate(0), None, {}, None, None, config=job.config.to_dict(), folder=out)

    def run_all(self) -> Dict[str, Any]:
        """Train from the start or the checkpoint to the end, and return the summary."""
        job = self.job
        if self.resume:
            self.position = restore(job, self.out, self.progress.say, self.callbacks)
        position = self.position
        self._write_start()
        self.progress.say(format_opening(job, position.update))
        self.engine = engine = make_engine(job, position.update)
        self.saver = Saver(self.out / "checkpoints", engine.checkpoint_group)
        try:
            with keep_traceback_of(self.out), open_log(self.run, job.config.log.tensorboard, position.update) as self.log:
                done = position.update
                newest = self.out / "checkpoints" / f"step-{done}" if done else None
                rate = job.rate(max(done - 1, 0))
                self.now = replace(self.now, step=done, epoch=job.epoch(done), rate=rate, checkpoint=newest)
                self._call_back("on_start")
                if position.update == 0:
                    position.initial = self._evaluate("test")
                    if job.validation is not None:
                        self._evaluate("validation")
                self._train()
                self._finish_saving()
                if not self.now.metrics:  # resumed after the last update, from a run killed before its summary was written
                    self.log, log = log_nothing, self.log
                    self._evaluate(job.watched)
                    self.log = log
                if job.watched != "test":
                    self._evaluate("test")
        except BaseException as error:
            with contextlib.suppress(Exception):  # the error that ended the run is the one to report
                self.saver.finish()
            with contextlib.suppress(Exception):
                engine.abort()
            # code that no `attribute_faults` encloses, on processes: a status of 0 would say that the run is finished
            if isinstance(error, SystemExit) and not error.code:
                raise RunFault(f"after update {position.update}: {exit_words(error)}") from error
            raise
        else:
            if job.rules.decay is not None:
                self._write_averages()
            profile = engine.profile()
            engine.close()
        finally:
            if self.run:
                self.run.close()
        restored = run_on_main(self.callbacks.get_restored_step)
        measured = engine.report()
        report = run_on_main(lambda: self._write_end(measured, profile, restored))
        if restored is not None:
            self._restore_weights(restored)
        self.now = replace(self.now, summary=report)
        with keep_traceback_of(self.out):
            self._call_back("on_end")
        return report

    def _write_start(self) -> None:
        """Write what is known of the run before it trains, on the main process."""
        job, run, done = self.job, self.run, self.position.update
        if run is None:
            return
        if self.resume:
            run.forget_after(done, self.progress.say)
        start = {**describe_start(job.read), "first_update": done}  # first: by it a restarted process knows its run
        write_json(self.out / "record.json", [*(read_starts(self.out) if self.resume else []), start])
        write_text(self.out / "config.yaml", dump_config(job.config))
        if job.begun is not None:
            write_json(self.out / "init_from.json", job.begun._asdict())
        run.open_metrics(done, job.watched != "test")

    def _write_end(
        self, measured: Optional[Report], profile: Optional[StageSeconds], restored: Optional[int]
    ) -> Dict[str, Any]:
        """Write the files of the run, which has ended, print its closing words and return its summary, on the main process."""
        job, position, out = self.job, self.position, self.out
        assert self.run is not None and measured is not None
        costs = None if measured.events is not None else choose_stage_costs(job, profile, position)
        report = summarize(job, position, self.now.metrics, measured, self.tested, costs, self.now.stopped)
        if restored is not None:
            report["restored_step"] = restored
        if measured.times is None:
            self.run.forget("trace")  # of an earlier start's ranks
        if costs is not None and job.traced:
            write_modelled_trace(job, out, costs)
        elif job.traced:
            write_measured_trace(job, out / "trace.json.gz", measured)
        *earlier, start = read_starts(out) or [{}]
        files = {**(measured.files or {}), "memory.json": build_memory_record(job, measured)}
        files["record.json"] = [*earlier, {**start, "ended": get_timestamp()}]
        files["summary.json"] = report  # last: a run with a summary is finished
        for name, value in files.items():
            write_json(out / name, value)
        # an emulator does in one process the work of all devices
        predicted = None if get_backend(job.config).emulates else predict_rate(job)
        self.progress.say(format_closing(report, out, predicted))
        return report

    def _write_averages(self) -> None:
        """Write the averaged weights, with the newest buffers, into the run's folder."""
        state = self.engine.state()
        if state is not None and self.run is not None:
            entries = {key: value for key, value in state.optimizer.items() if key.endswith(f"/{AVERAGE}")}
            averages = {key[: -len(AVERAGE) - 1]: value for key, value in entries.items()}
            first: Dict[Any, str] = {}  # a tied weight has its average under the first of its names
            for name, parameter in self.job.model.named_parameters(remove_duplicate=False):
                if first.setdefault(parameter, name) in averages:
                    averages[name] = averages[first[parameter]]
            with atomic_file(self.out / "ema.safetensors") as file:
                checkpoint.save_tensors(file, {**state.model, **averages})

    def _restore_weights(self, step: int) -> None:
        """Load the weights of the checkpoint of `step` into the model, on every process that holds a whole model, and say so.

        Raise `BadInput` if the checkpoint is not whole any more.
        """
        job, say, path = self.job, self.progress.say, self.out / "checkpoints" / f"step-{step}"
        if step == self.position.update:
            say(f"the newest weights are the best: step {step}")
        # each process has its stage's, and no one the model
        elif are_joined() and not job.numbers.is_given and not job.wants_model:
            say(f"the best weights are those of step {step}: {path}")
        else:
            weights, blocks = run_on_main(lambda: checkpoint.read_weights(path)), get_blocks(job.model)
            with job.numbers.whole(loads=True):
                # auxiliary heads stay as they are
                checkpoint.load_weights(job.model if blocks is None else blocks.model, weights, str(path))
            say(f"the model has the best weights again, those of step {step}: {path}")

    def _train(self) -> None:
        """Carry out all updates to come."""
        job, position = self.job, self.position
        with self.progress.show_bar(job.updates, position.update, job.updates_per_epoch) as self.bar:
            while position.update < self.end:
                self._step()
                self._finish_saving(waits=False)
                done = position.update
                evaluates, saves = job.pauses_after(done)
                self._pause(evaluates, saves)
                if self.may_stop and (evaluates or saves or self.at_steps) and done < self.end:
                    self.end = self.engine.end(done, self.callbacks.asked is not None)
            if self.end < job.updates:  # as at the end of a run that was planned this long
                self.now = replace(self.now, stopped=self.callbacks.asked)
                if self.unwritten:
                    self._log(self.unwritten)
                evaluated, saved = job.pauses_after(self.end)
                self._pause(not evaluated, not saved)
        self.bar = None

    def _pause(self, evaluates: bool, saves: bool) -> None:
        """Evaluate and save a checkpoint, where that is planned, and call the callbacks."""
        if evaluates:
            self._evaluate(self.job.watched)
            self._call_back("on_evaluation")
        if saves:
            self._save()

    def _step(self) -> None:
        """Carry out one update, and log its results and those of the updates before it that were not read yet."""
        job, position, engine = self.job, self.position, self.engine
        k = position.update
        start = time.perf_counter()
        results = engine.step(k, self._reads_after(k + 1))
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
        assert self.bar is not None
        for update_index, result in enumerate(results, position.update - len(results)):
            position.add_update(result.loss, begins_epoch=update_index % job.averaged == 0)
            self.bar.advance(result.loss, result.accuracy if shows_accuracy else None, rate)
        epoch, losses = job.epoch(position.update), tuple(loss for loss, _ in result.blocks) or (result.loss,)
        self.unwritten = {
            "step": position.update, "epoch": epoch, "train_loss": result.loss, "lr": job.rate(k), "samples_per_second": rate,
            **({"block_train_loss": list(losses)} if result.blocks else {}),
        }  # fmt: skip
        self.now = replace(
            self.now, step=position.update, epoch=epoch, losses=losses, rate=job.rate(k), samples_per_second=rate
        )
        if position.update % job.config.log.every == 0 or position.update == job.updates:
            self._log(self.unwritten)
            self.unwritten = {}
        if job.watches_gradients:
            before, gradients = self.now, engine.collect_gradients(k)
            self.now = replace(before, gradients=gradients)
            self._call_back("on_gradients")
            self.now = before
        if self.at_steps:
            self._call_back("on_step")

    def _log(self, line: Dict[str, Any]) -> None:
        """Write a line of metrics.jsonl and call the callbacks."""
        self.log(**line)
        if self.log is not log_nothing:
            self.now = replace(self.now, line=line)
            self._call_back("on_log")

    def _call_back(self, method: str) -> None:
        """Call `method` of the user's callbacks, with the whole model where they want it."""
        gathers = self.job.wants_model and method in ("on_start", "on_evaluation", "on_checkpoint")
        with self.engine.hold_whole_model() if gathers else contextlib.nullcontext():
            if self.callbacks.own:
                self.now = replace(self.now, model=self.engine.current_model())
                self.callbacks.call(method, self.now)

    def _reads_after(self, done: int) -> bool:
        """Return whether the results must be read after `done` updates: for a line, an evaluation or a checkpoint.

        They are after the first call too, whose time does not count.
        """
        job, known = self.job, self.at_steps or not self.progress.steps
        return known or done % job.config.log.every == 0 or any(job.pauses_after(done))

    def _evaluate(self, split: str) -> EvaluationResult:
        """Evaluate on the test or validation set, log the result and return that of the model's own output."""
        job, position, results = self.job, self.position, self.engine.evaluate(split)
        whole, epoch = results[-1], job.epoch(position.update)
        if split == "test":
            self.tested = results
        if self.bar is not None:
            self.bar.show_evaluation(whole, split)
        by_block = collect_by_block(results, split) if len(results) > 1 else {}
        record, best = whole.to_record(f"{split}_"), f"{split}_{job.config.evaluate.best}"
        if split == job.watched:
            position.add_evaluation(best, record.get(best))
            if job.plateau is not None and position.update:
                job.plateau.step(record.get(f"{split}_{job.config.lr_schedule.metric or 'loss'}"))
                position.plateau = job.plateau.state()
        # the test at the end is beside the last validation
        validated = self.now.metrics if split == "test" and position.update else {}
        self.now = replace(self.now, step=position.update, epoch=epoch, metrics={**validated, **record})
        self._log({"step": position.update, "epoch": epoch, **record, **by_block})
        return whole

    def _save(self) -> None:
        """Write a checkpoint, to which every process contributes its part, or begin to.

        Raise `RunFault` if the disk refuses.
        """
        engine, position, settings = self.engine, self.position, self.job.config.checkpoint
        self._finish_saving()  # of the one before
        if settings is None:
            return
        state = engine.state() if engine.checkpoint_group is None else engine.part()
        self.is_saving = True
        if state is not None:
            self.best_steps = [position.best_step, *self.callbacks.list_best_steps()]
            manifest = make_manifest(self.job, position, state.plain, self.callbacks.collect_states())
            self.saver.start(position.update, state, manifest, settings.background)
        self._finish_saving(waits=not settings.background)

    def _finish_saving(self, waits: bool = True) -> None:
        """Delete older checkpoints and call the callbacks when the one that was begun is whole.

        Raise `RunFault` if it could not be written.
        """
        if not self.is_saving or (self.job.wants_model and not waits):  # the whole model is there when the pipeline is empty
            return
        folder, settings = self.saver.finish(waits), self.job.config.checkpoint
        if folder is not None and settings is not None and self.run is not None:
            checkpoint.prune(self.run.checkpoints, settings.keep, self.best_steps)
            self.now = replace(self.now, checkpoint=folder)
        if folder is not None or waits:
            self.is_saving = False
            self._call_back("on_checkpoint")
